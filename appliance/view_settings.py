"""What is looked at in a camera's picture, in Frigate's words: objects, zones, lines and masks.

Coordinates are `x,y` pairs from 0 to 1, or pixels of `detect.width` x `detect.height`: one text
`"0.1,0.5,0.9,0.5,…"` or a list.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from appliance.describe_settings import ViewDescribeSettings
from appliance.settings_part import Names, SettingsPart

Corners = tuple[tuple[float, float], ...]

_FLAT = 1e-9
"""An area, in shares of the picture, that is none: what rounding leaves of points on one line."""


def _read_corners(value: object) -> object:
    """Pairs of numbers out of all the forms in which Frigate writes them."""
    numbers = list(_numbers(value))
    if not numbers or len(numbers) % 2:
        raise ValueError("coordinates must be pairs of numbers: x,y,x,y,…")
    if max(numbers) > 1 and (shares := [number for number in numbers if 0 < number < 1]):
        raise ValueError(
            f"coordinates must all be from 0 to 1, or all be pixels, not {shares[0]:g} and {max(numbers):g}"
        )
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if isinstance(value, Sequence) and not isinstance(value, str):
        for part in value:
            yield from [_number(part)] if _is_plain(part) else _numbers(part)
        return
    raise ValueError("coordinates must be a text or a list of numbers: x,y,x,y,…")


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and "," not in value)


def _number(value: Any) -> float:
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"coordinates must be numbers, not {value!r}") from None
    if not 0 <= number < 1e6:
        raise ValueError(f"coordinates must be from 0 to 1, or pixels, not {value}")
    return number


def _check_area(corners: Corners) -> Corners:
    if len(corners) < 3:
        raise ValueError(f"coordinates must be of 3 points or more, not {len(corners)}")
    x1, y1 = corners[0]
    x2, y2 = max(corners, key=lambda corner: abs(corner[0] - x1) + abs(corner[1] - y1))
    if all(abs((x2 - x1) * (y - y1) - (y2 - y1) * (x - x1)) < _FLAT for x, y in corners):
        raise ValueError("coordinates must be around an area, and these points lie on one line")
    return corners


def _check_ends(corners: Corners) -> Corners:
    if len(corners) != 2:
        raise ValueError(
            f"coordinates of a line must be of 2 points, not {len(corners)}: give a line a stretch"
        )
    if corners[0] == corners[1]:
        raise ValueError("coordinates of a line must be of two different points")
    return corners


def _read_masks(value: object) -> object:
    """A list of areas out of one text, a list of texts, or Frigate's newer table of named masks."""
    if not value:
        return []
    if isinstance(value, Mapping):
        return [mask["coordinates"] for name, mask in value.items() if _is_enabled(name, mask)]
    is_one = isinstance(value, str) or (isinstance(value, Sequence) and all(map(_is_plain, value)))
    return [value] if is_one else value


def _is_enabled(name: object, mask: object) -> bool:
    if not isinstance(mask, Mapping) or "coordinates" not in mask:
        raise ValueError(f"mask {name!r}: coordinates are missing")
    if unknown := [key for key in mask if key not in {"coordinates", "enabled", "friendly_name"}]:
        raise ValueError(f"mask {name!r}: unknown key {unknown[0]!r}; allowed: coordinates, enabled")
    return mask.get("enabled", True) is not False


Area = Annotated[Corners, BeforeValidator(_read_corners), AfterValidator(_check_area)]
Masks = Annotated[tuple[Area, ...], BeforeValidator(_read_masks)]


class DetectSettings(SettingsPart):
    """What the detector is given: at most so many pixels and frames a second; None leaves it to the camera.

    A frame larger than `width` x `height` is made smaller and keeps its proportions.
    """

    enabled: bool = True
    width: int | None = Field(default=None, ge=32, le=8192)
    height: int | None = Field(default=None, ge=32, le=8192)
    fps: float | None = Field(default=None, gt=0, le=120)

    @field_validator("enabled")
    @classmethod
    def _check_enabled(cls, value: bool) -> bool:
        if not value:
            raise ValueError("detection cannot be switched off alone: use the camera's own enabled: false")
        return value


class FilterSettings(SettingsPart):
    """What an object of one class must be like to be believed; None leaves it open.

    `min_score` is the lowest score that starts a track, `threshold` the lowest median of its scores. Areas
    are in pixels of `detect.width` x `detect.height` if both are given, else of the frame, or below 1 a share
    of the picture; ratios are width by height. In `mask` none can stand.
    """

    min_score: float | None = Field(default=None, ge=0, le=1)
    threshold: float | None = Field(default=None, ge=0, le=1)
    min_area: float | None = Field(default=None, ge=0)
    max_area: float | None = Field(default=None, ge=0)
    min_ratio: float | None = Field(default=None, ge=0)
    max_ratio: float | None = Field(default=None, ge=0)
    mask: Masks = ()

    def problems(self) -> Iterator[str]:
        """What lets nothing pass, each with its key."""
        limits = {"area": (self.min_area, self.max_area), "ratio": (self.min_ratio, self.max_ratio)}
        for name, (low, high) in limits.items():
            if low is None or high is None or low <= high:
                continue
            # why: an area below 1 is a share, others are pixels
            if name == "ratio" or (low < 1) == (high < 1):
                yield f"min_{name}: {low:g} is above max_{name}, {high:g}, so nothing passes"


class ObjectSettings(SettingsPart):
    """Which classes are tracked (None: all that the detector gives, empty: none), and what is believed.

    Where the bottom centre of its box lies in `mask`, no object is believed.
    """

    track: Names | None = None
    filters: dict[str, FilterSettings] = Field(default_factory=dict)
    mask: Masks = ()


class MotionSettings(SettingsPart):
    """Who was never seen outside of `mask` causes no description; others may walk through it."""

    mask: Masks = ()


class PrivacySettings(SettingsPart):
    """Areas that are painted over as soon as a frame is read, before anybody or any model sees it."""

    mask: Masks = ()


class ZoneSettings(SettingsPart):
    """An area; an object is in it when the bottom centre of its box is.

    It counts after `inertia` frames in a row and `loitering_time` seconds, and only for `objects` if given.
    """

    coordinates: Area
    objects: Names = ()
    inertia: int = Field(default=3, ge=1)
    loitering_time: float = Field(default=0.0, ge=0)
    enabled: bool = True
    friendly_name: str | None = None


class LineSettings(SettingsPart):
    """A line between two points; `direction` is the side that a crossing goes to, as seen from the first."""

    coordinates: Annotated[Corners, BeforeValidator(_read_corners), AfterValidator(_check_ends)]
    objects: Names = ()
    direction: Literal["both", "left", "right"] = "both"


class SnapshotSettings(SettingsPart):
    """Whether the picture that was described is kept with its event."""

    enabled: bool = True


class ViewSettings(SettingsPart):
    """All that is to know of a camera but where its frames come from; `friendly_name` is for people."""

    enabled: bool = True
    friendly_name: str | None = None
    detect: DetectSettings = DetectSettings()
    objects: ObjectSettings = ObjectSettings()
    motion: MotionSettings = MotionSettings()
    privacy: PrivacySettings = PrivacySettings()
    zones: dict[str, ZoneSettings] = Field(default_factory=dict)
    lines: dict[str, LineSettings] = Field(default_factory=dict)
    snapshots: SnapshotSettings = SnapshotSettings()
    describe: ViewDescribeSettings = ViewDescribeSettings()

    @property
    def max_fps(self) -> float | None:
        """Frames a second to look at; None for all."""
        return self.detect.fps

    def problems(self, unread: Collection[str] = ()) -> Iterator[str]:
        """What cannot be together: each with its path, which begins with a dot.

        `unread` are zones and lines that are missing here only because of mistakes in them.
        """
        for path, corners in self._all_corners():
            if max(map(max, corners)) <= 1:
                continue
            width, height = self.detect.width, self.detect.height
            if width is None or height is None:
                yield (
                    f"{path}: in pixels, so detect.width and detect.height must say of what size; "
                    "or give fractions from 0 to 1"
                )
            elif any(x > width or y > height for x, y in corners):
                yield f"{path}: a point lies outside of detect.width x detect.height, {width}x{height}"
        for label, one in self.objects.filters.items():
            yield from (f".objects.filters.{label}.{problem}" for problem in one.problems())
        triggers = self.describe.triggers
        for path_of_names, names, known in (
            ("required_zones", self.describe.required_zones, self.zones),
            ("triggers.zone_entry", triggers.zone_entry, self.zones),
            ("triggers.line_crossing", triggers.line_crossing, self.lines),
            ("triggers.dwell.zones", triggers.dwell and triggers.dwell.zones, self.zones),
        ):
            chosen = [name for name in names if name not in unread] if isinstance(names, tuple) else []
            yield from self._wrong_names(path_of_names, chosen, known)

    def _wrong_names(
        self, path: str, chosen: Sequence[str], known: "Mapping[str, ZoneSettings | LineSettings]"
    ) -> Iterator[str]:
        for name in chosen:
            if name not in known:
                yield f".describe.{path}: no {name!r} here; there is {', '.join(known) or 'none'}"
        if chosen and not any(getattr(known.get(name), "enabled", True) for name in chosen):
            yield (
                f".describe.{path}: all of {', '.join(chosen)} are switched off, so nothing is a reason; "
                "enable one or name another"
            )

    def _all_corners(self) -> Iterator[tuple[str, Corners]]:
        for section in ("objects", "motion", "privacy"):
            for mask in getattr(self, section).mask:
                yield f".{section}.mask", mask
        for label, one in self.objects.filters.items():
            for mask in one.mask:
                yield f".objects.filters.{label}.mask", mask
        for name, zone in self.zones.items():
            yield f".zones.{name}.coordinates", zone.coordinates
        for name, line in self.lines.items():
            yield f".lines.{name}.coordinates", line.coordinates
