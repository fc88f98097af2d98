"""Who comes first: pure functions of a sequence and the time."""

from vlm_engine.sequence import Sequence, Status

PATIENCE_S = 1.0


def rank(sequence: Sequence) -> tuple[bool, float, float]:
    """Order in which sequences keep what they hold: interactive first, then by place, then the older."""
    return not sequence.is_interactive, sequence.place, sequence.arrival_s


def turn(sequence: Sequence, now: float) -> tuple[bool, float, float]:
    """Order within a class: decodes, then background by place, of chats the shorter prompt.

    why: a line of text that waits behind a picture is late by the whole picture, the picture
    behind the line hardly at all, and this holds for a long prompt that runs already. Who waits
    counts as ever shorter (highest response ratio next), so that nobody is passed for ever.
    """
    arrival_s = sequence.arrival_s
    if sequence.is_decoding or not sequence.is_interactive:
        return not sequence.is_decoding, sequence.place, arrival_s
    waited_s = max(0.0, now - arrival_s)
    return True, sequence.num_left / (1.0 + waited_s / PATIENCE_S), arrival_s


def gives_way(other: Sequence, sequence: Sequence) -> bool:
    """Whether a running sequence may be preempted for another one.

    Background gives way to interactive. Within a class only a running sequence may take from a younger one:
    a waiting one never preempts its equals.
    """
    if other.is_interactive != sequence.is_interactive:
        return sequence.is_interactive
    return sequence.status is Status.RUNNING and rank(other) > rank(sequence)
