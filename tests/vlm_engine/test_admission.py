"""What every family lets in: what can never run is refused at once, and others notice nothing."""

import pytest
from PIL import Image

from appliance.images import image_from_bytes
from tests.appliance.pictures import encoded
from tests.vlm_engine.reference import Case, Family, drain, images_of, prompt_length, run
from tests.vlm_engine.test_equality import FAMILIES
from vlm_engine import Engine, RequestError
from vlm_engine.errors import ImageRejected, PromptTooLong

BLOCK = 16


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return Family.load(request.getfixturevalue(request.param))


def begun(engine: Engine, case: Case) -> list[int]:
    """Start a request and return the tokens that it says until it decodes."""
    engine.add(case.request)
    said: list[int] = []
    while not said:
        said += [token for event in engine.step() for token in event.token_ids]
    return said


def test_an_image_over_the_encoder_limit_disturbs_nobody(family: Family) -> None:
    """E5: refused while another one runs, which says all that it has to; so is one prepared elsewhere."""
    running = Case("running", (family.picture(1, 2, 2), "What is this?"), 12)
    large = Case("large", ("and", family.picture(2, 12, 12)), 4)
    needed, num_large = (max(i.length for i in images_of(family.engine(), c)) for c in (running, large))
    limit = needed if needed < num_large else num_large - 1
    engine = family.engine(encoder_cache_tokens=limit)
    if needed > limit:
        # why: where all tiles are of one size, no picture fits into less
        running = Case("running", ("What is this?",), 12)
    said = begun(engine, running)
    prompt, _ = family.engine().prepare(large.request)
    for refuse in (lambda: engine.add(large.request), lambda: engine.submit(large.request, prompt)):
        with pytest.raises(ImageRejected, match=f"takes {num_large} tokens, the encoder holds {limit}"):
            refuse()
    said += [token for event in drain(engine) for token in event.token_ids]
    assert said == family.greedy(running)


@pytest.mark.parametrize("kv_cache_tokens", [100, 160])
def test_a_prompt_that_the_cache_cannot_hold_disturbs_nobody(family: Family, kv_cache_tokens: int) -> None:
    """E14, E15: whole blocks count; one token more than fits beside one of output is refused, that runs."""
    room = kv_cache_tokens // BLOCK * BLOCK
    running = Case("running", ("What is happening?",), 8)
    engine = family.engine(kv_cache_tokens=kv_cache_tokens, max_model_len=200, block_size=BLOCK)
    said = begun(engine, running)
    picture = family.picture(1, 2, 2)
    whole = family.engine()
    parts = (picture,) if prompt_length(whole, Case("x", (picture,))) < room - 1 else ()
    pad = room - 1 - prompt_length(whole, Case("x", (*parts, "")))
    over, longest = (Case(f"{num}", (*parts, "q" * num), 5) for num in (pad + 1, pad))
    assert [prompt_length(whole, case) for case in (over, longest)] == [room, room - 1]
    with pytest.raises(PromptTooLong, match=f"has {room} tokens, at most {room - 1} fit"):
        engine.add(over.request)
    assert engine._requests.ids == ["running"]
    engine.add(longest.request)
    for event in drain(engine):
        if event.request_id == "running":
            said += event.token_ids
        elif event.is_last:
            assert event.finish_reason == "length"
            assert event.usage is not None
            assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (room - 1, 1)
    assert said == family.greedy(running)
    assert engine.stats().num_free_blocks == room // BLOCK


SMALL = [(1, 1), (1, 40), (40, 1), (26, 28), (257, 27), (499, 1), (1, 150), (32, 32), (1093, 5)]


@pytest.mark.parametrize("size", SMALL, ids=str)
def test_pictures_of_few_pixels_are_answered_or_refused(family: Family, size: tuple[int, int]) -> None:
    """I1, I2: by the engine itself, which is given them as they are."""
    engine = family.engine()
    case = Case("x", (Image.new("RGB", size, "teal"), "What is this?"), 2)
    field = None
    try:
        engine.add(case.request)
    except RequestError as refused:
        field = refused.field
    assert field in ({None} if family.has_tiles else {None, "messages[0].content[0]"})
    assert len(drain(engine)) == (2 if field is None else 0)
    assert len(run(engine, [Case("y", ("hello",), 2)])["y"]) == 2


@pytest.mark.parametrize("size", [(1, 1), (1, 150), (26, 28), (257, 27), (100, 1), (1990, 10)], ids=str)
def test_every_family_takes_what_comes_through_the_door(family: Family, size: tuple[int, int]) -> None:
    """I1: pictures that the API enlarges, up to nearly 200 times as long as wide; tokens of `generate()`."""
    picture = image_from_bytes(encoded(Image.linear_gradient("L").convert("RGB").resize(size)))
    case = Case("x", (picture, "What is this?"), 2)
    assert run(family.engine(), [case])["x"] == family.greedy(case)
