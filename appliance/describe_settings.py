"""When a camera's picture is described, what the model is shown of it, and what it is asked."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from appliance.ladder import LadderConfig
from appliance.settings_part import Names, SettingsPart
from vlm_engine.errors import EngineError
from vlm_engine.sampling_params import StructuredOutput
from vlm_engine.trial import check_grammar

PLACEHOLDERS = ("camera", "label", "zones", "time")
"""What a prompt may say in braces, filled in for each frame."""

_BRACES = re.compile(r"\{([A-Za-z_]\w*)\}")


def _check_prompt(prompt: str) -> str:
    # why: braces around anything but a name may be JSON that is wanted
    for name in _BRACES.findall(prompt):
        if name not in PLACEHOLDERS:
            known = ", ".join(f"{{{each}}}" for each in PLACEHOLDERS)
            raise ValueError(f"{{{name}}} means nothing in a prompt; {known} do")
    return prompt


Prompt = Annotated[str, Field(min_length=1), AfterValidator(_check_prompt)]


class DwellSettings(SettingsPart):
    """Who stays for so many `seconds`: in view, or in one of `zones`."""

    seconds: float = Field(gt=0)
    zones: Names = ()


class TriggerSettings(SettingsPart):
    """What is a reason for a description.

    `new_track` is each visit, `zone_entry` and `line_crossing` are true for all zones and lines or name some,
    `dwell` is who stays, `periodic` a scene that was not described for so many seconds. A plain list of names
    means these and no others.
    """

    new_track: bool = True
    zone_entry: bool | Names = False
    line_crossing: bool | Names = False
    dwell: DwellSettings | None = None
    periodic: float | None = Field(default=None, gt=0)

    @field_validator("dwell", mode="before")
    @classmethod
    def _read_dwell(cls, value: object) -> object:
        is_number = isinstance(value, int | float | str) and not isinstance(value, bool)
        return {"seconds": value} if is_number else value


class ViewDescribeSettings(SettingsPart):
    """What may differ from camera to camera.

    `labels` (or `objects`) None means the people, vehicles and animals that are tracked, an empty list all
    classes. `cooldown_s` (or `cooldown`) is per class, `camera_cooldown_s` and `track_cooldown_s` hold back
    besides; `min_hits` are frames, `min_area` is a share of the frame. With `required_zones` only who was in
    one of them is a reason. `prompt` may say `{camera}`, `{label}`, `{zones}` and `{time}`; `object_prompts`
    are by class. Up to `max_images` pictures of the track go into one prompt, `image_interval` seconds apart:
    the whole `frame`, or a `crop` around the object with a margin as a share of its size. As a `clip`
    they are frames of a video to models that read videos, if they are of one size. `max_side` bounds the
    picture's longer side in pixels (None: what suits the model). `context` tells the model camera, time
    and zones too and to speak of nothing else (None: not the bundled one, which was trained without).
    While a live frame's job waits, a newer one takes its place (`replace`): one of the same `camera`, of the
    same `track` (each visit keeps a place then), or with `none` no one.
    With `answer_schema` (or `schema`) the answer is JSON of that schema, of up to four times `max_tokens`.
    `similarity` leaves out frames that show what was described last, to that degree from 0 to 1 (None: none).
    """

    whole = frozenset({"answer_schema"})

    enabled: bool = True
    labels: Names | None = None
    prompt: Prompt | None = None
    object_prompts: dict[str, Prompt] = Field(default_factory=dict)
    required_zones: Names = ()
    triggers: TriggerSettings = TriggerSettings()
    cooldown_s: float = Field(default=10.0, ge=0)
    camera_cooldown_s: float = Field(default=0.0, ge=0)
    track_cooldown_s: float = Field(default=0.0, ge=0)
    similarity: float | None = Field(default=None, gt=0, le=1)
    min_score: float = Field(default=0.4, ge=0, le=1)
    min_area: float = Field(default=0.002, ge=0, le=1)
    min_hits: int = Field(default=3, ge=1)
    max_images: int = Field(default=1, ge=1, le=8)
    image_interval: float = Field(default=1.0, gt=0)
    images_as: Literal["pictures", "clip"] = "pictures"
    image: Literal["frame", "crop"] = "frame"
    crop_margin: float = Field(default=0.25, ge=0, le=10)
    max_side: int | None = Field(default=None, ge=64, le=8192)
    context: bool | None = None
    answer_schema: dict[str, Any] | None = None
    replace: Literal["camera", "track", "none"] = "camera"

    @field_validator("answer_schema")
    @classmethod
    def _check_schema(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is None:
            return None
        try:
            check_grammar(StructuredOutput.of_json(schema, "the schema"))
        except EngineError as error:
            raise ValueError(str(error)) from None
        return schema

    @field_validator("triggers", mode="before")
    @classmethod
    def _read_triggers(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        plain = ("new_track", "zone_entry", "line_crossing")
        if wrong := [name for name in value if name not in plain]:
            raise ValueError(
                f"a list of triggers may name {', '.join(plain)}, not {wrong[0]!r}; "
                "dwell and periodic need their seconds: dwell: 20, periodic: 60"
            )
        return {name: name in value for name in plain} | {"dwell": None, "periodic": None}


class DescribeSettings(ViewDescribeSettings):
    """What holds for all cameras that do not say otherwise, and what holds for all of them together.

    `max_age_s` is how long after its capture a live frame is worth describing (half of it at least from when
    it is queued, however slow the detector), `concurrency` how many descriptions the engine works on at once.
    `degrade` says how far quality may give way when frames wait.
    """

    max_tokens: int = Field(default=64, ge=1, le=4096)
    max_age_s: float = Field(default=5.0, gt=0)
    degrade: LadderConfig = LadderConfig()
    concurrency: int = Field(default=4, ge=1, le=256)
