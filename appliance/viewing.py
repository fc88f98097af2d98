"""From the settings of a camera to how its frames are looked at."""

from collections.abc import Iterable, Mapping

from appliance.camera_settings import CameraSettings
from appliance.describe_settings import TriggerSettings
from appliance.settings import DEFAULT_LABELS, Settings
from appliance.view_settings import Corners, DetectSettings, FilterSettings, ViewSettings
from vision.detector import Detector
from vision.errors import UnknownClass
from vision.filters import FilterConfig, ObjectFilter
from vision.history import HistoryConfig
from vision.options import SourceOptions
from vision.pipeline import CameraConfig, Pipeline
from vision.polygons import Line, Point, Polygon
from vision.trigger import SCENE, TriggerConfig
from vision.zones import LineConfig, ZoneConfig


def wanted_labels(view: ViewSettings, detector: Detector) -> tuple[str, ...] | None:
    """The classes worth a description: what was asked for, what is tracked, or the usual; None: all."""
    track, asked_for = view.objects.track, view.describe.labels
    if asked_for is not None:
        return tuple(label for label in asked_for if track is None or label in track) if asked_for else None
    given = detector.config.classes or tuple(detector.names.values())
    return tuple(label for label in DEFAULT_LABELS if label in given) if track is None else track


def camera_config(
    settings: Settings,
    detector: Detector,
    name: str,
    *,
    view: ViewSettings | None = None,
    frame_rate: float | None,
    is_video: bool = True,
) -> CameraConfig:
    """How the frames of one camera are looked at; `view` None takes what the settings say of that camera.

    Raises `UnknownClass` for a class that is to be described and that the detector does not give; others are
    found by the `Pipeline`.
    """
    view = view or settings.view_of(name)
    describe = view.describe
    _check_described(view, detector, name)
    return CameraConfig(
        name,
        frame_rate,
        settings.tracker,
        _trigger_config(view, wanted_labels(view, detector)),
        is_video,
        _filter_config(view),
        HistoryConfig(describe.max_images - 1, describe.image_interval, settings.picture_side(view)),
    )


def _check_described(view: ViewSettings, detector: Detector, name: str) -> None:
    # why: of classes to describe only those that are tracked go on, and a prompt may wait for one for ever
    given = detector.config.classes or tuple(detector.names.values())
    named = [*(view.describe.labels or ()), *(x for x in view.describe.object_prompts if x != SCENE)]
    if unknown := [label for label in dict.fromkeys(named) if label not in given]:
        raise UnknownClass(unknown, given, f"the detector (for camera {name!r})")


def check_labels(settings: Settings, detector: Detector, names: Iterable[str] = ("any",)) -> None:
    """Raises `UnknownClass` when a class is to be looked for that the detector does not give."""
    Pipeline(detector, [camera_config(settings, detector, name, frame_rate=None) for name in names])


def privacy_masks(view: ViewSettings) -> tuple[Polygon, ...]:
    """What is to be painted over in every frame of a camera."""
    return _polygons(view.privacy.mask, view.detect)


def recording_options(view: ViewSettings) -> SourceOptions:
    """How a recording is read that is looked at as a camera is: turned, as small, with the same masks."""
    rotate = view.rotate if isinstance(view, CameraSettings) else 0
    return SourceOptions(
        rotate=rotate,
        max_width=view.detect.width,
        max_height=view.detect.height,
        masks=privacy_masks(view),
    )


def _trigger_config(view: ViewSettings, labels: tuple[str, ...] | None) -> TriggerConfig:
    describe, detect = view.describe, view.detect
    triggers = describe.triggers if describe.enabled else TriggerSettings(new_track=False)
    zones = {name: zone for name, zone in view.zones.items() if zone.enabled}
    filters = view.objects.filters
    return TriggerConfig(
        labels=labels,
        cooldown_s=describe.cooldown_s,
        camera_cooldown_s=describe.camera_cooldown_s,
        track_cooldown_s=describe.track_cooldown_s,
        min_score=describe.min_score,
        min_area=describe.min_area,
        min_hits=describe.min_hits,
        thresholds={label: one.threshold for label, one in filters.items() if one.threshold is not None},
        motion_masks=_polygons(view.motion.mask, detect),
        zones=tuple(
            ZoneConfig(name, _polygon(one.coordinates, detect), one.objects, one.inertia, one.loitering_time)
            for name, one in zones.items()
        ),
        lines=tuple(
            LineConfig(
                name,
                Line(*_points(one.coordinates, detect)),
                one.objects,
                None if one.direction == "both" else one.direction,
            )
            for name, one in view.lines.items()
        ),
        new_track=triggers.new_track,
        zone_entry=_names(triggers.zone_entry, zones),
        dwell_s=triggers.dwell.seconds if triggers.dwell else None,
        dwell_zones=triggers.dwell.zones if triggers.dwell else (),
        line_crossing=_names(triggers.line_crossing, view.lines),
        period_s=triggers.periodic,
        required_zones=describe.required_zones,
        similarity=describe.similarity,
    )


def _filter_config(view: ViewSettings) -> FilterConfig:
    filters = {label: _object_filter(one, view.detect) for label, one in view.objects.filters.items()}
    return FilterConfig(view.objects.track, filters, _polygons(view.objects.mask, view.detect))


def _object_filter(one: FilterSettings, detect: DetectSettings) -> ObjectFilter:
    limits = one.model_dump(exclude={"mask"}, exclude_none=True)
    for name in limits.keys() & {"min_area", "max_area"}:
        limits[name] = _share(limits[name], detect)
    return ObjectFilter(**limits, masks=_polygons(one.mask, detect))


def _share(area: float, detect: DetectSettings) -> float:
    """An area as a share of the picture where it is known how many pixels that has, else as it is."""
    if area < 1 or detect.width is None or detect.height is None:
        return area
    share = area / (detect.width * detect.height)
    # why: 1 and more would be pixels again; nothing is larger than the picture
    return share if share < 1 else float("inf")


def _names(chosen: bool | tuple[str, ...], known: Mapping[str, object]) -> tuple[str, ...]:
    return chosen if isinstance(chosen, tuple) else tuple(known) if chosen else ()


def _polygons(masks: Iterable[Corners], detect: DetectSettings) -> tuple[Polygon, ...]:
    return tuple(_polygon(corners, detect) for corners in masks)


def _polygon(corners: Corners, detect: DetectSettings) -> Polygon:
    return Polygon(tuple(_points(corners, detect)))


def _points(corners: Corners, detect: DetectSettings) -> list[Point]:
    """Fractions of the picture, out of fractions or pixels of the size that `detect` names."""
    if max(map(max, corners)) <= 1:
        return list(corners)
    # invariant: `ViewSettings.problems` lets no pixels through without a size
    width, height = detect.width or 1, detect.height or 1
    return [(x / width, y / height) for x, y in corners]
