"""`appliance config`: what a settings file means, before anything is started with it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.command_line import EXIT_PARTIAL

if TYPE_CHECKING:
    from appliance.camera_settings import CameraSettings
    from appliance.describe_settings import ViewDescribeSettings
    from appliance.settings import Settings

_NOTES = {"warning": "warning    ", "unchecked": "not checked"}

config_app = typer.Typer(help="Look at settings.", no_args_is_help=True)


@config_app.callback()
def _root() -> None:
    pass


@config_app.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A settings file in YAML.")],
) -> None:
    """Tell what is used of a settings file, or every problem with its path; exit code 1 when there is one.

    Files, classes, addresses and what the models can do are looked at; nothing is loaded or connected to.
    """
    from appliance.settings_check import ALL_CHECKS, look_at
    from vision.readable import readable

    settings, wrong, findings = look_at(file, {}, ALL_CHECKS)
    wrong += [f"{file}: {found}" for found in findings if found.weight in {"problem", "awaited"}]
    notes = [f"  {_NOTES[found.weight]}  {found}" for found in findings if found.weight in _NOTES]
    if settings is None or wrong:
        for line in (*(f"appliance: {line}" for line in wrong), *notes):
            typer.echo(readable(line), err=True)
        raise typer.Exit(EXIT_PARTIAL)
    typer.echo(readable("\n".join([f"{file} can be used:", *_lines(settings), *notes])))


def _lines(settings: "Settings") -> Iterator[str]:
    yield f"  model     {settings.engine.model} on {settings.engine.device}"
    yield f"  detector  {settings.detector.model}, {settings.tracker}"
    yield f"  cameras   {len(settings.cameras)}"
    for name, camera in settings.cameras.items():
        yield f"{name}{f' ({camera.friendly_name})' if camera.friendly_name else ''}"
        yield from (f"  {line}" for line in _camera_lines(camera))


def _camera_lines(camera: "CameraSettings") -> Iterator[str]:
    from vision.urls import shown_address

    detect, objects = camera.detect, camera.objects
    if not camera.enabled:
        yield "is not enabled"
    rate = f"{camera.max_fps:g}" if camera.max_fps else "all"
    size = f"{detect.width or 'any'} x {detect.height or 'any'} pixels"
    yield f"source    {shown_address(camera.source)}, {size}, {rate} frames/s"
    yield f"objects   {', '.join(objects.track or ['all that the detector knows'])}"
    for label, one in objects.filters.items():
        limits = one.model_dump(exclude={"mask"}, exclude_none=True)
        told = [f"{key} {value:g}" for key, value in limits.items()]
        yield f"filter    {label}: {', '.join([*told, *_masks(one.mask)]) or 'nothing'}"
    for section in ("objects", "motion", "privacy"):
        if masks := getattr(camera, section).mask:
            yield f"mask      {section}: {', '.join(_masks(masks))}"
    for name, zone in camera.zones.items():
        who = ", ".join(zone.objects) or "all"
        off = "" if zone.enabled else ", not enabled"
        yield f"zone      {name}: {who}, after {zone.inertia} frames and {zone.loitering_time:g} s{off}"
    for name, line in camera.lines.items():
        yield f"line      {name}: {', '.join(line.objects) or 'all'}, direction {line.direction}"
    yield from _describe_lines(camera.describe)


def _describe_lines(describe: "ViewDescribeSettings") -> Iterator[str]:
    if not describe.enabled:
        yield "describe  only when asked (POST /v1/cameras/NAME/describe)"
        return
    labels = "all" if describe.labels == () else ", ".join(describe.labels or ["what is tracked"])
    within = f" that was in {' or '.join(describe.required_zones)}" if describe.required_zones else ""
    yield f"describe  {labels}{within}: {', '.join(_triggers(describe)) or 'only when asked'}"
    pauses = (("object", describe.cooldown_s), ("camera", describe.camera_cooldown_s))
    told = [
        f"{pause:g} s by {what}" for what, pause in (*pauses, ("track", describe.track_cooldown_s)) if pause
    ]
    yield f"cooldown  {', '.join(told) or 'none'}"
    form = ", as a clip" if describe.images_as == "clip" else ""
    yield f"pictures  up to {describe.max_images}, {describe.image}{form}"


def _triggers(describe: "ViewDescribeSettings") -> Iterator[str]:
    triggers = describe.triggers
    if triggers.new_track:
        yield "new_track"
    for name in ("zone_entry", "line_crossing"):
        where = getattr(triggers, name)
        if where:
            yield name if where is True else f"{name} ({', '.join(where)})"
    if triggers.dwell:
        zones = f" in {' or '.join(triggers.dwell.zones)}" if triggers.dwell.zones else ""
        yield f"dwell of {triggers.dwell.seconds:g} s{zones}"
    if triggers.periodic:
        yield f"every {triggers.periodic:g} s"


def _masks(masks: tuple[object, ...]) -> list[str]:
    return [f"{len(masks)} area{'s' if len(masks) > 1 else ''}"] if masks else []
