"""The one text in which a frame and its detections are put to the model.

The running appliance and the training of the bundled demo model use the same functions, so that the
model reads in the field exactly what it was trained on. Stable text stands first: prompts of one
camera share a prefix up to the picture.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

DEFAULT_INSTRUCTION = "Describe this camera frame in one or two short sentences."
POSITIONS = ("left", "middle", "right")
MAX_LISTED = 6
RULES = "Speak only of what is listed as detected; do not mention other people, vehicles, animals or things."
SEVERAL = "The pictures show it in order of time, the last one is the newest."
CLIP = "The video shows it up to now, its last frame is the newest."


def position_of(center_x: float) -> str:
    """Name the third of the width that ``center_x`` (0..1, a fraction of the width) lies in."""
    return POSITIONS[min(2, max(0, int(center_x * 3)))]


def _positions(centers_x: Sequence[float]) -> str:
    """Positions from left to right; a crowd is told by the thirds that it fills."""
    names = [position_of(x) for x in sorted(centers_x)]
    return ", ".join(names if len(names) <= MAX_LISTED else dict.fromkeys(names))


def detection_line(labels: Sequence[str], centers_x: Sequence[float]) -> str:
    """Tell what a detector found in one line, the most frequent label first.

    ``labels`` and ``centers_x`` (box centres as fractions of the width, 0..1) belong together by
    index; ValueError when their lengths differ. Labels of equal count are in alphabetical order:
    ``Detected: 2 person (left, middle), 1 car (right).`` or ``Detected: nothing.``
    """
    if len(labels) != len(centers_x):
        raise ValueError(f"{len(labels)} labels but {len(centers_x)} centres")
    if not labels:
        return "Detected: nothing."
    ranked = sorted(Counter(labels).items(), key=lambda item: (-item[1], item[0]))
    groups = []
    for label, count in ranked:
        centers = [x for name, x in zip(labels, centers_x, strict=True) if name == label]
        groups.append(f"{count} {label} ({_positions(centers)})")
    return f"Detected: {', '.join(groups)}."


def context_line(camera: str, taken: str, zones_by_label: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Tell where and when: ``Camera: Front. Time: 2026-01-31 12:00:00. In zones: person in porch.``

    ``zones_by_label`` has one (label, zones) for each detection; who is in no zone is left out.
    """
    places = dict.fromkeys(f"{label} in {' and '.join(zones)}" for label, zones in zones_by_label if zones)
    parts = [f"Camera: {camera}.", f"Time: {taken}." if taken else "", _zones(list(places))]
    return " ".join(part for part in parts if part)


def _zones(places: list[str]) -> str:
    return f"In zones: {', '.join(places)}." if places else ""


def describe_messages(
    instruction: str,
    image: Any,
    detection_line: str,
    *,
    earlier: Sequence[Any] = (),
    context: str = "",
    clip_fps: float | None = None,
) -> list[dict[str, Any]]:
    """Build the one user message that asks for a description of ``image`` (a PIL picture, RGB).

    The order is instruction, pictures (``earlier`` ones first), context, detections: what never changes
    comes first. With ``clip_fps`` several pictures are one video of so many frames a second. With a
    ``context`` the model is also told to speak of nothing else. An empty ``detection_line`` leaves that
    part out.
    """
    several = (CLIP if clip_fps else SEVERAL) if earlier else ""
    stable = [instruction.strip(), RULES if context else "", several]
    content: list[dict[str, Any]] = [
        {"type": "text", "text": "".join(f"{line}\n" for line in stable if line)}
    ]
    if earlier and clip_fps:
        content.append({"type": "video", "frames": [*earlier, image], "fps": clip_fps})
    else:
        content += [{"type": "image", "image": picture} for picture in (*earlier, image)]
    if told := "".join(f"\n{line}" for line in (context, detection_line) if line):
        content.append({"type": "text", "text": told})
    return [{"role": "user", "content": content}]
