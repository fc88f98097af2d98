"""What every part of the settings is made of."""

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

T = TypeVar("T", bound="SettingsPart")

MAX_TEXT = 100_000
"""Characters of one text. It also makes half a character an error, which no JSON could hand on."""


class SettingsPart(BaseModel):
    """A part of the settings: unknown keys are errors, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_max_length=MAX_TEXT)

    whole: ClassVar[frozenset[str]] = frozenset()
    """Tables that are inherited as a whole, not key by key."""


def _split_commas(value: object) -> object:
    """`"person, car"`, as an environment variable gives it, as a list; everything else as it is."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_split_commas)]


def inherit(base: T, own: T) -> T:
    """`base` with what was set in `own` in its place; tables are joined key by key."""
    update = {name: getattr(own, name) for name in own.model_fields_set}
    for name in update.keys() - own.whole:
        update[name] = _joined(getattr(base, name), update[name])
    return base.model_copy(update=update)


def _joined(base: Any, own: Any) -> Any:
    if isinstance(base, SettingsPart) and type(base) is type(own):
        return inherit(base, own)
    if isinstance(base, dict) and isinstance(own, dict):
        return base | {key: _joined(base.get(key), value) for key, value in own.items()}
    return own
