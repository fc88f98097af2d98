"""Under what name a model is shown to others."""

from pathlib import Path


def shown_model_name(model: str) -> str:
    """The last part of a model's folder; a hub name as it is.

    # why: where a model lies on this machine is nobody's business.
    """
    path = Path(model)
    return path.name if path.is_absolute() or path.is_dir() else model
