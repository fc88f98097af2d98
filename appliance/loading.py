"""Loading the engine as a command does it: without the progress bars of local files."""

from vlm_engine import Engine, EngineConfig


def load_engine(config: EngineConfig) -> Engine:
    """The engine of `config`; downloads from a hub still show their progress.

    Raises `ModelLoadError` when the model cannot be loaded.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    return Engine(config)
