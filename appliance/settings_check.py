"""A look at whole settings before anything is started with them: files, addresses, names, what fits together.

`appliance config check` tells all of it, and what `serve` would meet minutes later ends its start at once.
Ultralytics is not imported, torch only where a device is named that it alone knows; nothing is connected to.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from appliance.device_check import check_detector_device, check_engine_device
from appliance.findings import Finding
from appliance.frigate import WRITTEN
from appliance.model_check import check_demo_models, check_detector, check_engine
from appliance.settings import Settings, SettingsError, read_settings
from appliance.view_settings import ViewSettings

Check = Callable[[Settings], Iterator[Finding]]
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def look_at(
    path: Path | None, overrides: Mapping[str, Any], checks: tuple[Check, ...]
) -> tuple[Settings | None, list[str], list[Finding]]:
    """Read settings and look at them.

    Returns:
        The settings without what is wrong in them, None where nothing can be read; what is wrong with their
        form, a line each; what the `checks` found in the rest.
    """
    settings, lines = read_settings(path, overrides)
    return settings, lines, [found for check in checks for found in check(settings)] if settings else []


def load_checked(
    path: Path | None, overrides: Mapping[str, Any], checks: tuple[Check, ...], warn: Callable[[str], object]
) -> Settings:
    """The settings, if they can be started with; `warn` gets what is still awaited, or may be meant so.

    Raises `SettingsError` with one line a problem, of form or found by the `checks`.
    """
    settings, wrong, findings = look_at(path, overrides, checks)
    where = path or "settings"
    wrong += [f"{where}: {finding}" for finding in findings if finding.weight == "problem"]
    if settings is None or wrong:
        raise SettingsError("\n".join(wrong))
    for finding in findings:
        if finding.weight in {"awaited", "warning"}:
            warn(f"{where}: {finding}")
    return settings


def check_server(settings: Settings) -> Iterator[Finding]:
    """Whether the API would be open to others without a key."""
    if settings.server.host in LOOPBACK:
        return
    # why: late, as it brings the web framework along
    from appliance.api.access import UnsafeBindingError, check_binding

    try:
        check_binding(settings.server)
    except UnsafeBindingError as error:
        yield Finding("server.host", str(error).removeprefix("server.host is "))


def check_storage(settings: Settings) -> Iterator[Finding]:
    """Whether events can be written."""
    path = settings.events.path
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        yield Finding("events.path", f"{path} is a folder: name a file in it")
    elif not folder.is_dir():
        yield Finding("events.path", f"there is no folder {folder}: make it, or name a file elsewhere")
    else:
        try:
            path.open("r+b").close() if path.exists() else TemporaryFile(dir=folder).close()
        except OSError as error:
            yield Finding("events.path", f"{path} cannot be written: {error.strerror}: name a file elsewhere")


def check_outputs(settings: Settings) -> Iterator[Finding]:
    """Whether the broker's CA can be read."""
    if settings.outputs.mqtt is None:
        return
    from appliance.outputs.mqtt import MqttOutput

    try:
        MqttOutput(settings.outputs.mqtt, (), lambda event_id: None)
    except ValueError as error:
        path, _, text = str(error).partition(": ")
        yield Finding(path, text)


def check_sources(settings: Settings) -> Iterator[Finding]:
    """Whether each camera's source is there, or could be; streams are not connected to."""
    from appliance.camera import OPEN_S, source_options
    from vision.errors import SourceNotFound, SourceUnreadable, VisionError
    from vision.reach import within
    from vision.sources import open_source
    from vision.urls import shown_address

    for name, camera in settings.cameras.items():
        if not camera.enabled:
            continue
        opening = partial(open_source, camera.source, camera=name, options=source_options(camera))
        try:
            within(OPEN_S, opening).close()
        except TimeoutError:
            shown = shown_address(camera.source)
            text = f"{shown} cannot be opened in {OPEN_S:g} s: does its disk or network answer?"
            yield Finding(f"cameras.{name}.source", text, "awaited")
        except (SourceNotFound, SourceUnreadable) as error:
            yield Finding(f"cameras.{name}.source", str(error), "awaited")
        except VisionError as error:
            yield Finding(f"cameras.{name}.source", str(error))


def check_described(settings: Settings) -> Iterator[Finding]:
    """Whether the classes to describe are tracked; what holds for all cameras is told once."""
    common = _described(settings.view_of(""))
    for path, (track, labels) in {
        f"{'' if _described(camera) == common else f'cameras.{name}.'}describe.{WRITTEN['labels']}": both
        for name, camera in settings.cameras.items()
        if camera.enabled and camera.describe.enabled and (both := _described(camera))
    }.items():
        if track is not None and (lost := [label for label in labels if label not in track]):
            text = f"{', '.join(lost)} will never be described: objects.track has only {', '.join(track)}"
            yield Finding(path, text if track else text.replace("only ", "no class"), "warning")


def _described(view: ViewSettings) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    return view.objects.track, view.describe.labels or ()


def check_roles(settings: Settings) -> Iterator[Finding]:
    """Whether the stream that is looked at was meant for it."""
    for name, camera in settings.cameras.items():
        roles = [one.roles for one in camera.ffmpeg.inputs] if camera.ffmpeg else []
        if camera.enabled and any(roles) and not any("detect" in one for one in roles):
            text = "none has the role detect, so the first is looked at: give it to the one that is meant"
            yield Finding(f"cameras.{name}.ffmpeg.inputs", text, "warning")


CAMERA_CHECKS: tuple[Check, ...] = (
    check_detector,
    check_detector_device,
    check_sources,
    check_described,
    check_roles,
)
"""What a vision worker meets."""

ALL_CHECKS: tuple[Check, ...] = (
    *CAMERA_CHECKS,
    check_engine,
    check_engine_device,
    check_server,
    check_storage,
    check_outputs,
    check_demo_models,
)
"""What a whole appliance meets."""
