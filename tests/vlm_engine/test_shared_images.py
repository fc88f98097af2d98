"""Who goes or gives way in the middle of a picture that others read: in every family, no token changes."""

import pytest

from tests.vlm_engine.reference import Case, Family, drain, images_of, prompt_length, run
from tests.vlm_engine.test_equality import FAMILIES
from vlm_engine import Engine


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return Family.load(request.getfixturevalue(request.param))


def step_into_picture(engine: Engine, name: str) -> None:
    """Step until so much of a request is computed that a part of its first picture is left, or a tile."""
    while True:
        engine.step()
        sequence = next((s for s in engine.scheduler.running if s.request_id == name), None)
        if sequence is not None:
            first, last = sequence.placeholders[0], sequence.placeholders[-1]
            if first.start < sequence.num_computed_tokens < last.end:
                return
            assert sequence.num_computed_tokens <= first.start, "the picture was never cut"


@pytest.mark.parametrize("is_error", [False, True], ids=["cancelled", "failed"])
def test_one_of_two_readers_of_a_picture_goes(family: Family, is_error: bool) -> None:
    """E8: both are in the middle of it; what one that failed has computed is not used by the other."""
    picture = family.picture(1, 10, 10)
    gone, stays = Case("gone", ("x", picture, "What?"), 6), Case("stays", ("yy", picture, "What is it?"), 6)
    engine = family.engine(max_num_batched_tokens=24)
    if family.name == "gemma3":
        # why: its pictures are computed in one piece, so that two are begun together by a second picture
        gone, stays = (Case(case.name, (*case.parts, family.picture(2)), 6) for case in (gone, stays))
        engine = family.engine(max_num_batched_tokens=60)
    for case in (gone, stays):
        engine.add(case.request)
    step_into_picture(engine, "gone")
    if is_error:
        sequence = next(s for s in engine.scheduler.running if s.request_id == "gone")
        engine._requests.give_up([sequence], "as a test wants it")
    else:
        engine.abort("gone")
    engine.check_integrity()
    said = [token for event in drain(engine) for token in event.token_ids]
    assert said == family.greedy(stays)


def test_preempted_in_the_middle_of_a_picture(family: Family) -> None:
    """E8: a frame gives way to a chat that needs its blocks; its picture was forgotten meanwhile."""
    frame = Case(
        "frame", ("a", family.picture(1, 10, 10), family.picture(2, 9, 9)), 6, {"priority": "background"}
    )
    whole = family.engine()
    chat, text = frame, "What is this? "
    while prompt_length(whole, chat) <= prompt_length(whole, frame):
        chat = Case("chat", (family.picture(3, 10, 10), text), 6)
        text += "Is anybody there? "
    length = prompt_length(whole, chat) + chat.num_tokens
    room = max(image.length for image in images_of(whole, frame, chat))
    engine = family.engine(
        max_num_batched_tokens=40, kv_cache_tokens=length + 16, encoder_cache_tokens=room, block_size=8
    )
    engine.add(frame.request)
    step_into_picture(engine, "frame")
    (sequence,) = engine.scheduler.running
    engine.add(chat.request)
    said: dict[str, list[int]] = {"frame": [], "chat": []}
    while engine.has_work:
        for event in engine.step():
            said[event.request_id] += event.token_ids
        engine.check_integrity()
    assert sequence.num_preemptions
    assert said == {case.name: family.greedy(case) for case in (frame, chat)}


def test_cancelled_between_two_slices_of_a_picture(family: Family) -> None:
    """E20: nothing is held; who sends the picture again goes on behind the slices that ran."""
    chat = Case("chat", ("What is happening here?",), 60)
    frame = Case("frame", ("and", family.picture(9, 8, 8), "What is this?"), 6, {"priority": "background"})
    whole = family.model.encoder
    family.model.encoder = family.tower(4)
    try:
        engine = family.engine(scheduler="latency", chat_itl_ms=1.0, chat_ttft_ms=1.0)
        images, cache = images_of(engine, frame), engine.scheduler.encoder_cache
        for case in (chat, frame):
            engine.add(case.request)
        while not any(image.digest in cache and cache.num_left(image) for image in images):
            engine.step()
        engine.abort("frame")
        engine.abort("chat")
        engine.check_integrity()
        assert not engine.runner._prompts
        assert run(engine, [frame])["frame"] == family.greedy(frame)
        assert engine.stats().num_encoded_images == len(images)
    finally:
        family.model.encoder = whole
