"""Questions about a rendered scene and their true answers, as short English sentences.

Every function here reads the ground truth of a ``Scene`` and never a pixel. Counts are words, so
that an answer reads like one and can be scored by a look at the text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vision.scenes import Scene, SceneObject

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
LABELS = ("person", "car", "bus", "truck", "bicycle", "dog")
VEHICLES = ("car", "bus", "truck")
POSITIONS = ("left", "middle", "right")
UNKNOWN_THINGS = (
    "cat", "horse", "bird", "boat", "train", "motorcycle", "elephant", "tree", "chair", "ball",
    "traffic light", "cow", "sheep", "plane", "umbrella", "phone", "table", "fire", "knife", "bear",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Qa:
    """A question with its true answer; ``kind`` names what is asked, ``truth`` the fact in short."""

    kind: str
    question: str
    answer: str
    truth: str


def plural(label: str) -> str:
    """Return the English plural of a COCO label that the scenes know."""
    return {"person": "people", "bus": "buses"}.get(label, f"{label}s")


def counted(label: str, count: int) -> str:
    """Say ``count`` things of a label in words: ``two people``, ``one car``, ``no dog``."""
    return f"{NUMBERS[count]} {label if count <= 1 else plural(label)}"


def of_label(scene: Scene, label: str) -> list[SceneObject]:
    """Objects of a label (``vehicle`` means car, bus or truck), from left to right."""
    wanted = VEHICLES if label == "vehicle" else (label,)
    found = [o for o in scene.objects if o.label in wanted]
    return sorted(found, key=lambda o: o.box[0] + o.box[2])


def at(position: str) -> str:
    """Say a position: ``on the left``, ``in the middle``, ``on the right``."""
    return "in the middle" if position == "middle" else f"on the {position}"


def listed(parts: Sequence[str]) -> str:
    """Join with commas and a last ``and``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def spread(objects: Sequence[SceneObject]) -> str:
    """Say where several things are, or ``""`` for nothing: ``: one on the left and two in the middle``."""
    if not objects:
        return ""
    counts = [(p, sum(o.position == p for o in objects)) for p in POSITIONS]
    parts = [(p, n) for p, n in counts if n]
    if len(objects) == 1:
        return f", {at(parts[0][0])}"
    if len(parts) == 1:
        return f", {'both' if len(objects) == 2 else 'all'} {at(parts[0][0])}"
    return f": {listed([f'{NUMBERS[n]} {at(p)}' for p, n in parts])}"


def absent(label: str) -> str:
    """Deny a thing: ``There is nobody.`` or ``There is no car.``."""
    return "There is nobody." if label == "person" else f"There is no {label}."


def count_answer(scene: Scene, label: str) -> str:
    """Count the things of a label and say where they are."""
    objects = of_label(scene, label)
    if not objects:
        return absent(label)
    verb = "is" if len(objects) == 1 else "are"
    return f"There {verb} {counted(label, len(objects))}{spread(objects)}."


def exists_answer(scene: Scene, label: str) -> str:
    """Answer whether a thing is there; with yes goes where it is."""
    objects = of_label(scene, label)
    if not objects:
        return "No, there is nobody." if label == "person" else f"No, there is no {label}."
    return f"Yes, there {count_answer(scene, label)[6:]}"


def where_answer(scene: Scene, label: str) -> str:
    """Answer where the things of a label are, or deny them."""
    objects = of_label(scene, label)
    if len(objects) != 1:
        return count_answer(scene, label)
    return f"The {label} is {at(objects[0].position)}."


def _one_of_each(label: str, words: Sequence[str]) -> str:
    """Say a property of several things: ``There are two cars: one is red and one is blue.``."""
    counts = [(w, words.count(w)) for w in dict.fromkeys(words)]
    head = f"There are {counted(label, len(words))}"
    if len(counts) == 1:
        return f"{head}, {'both' if len(words) == 2 else 'all'} {words[0]}."
    parts = [f"{NUMBERS[n]} {'is' if n == 1 else 'are'} {w}" for w, n in counts]
    return f"{head}: {listed(parts)}."


def color_answer(scene: Scene, label: str) -> str:
    """Answer the colour of a vehicle or of somebody's clothes, or deny the thing."""
    objects = of_label(scene, label)
    if not objects:
        return absent(label)
    words = [f"in {o.color}" if label == "person" else str(o.color) for o in objects]
    if len(objects) > 1:
        return _one_of_each(label, words)
    verb = "wears" if label == "person" else "has the colour"
    return f"The {label} {verb} {objects[0].color}."


def action_answer(scene: Scene, label: str) -> str:
    """Answer what the people do, or whether a vehicle moves, or deny the thing."""
    objects = of_label(scene, label)
    if not objects:
        return absent(label)
    words = [str(o.action) for o in objects]
    return f"The {label} is {words[0]}." if len(words) == 1 else _one_of_each(label, words)


def _time(scene: Scene, _: str) -> str:
    return f"It is {scene.time_of_day}."


def _place(scene: Scene, _: str) -> str:
    return f"This is a {scene.place}."


def _unknown(_: Scene, thing: str) -> str:
    return f"No, there is no {thing}."


ANSWERS: dict[str, Callable[[Scene, str], str]] = {
    "count": count_answer,
    "exists": exists_answer,
    "anybody": exists_answer,
    "where": where_answer,
    "color": color_answer,
    "action": action_answer,
    "time": _time,
    "place": _place,
    "unknown_thing": _unknown,
}

PHRASINGS: dict[str, tuple[str, ...]] = {
    "count": (
        "How many {many} are there?",
        "How many {many} do you see?",
        "How many {many} are in the picture?",
        "How many {many}?",
        "Count the {many}.",
        "How many {many} can you see in this frame?",
        "What is the number of {many}?",
    ),
    "exists": (
        "Is there {a} {one}?",
        "Is there {a} {one} in the picture?",
        "Do you see {a} {one}?",
        "Can you see {a} {one} here?",
        "Are there any {many}?",
        "Is {a} {one} visible?",
    ),
    "anybody": (
        "Is anybody there?",
        "Is there anybody?",
        "Is anyone there?",
        "Is there anyone in the picture?",
        "Is somebody there?",
        "Do you see anybody?",
        "Are there any people?",
        "Is there a person in the picture?",
    ),
    "where": (
        "Where is the {one}?",
        "Where is the {one} in the picture?",
        "Is the {one} on the left, in the middle or on the right?",
        "In which part of the picture is the {one}?",
        "Where do you see the {one}?",
        "On which side is the {one}?",
    ),
    "color": (
        "What {colour} is the {one}?",
        "What is the {colour} of the {one}?",
        "Which {colour} does the {one} have?",
        "Tell me the {colour} of the {one}.",
        "The {one} is what {colour}?",
    ),
    "clothes": (
        "What is the person wearing?",
        "What {colour} is the person wearing?",
        "What {colour} are the clothes of the person?",
        "Which {colour} does the person wear?",
        "What does the person wear?",
    ),
    "action": (
        "What is the person doing?",
        "What does the person do?",
        "Is the person walking or standing?",
        "What is the person up to?",
    ),
    "motion": (
        "Is the {one} moving?",
        "Is the {one} parked or driving?",
        "What is the {one} doing?",
        "Does the {one} move?",
    ),
    "time": (
        "Is it day or night?",
        "Is it day, dusk or night?",
        "What time of day is it?",
        "Is it dark outside?",
        "Is it night?",
        "Is this by day or by night?",
    ),
    "place": (
        "What place is this?",
        "Where is this?",
        "What kind of place is it?",
        "What does the camera look at?",
        "Is this a street, a park, a yard or a room?",
    ),
    "unknown_thing": ("Is there {a} {one}?", "Do you see {a} {one}?", "Is there {a} {one} in the picture?"),
}
NAMES = {"bicycle": ("bicycle", "bike"), "person": ("person",)}


def phrase(rng: np.random.Generator, kind: str, label: str, *, index: int | None = None) -> str:
    """Phrase a question of ``kind`` about ``label``; ``index`` fixes the phrasing."""
    options = PHRASINGS[kind]
    form = options[int(rng.integers(len(options)) if index is None else index)]
    names = NAMES.get(label, (label,))
    one = names[int(rng.integers(len(names)) if index is None else 0)]
    many = "people" if one == "person" else plural(one)
    colour = "colour" if index is not None or rng.random() < 0.5 else "color"
    article = "an" if one[:1] in "aeiou" else "a"
    text = form.format(one=one, many=many, a=article, colour=colour)
    return text if index is not None else vary(rng, text)


def vary(rng: np.random.Generator, text: str) -> str:
    """Write a question the way people type: now and then in lower case or without its mark."""
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.1:
        text = text.rstrip("?.")
    return text


def make(rng: np.random.Generator, scene: Scene, kind: str, label: str, *, index: int | None = None) -> Qa:
    """Make the question of ``kind`` about ``label`` with its true answer."""
    answer_kind = {"clothes": "color", "motion": "action"}.get(kind, kind)
    answer = ANSWERS[answer_kind](scene, label)
    return Qa(kind, phrase(rng, kind, label, index=index), answer, truth_of(scene, kind, label))


def truth_of(scene: Scene, kind: str, label: str) -> str:
    """State the fact behind the answer in one word: a count, a colour, a position or ``absent``."""
    objects = of_label(scene, label)
    if kind in ("time", "place"):
        return str(scene.time_of_day if kind == "time" else scene.place)
    if kind in ("count", "exists", "anybody"):
        return str(len(objects))
    if len(objects) != 1:
        return "several" if objects else "absent"
    facts = {"where": objects[0].position, "color": objects[0].color, "clothes": objects[0].color}
    return str(facts.get(kind, objects[0].action))
