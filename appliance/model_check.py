"""Whether the models that settings name are there and can do what is asked of them; nothing is loaded."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from appliance.findings import Finding, Weight
from appliance.frigate import WRITTEN
from appliance.settings import BUNDLED_DETECTOR, Settings, SettingsError
from appliance.view_settings import ViewSettings
from vision.trigger import SCENE

DRAWN = "synthetic://"
_EXPECT = "name a real model, or expect nonsense"


def check_detector(settings: Settings) -> Iterator[Finding]:
    """Its file, its runtime, and every class that is named anywhere."""
    from vision.errors import ModelUnsupported
    from vision.runtimes import check_runtime

    detector, is_named = settings.detector, "detector.model"
    path = Path(detector.model).expanduser()
    # why: a definition may be one of ultralytics' own, which only it can tell
    is_name = path.suffix in {".yaml", ".yml"} and path.name == detector.model
    if not (path.exists() or is_name):
        text = f"no detection model at {detector.model}: nothing is downloaded; get the file first"
        yield Finding(is_named, f"{text} and give its path")
        return
    try:
        check_runtime(str(path))
    except ModelUnsupported as error:
        yield Finding(is_named, str(error))
        return
    yield from _check_openvino(settings)
    if not any(labels for _, labels in _named_classes(settings)):
        return
    if (names := known_classes(settings)) is None:
        yield Finding(is_named, f"the classes of {detector.model} are known when it is loaded", "unchecked")
        return
    yield from check_classes(settings, names)


def known_classes(settings: Settings) -> tuple[str, ...] | None:
    """The classes that the detector's file names; None where only who loads it knows them."""
    from vision.class_names import class_names

    return class_names(Path(settings.detector.model).expanduser())


def check_classes(settings: Settings, names: Sequence[str]) -> Iterator[Finding]:
    """Every class that is named anywhere and is none of what a detector of these class `names` gives."""
    from vision.errors import UnknownClass

    detector = settings.detector
    for where, labels in _named_classes(settings):
        known = names if where == "detector.classes" else detector.classes or names
        if unknown := [label for label in labels if label not in known]:
            # why: other machines, with detectors of their own, may send events through this one
            weight: Weight = "warning" if where.startswith("outputs.") else "problem"
            text = str(UnknownClass(unknown, known, f"the detector {Path(detector.model).name}"))
            yield Finding(where, text, weight)


def refuse_classes(wanted: Settings, used: Settings, names: Sequence[str] | None) -> None:
    """Raises `SettingsError` where cameras are wanted with classes that the detector in use does not give.

    `names` are what it can tell apart; with None they are not known, and nothing is refused.
    """
    again = wanted.model_copy(update={"detector": used.detector})
    found = check_classes(again, names) if names else ()
    if lines := [str(finding) for finding in found if finding.weight == "problem"]:
        raise SettingsError("\n".join(lines))


def _check_openvino(settings: Settings) -> Iterator[Finding]:
    from vision.exports import why_no_export

    detector = settings.detector
    if detector.runtime == "openvino":
        # why: whether `auto` is a GPU is known to torch alone
        device = "cpu" if detector.device == "auto" else detector.device
        if reason := why_no_export(detector.model, device):
            yield Finding("detector.runtime", f"openvino is not possible: {reason}")


def _named_classes(settings: Settings) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Where classes are named, and which; what a camera has inherited is told once."""
    yield "detector.classes", settings.detector.classes
    common = dict(_classes_of(settings.view_of("")))
    yield from common.items()
    for name, camera in settings.cameras.items():
        for path, labels in _classes_of(camera):
            yield f"cameras.{name}.{path}", tuple(x for x in labels if x not in common.get(path, ()))
    outputs = settings.outputs
    sent = {f"webhooks.{number}": one for number, one in enumerate(outputs.webhooks)}
    for path, one in (sent | ({"mqtt": outputs.mqtt} if outputs.mqtt else {})).items():
        yield f"outputs.{path}.labels", tuple(label for label in one.labels or () if label != SCENE)


def _classes_of(view: ViewSettings) -> Iterator[tuple[str, tuple[str, ...]]]:
    describe = view.describe
    yield "objects.track", view.objects.track or ()
    yield "objects.filters", tuple(view.objects.filters)
    yield f"describe.{WRITTEN['labels']}", describe.labels or ()
    yield "describe.object_prompts", tuple(label for label in describe.object_prompts if label != SCENE)
    for name, zone in view.zones.items():
        yield f"zones.{name}.objects", zone.objects
    for name, line in view.lines.items():
        yield f"lines.{name}.objects", line.objects


def check_engine(settings: Settings) -> Iterator[Finding]:
    """Whether the checkpoint is there, of a family that is known, and can be shown what the cameras show."""
    from vlm_engine.checkpoint_peek import peek
    from vlm_engine.errors import ModelLoadError

    engine = settings.engine
    if engine.quantization == "int8" and find_spec("torchao") is None:
        text = "int8 needs the package torchao, which is not installed: pip install -e '.[int8]', or use none"
        yield Finding("engine.quantization", text)
    try:
        seen = peek(engine.model)
    except ModelLoadError as error:
        yield Finding("engine.model", str(error))
        return
    if seen is None:
        text = f"{engine.model} is not on this machine yet: it is taken from the hub when it is loaded"
        yield Finding("engine.model", text, "unchecked")
        return
    if not seen.reads_images and settings.cameras:
        text = f"a {seen.family} reads texts alone and cannot describe cameras: name a vision-language model"
        yield Finding("engine.model", text)
    elif not seen.reads_videos:
        text = f"clip needs a model that reads videos, which {seen.family} does not: use pictures"
        yield from (Finding(path, text) for path, form in _said(settings, "images_as") if form == "clip")


def check_demo_models(settings: Settings) -> Iterator[Finding]:
    """What the bundled models were never shown."""
    real = [
        name for name, one in settings.cameras.items() if one.enabled and not one.source.startswith(DRAWN)
    ]
    shown = f"knows drawn scenes only, and {', '.join(real)} {'is' if len(real) == 1 else 'are'} none"
    if real and settings.is_bundled_vlm:
        text = f"the bundled demo model {shown}: {_EXPECT}"
        yield Finding("engine.model", text, "warning")
    if real and settings.detector.model == BUNDLED_DETECTOR:
        text = f"the bundled detector {shown}: name a real one, such as yolo26n.pt, or it misses most"
        yield Finding("detector.model", text, "warning")
    if settings.is_bundled_vlm:
        clips = [(path, "videos") for path, form in _said(settings, "images_as") if form == "clip"]
        forms = [(path, "JSON") for path, schema in _said(settings, "answer_schema") if schema]
        for path, what in (*clips, *forms):
            yield Finding(path, f"the bundled demo model was never shown {what}: {_EXPECT}", "warning")


def _said(settings: Settings, key: str) -> Iterator[tuple[str, object]]:
    """A key of `describe` by its path: what holds for all, and for the cameras that differ."""
    common = getattr(settings.view_of("").describe, key)
    yield f"describe.{WRITTEN.get(key, key)}", common
    for name, camera in settings.cameras.items():
        if (own := getattr(camera.describe, key)) != common:
            yield f"cameras.{name}.describe.{WRITTEN.get(key, key)}", own
