"""Settings: a YAML file, over it the environment (`APPLIANCE_…`, nested by `__`), over both the command line.

Each library owns its part as a frozen dataclass; this module nests them. An unknown key and a value that
cannot be are `SettingsError`s that name the path in the file and what is allowed. No torch is imported.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)
from pydantic_settings import SettingsError as SourceError

from appliance.camera_settings import CameraSettings, complete, completed, misfits
from appliance.describe_settings import DescribeSettings, ViewDescribeSettings
from appliance.device_sharing import DetectorSettings
from appliance.frigate import (
    WRITTEN,
    as_written,
    fill_variables,
    in_our_words,
    why_no_cooldown,
    why_unsupported,
)
from appliance.output_settings import OutputSettings
from appliance.settings_part import MAX_TEXT, SettingsPart
from appliance.settings_paths import Location, by_folder, without
from appliance.storage_settings import EventSettings, RedisSettings
from appliance.view_settings import (
    DetectSettings,
    MotionSettings,
    ObjectSettings,
    SnapshotSettings,
    ViewSettings,
)
from appliance.yaml_file import parse_yaml
from queues.config import QueueConfig
from vlm_engine.config import EngineConfig

MODELS_DIR = Path(__file__).parent / "models"
BUNDLED_DETECTOR = str(MODELS_DIR / "yolo26n-scenes.pt")
BUNDLED_VLM = str(MODELS_DIR / "vlm")
DEFAULT_LABELS = ("person", "bicycle", "car", "motorcycle", "bus", "truck", "dog", "cat")

MOST_ROUNDS = 10
"""How often mistakes are taken out to see what is behind them."""

_UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}
_NO_UTF8 = "is no UTF-8, as settings have to be: a file or folder of such a name needs another one"
_BYTES = {"string_unicode", "path_type"}
_SECRET = {"source", "path", "url", "api_key", "password", "secret", "headers"}


class SettingsError(ValueError):
    """The settings cannot be used; one line a problem: where it is, what is wrong, what is allowed."""


def _with_defaults(**defaults: object) -> BeforeValidator:
    """Fills what a library's dataclass leaves to its user, so that a file may name only what differs."""

    def fill(value: object) -> object:
        return {**defaults, **value} if isinstance(value, Mapping) else value

    return BeforeValidator(fill)


def _check_detector(config: DetectorSettings) -> DetectorSettings:
    for name in ("conf", "iou"):
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{name} must be from 0 to 1, not {getattr(config, name)}")
    if config.imgsz is not None and config.imgsz < 32:
        raise ValueError(f"imgsz must be 32 or more, not {config.imgsz}")
    if not 0 < config.min_fps <= 1000:
        raise ValueError(f"min_fps must be above 0 and at most 1000, not {config.min_fps}")
    if config.num_threads is not None and config.num_threads < 1:
        raise ValueError(f"num_threads must be 1 or more, not {config.num_threads}")
    if config.collect_ms is not None and not 0 <= config.collect_ms <= 1000:
        raise ValueError(f"collect_ms must be from 0 to 1000, not {config.collect_ms}")
    return config


class ServerSettings(SettingsPart):
    """Where the HTTP API listens; with an `api_key` every request must carry it as a bearer token.

    `metrics_per_camera` tells the cameras apart in `/metrics`, by their names.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_key: SecretStr | None = None
    metrics_per_camera: bool = False

    @property
    def url(self) -> str:
        """Where a client on this machine finds the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host.strip("[]"), self.host.strip("[]"))
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def key(self) -> str | None:
        """The API key in clear, None when there is none; an empty one counts as none."""
        return (self.api_key.get_secret_value() or None) if self.api_key else None


class Settings(BaseSettings):
    """All settings of one appliance; without a file they are the demo's: bundled models, embedded Valkey."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        str_max_length=MAX_TEXT,
        env_prefix="APPLIANCE_",
        env_nested_delimiter="__",
    )

    engine: Annotated[EngineConfig, _with_defaults(model=BUNDLED_VLM, device="auto", cost_cache="auto")] = (
        EngineConfig(model=BUNDLED_VLM, device="auto", cost_cache="auto")
    )
    detector: Annotated[
        DetectorSettings,
        _with_defaults(model=BUNDLED_DETECTOR, device="auto", runtime="auto"),
        AfterValidator(_check_detector),
    ] = DetectorSettings(model=BUNDLED_DETECTOR, device="auto", runtime="auto")
    tracker: Literal["bytetrack", "botsort"] = "bytetrack"
    queue: QueueConfig = QueueConfig()
    redis: RedisSettings = RedisSettings()
    describe: DescribeSettings = DescribeSettings()
    detect: DetectSettings = DetectSettings()
    objects: ObjectSettings = ObjectSettings()
    motion: MotionSettings = MotionSettings()
    snapshots: SnapshotSettings = SnapshotSettings()
    cameras: dict[str, CameraSettings] = {}
    events: EventSettings = EventSettings()
    outputs: OutputSettings = OutputSettings()
    server: ServerSettings = ServerSettings()

    @field_validator("cameras", mode="after")
    @classmethod
    def _complete_cameras(
        cls, cameras: dict[str, CameraSettings], info: ValidationInfo
    ) -> dict[str, CameraSettings]:
        # why: a part that is wrong itself is missing here, and told by itself
        return complete(cameras, _common_view(info.data))

    def view_of(self, camera: str) -> ViewSettings:
        """What holds for a camera; for one that is not configured, what holds for all."""
        return self.cameras.get(camera) or _common_view(dict(self))

    def picture_side(self, view: ViewSettings) -> int:
        """Longest side in pixels of a picture for the model; the bundled one was trained on 448."""
        return view.describe.max_side or (448 if self.is_bundled_vlm else 1280)

    @property
    def is_bundled_vlm(self) -> bool:
        """Whether the model is the demo's."""
        return self.engine.model == BUNDLED_VLM


def _common_view(parts: Mapping[str, Any]) -> ViewSettings:
    """What holds for all cameras, out of the parts of the settings."""
    given = {name: parts[name] for name in ("detect", "objects", "motion", "snapshots") if name in parts}
    describe = parts.get("describe", DescribeSettings())
    shared = {name: getattr(describe, name) for name in ViewDescribeSettings.model_fields}
    return ViewSettings(**given, describe=ViewDescribeSettings.model_construct(**shared))


def load_settings(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """The settings of a YAML file (or none), over it the environment, over both `overrides`.

    Paths in the file go by the folder that it lies in, others by the working directory.
    Raises `SettingsError` with one line a problem.
    """
    settings, lines = read_settings(path, overrides)
    if settings is None or lines:
        raise SettingsError("\n".join(lines))
    return settings


def read_settings(
    path: Path | None = None, overrides: Mapping[str, Any] | None = None
) -> tuple[Settings | None, list[str]]:
    """The same without raising: the settings without what is wrong in them, and what that is, a line each.

    The settings are None when nothing can be read.
    """
    where, left_out, missing = path or "settings", list[Location](), dict[Location, str]()
    try:
        data, renamed = ({}, {}) if path is None else _read_file(path, missing)
    except SettingsError as error:
        return None, str(error).splitlines()
    lines = [f"{where}: {line}" for line in _explain_missing(missing, renamed)]
    for base in (Settings, *[_SalvagedSettings] * MOST_ROUNDS):
        try:
            settings = _loaded(base, data, overrides or {}, left_out)
        except ValidationError as error:
            found = [one for one in error.errors(include_url=False) if _place(one)[0] not in missing]
            problems = [one for one in found if base is Settings or _is_own(one["loc"])]
            lines += [f"{where}: {line}" for line in _explain(problems, renamed)]
            left_out += [_place(one)[0] for one in error.errors() if one["loc"] != ("cameras",)]
        except SourceError as error:
            return None, [*lines, f"environment: {error}: lists and tables are written as JSON"]
        else:
            if base is Settings and missing:
                left_out += missing
                continue
            unfit = misfits(settings.cameras, _unread(left_out)) if lines else []
            more = [f"{where}: cameras{line if line.startswith('.') else f': {line}'}" for line in unfit]
            return settings, [*lines, *(line for line in more if line not in lines)]
    return None, lines


def _unread(left_out: Iterable[Location]) -> dict[str, set[str]]:
    """The zones and lines of each camera that were taken out for mistakes in them."""
    names: dict[str, set[str]] = {}
    for location in left_out:
        if len(location) > 3 and location[0] == "cameras" and location[2] in ("zones", "lines"):
            names.setdefault(str(location[1]), set()).add(str(location[3]))
    return names


def _is_own(location: Location) -> bool:
    """Whether a mistake found behind another is one by itself: some parts tell one at a time."""
    return location[0] in {"detector", "engine", "queue"}


class _SalvagedSettings(Settings):
    """Settings whose cameras may say what does not fit together."""

    @field_validator("cameras", mode="after")
    @classmethod
    def _complete_cameras(
        cls, cameras: dict[str, CameraSettings], info: ValidationInfo
    ) -> dict[str, CameraSettings]:
        return completed(cameras, _common_view(info.data))


def _loaded(
    base: type[Settings],
    data: Mapping[str, Any],
    overrides: Mapping[str, Any],
    left_out: Iterable[Location] = (),
) -> Settings:
    """The settings out of all that says some; raises `ValidationError` or pydantic's `SettingsError`."""

    class Loaded(base):  # type: ignore[valid-type,misc]
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            environment, _ = in_our_words(env_settings())
            sources = (without(environment, left_out), without(data, left_out))
            return init_settings, *(InitSettingsSource(settings_cls, init_kwargs=one) for one in sources)

    given = without(in_our_words(overrides)[0], left_out)
    return Settings.model_construct(**dict(Loaded(**given)))


def to_json(settings: Settings) -> bytes:
    """The settings for a child process, which reads them with `from_json`; secrets in clear."""

    def plain(value: object) -> str:
        return value.get_secret_value() if isinstance(value, SecretStr) else str(value)

    return json.dumps(settings.model_dump(), default=plain).encode()


def from_json(line: str | bytes) -> Settings:
    """What `to_json` wrote; raises `SettingsError`, which repeats nothing of it, since that holds secrets."""
    try:
        return Settings.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in problem["loc"]) or "settings"
        raise SettingsError(f"{where}: {problem['msg']}") from None


def _read_file(path: Path, missing: dict[Location, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """What the file says in our words, and how it said what it said in others."""
    # why: what is left out as it is switched off needs no variables
    words, renamed = in_our_words(_read_yaml(path))
    return by_folder(fill_variables(words, missing), path.parent), renamed


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file: check --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SettingsError(f"{path}: must be a table of keys such as 'cameras:', not {type(data).__name__}")
    return {str(key): value for key, value in data.items()}


def _explain_missing(missing: Mapping[Location, str], renamed: Mapping[str, str]) -> Iterator[str]:
    for location, names in missing.items():
        yield f"{as_written(location, renamed)}: the environment has no {names}"


def _explain(problems: Iterable[Mapping[str, Any]], renamed: Mapping[str, str]) -> Iterator[str]:
    for problem in problems:
        location, message = _place(problem)
        written = as_written(location, renamed)
        if location[-1] == "[key]":
            yield f"{_dotted(location[:-2])}: the name {problem['input']!r} is no text: put it in quotes"
        elif problem["type"] in _UNKNOWN:
            yield f"{written}: {_why_unknown(location)}"
        elif problem["type"] in _BYTES and isinstance(problem["input"], str):
            yield f"{written}: {_NO_UTF8}"
        elif problem["type"] == "missing":
            yield f"{written}: is missing and has no default"
        else:
            shown = _shown(problem["input"], written)
            for line in message.splitlines():
                yield f"{written}{line}" if line.startswith(".") else f"{written}: {line}{shown}"


def _dotted(location: Location) -> str:
    return ".".join(str(part) for part in location)


def _place(problem: Mapping[str, Any]) -> tuple[Location, str]:
    """Where something is wrong, and what."""
    location, message = problem["loc"], problem["msg"].removeprefix("Value error, ")
    # why: a check of a whole part knows the field but not where the part stands.
    field, _, rest = message.partition(" ")
    if problem["type"] not in _UNKNOWN and field.rstrip(":") in _known_keys(location):
        return (*location, field.rstrip(":")), rest
    return location, message


def _why_unknown(location: Location) -> str:
    if reason := why_unsupported(location):
        return f"a key of Frigate's that is not supported: {reason}; remove it"
    if reason := why_no_cooldown(location):
        return reason
    known = sorted(WRITTEN.get(key, key) for key in _known_keys(location[:-1]))
    return f"unknown key; allowed here: {', '.join(known)}"


def _shown(value: object, dotted: str) -> str:
    # why: a camera's URL or a key may hold a password, and error lines end in logs.
    is_secret = not _SECRET.isdisjoint(dotted.split(".")) or "://" in str(value)
    return "" if is_secret or isinstance(value, dict | list | tuple) else f", got {value!r}"


def _known_keys(location: Location) -> list[str]:
    """The keys that may stand at `location`, found by walking the types from `Settings` down."""
    current: Any = Settings
    for part in location:
        current = _field_types(current).get(str(part)) or _item_type(current)
    return sorted(_field_types(current))


def _field_types(owner: Any) -> dict[str, Any]:
    if isinstance(owner, type) and issubclass(owner, BaseModel):
        return {name: field.annotation for name, field in owner.model_fields.items()}
    if dataclasses.is_dataclass(owner):
        return dict(typing.get_type_hints(owner))
    if isinstance(owner, types.UnionType):
        return {name: kind for part in typing.get_args(owner) for name, kind in _field_types(part).items()}
    return {}


def _item_type(owner: Any) -> Any:
    arguments = [one for one in typing.get_args(owner) if one not in (Ellipsis, type(None))]
    return arguments[-1] if arguments else None
