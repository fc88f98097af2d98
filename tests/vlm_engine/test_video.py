"""Videos: the tokens of `generate()`, what the tower reads at once cached by digest, clear refusals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.vlm_engine.reference import Case, Clip, Family, as_content, drain, images_of, run, tight_limits
from vlm_engine import EngineConfig, RequestError, wire
from vlm_engine.models import load_prompts

BLOCK = 16
FAMILIES = ["qwen3_vl_checkpoint", "qwen2_5_vl_checkpoint", "qwen2_vl_checkpoint", "smolvlm_checkpoint"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return Family.load(request.getfixturevalue(request.param))


def clip_of(family: Family, seeds: Sequence[int], fps: float = 2.0, size: tuple[int, int] = (4, 3)) -> Clip:
    return Clip(tuple(family.picture(seed, *size) for seed in seeds), fps)


@pytest.fixture(scope="module")
def shapes(family: Family) -> list[tuple[Case, list[int]]]:
    """A clip of odd length among images (text where a family takes no both); two of other rates and sizes."""
    odd = clip_of(family, (6, 7, 8), 1.0)
    before, after = ("a", "b") if family.has_tiles else (family.picture(5, 3, 2), family.picture(11, 2, 4))
    two = (clip_of(family, (1, 2), 3.0, (2, 4)), "and", clip_of(family, (3, 4, 5, 6, 7), 0.5, (5, 2)), "?")
    cases = [Case("odd", (before, odd, after), 6), Case("two", two, 6)]
    return [(case, family.greedy(case)) for case in cases]


@pytest.mark.parametrize("chunk", [1, 7, 32, 256])
def test_any_chunk_size(family: Family, shapes: list[tuple[Case, list[int]]], chunk: int) -> None:
    """Nothing is cached, and cuts fall inside of frames."""
    for case, expected in shapes:
        engine = family.engine(max_num_batched_tokens=chunk, enable_prefix_caching=False)
        assert run(engine, [case])[case.name] == expected, case.name


def test_any_slices_of_the_encoder(family: Family, shapes: list[tuple[Case, list[int]]]) -> None:
    whole = family.model.encoder
    family.model.encoder = family.tower(8)
    try:
        for case, expected in shapes:
            assert run(family.engine(), [case])[case.name] == expected, case.name
    finally:
        family.model.encoder = whole


def test_a_clip_encoded_over_many_steps_beside_a_chat(family: Family) -> None:
    """E9: a chat's target is so short that the encoder stops inside of frames; no token changes."""
    chat = Case("chat", ("What is happening here?",), 30)
    clip = Case("clip", (clip_of(family, (1, 2, 3, 4)), "and then?"), 5, {"priority": "background"})
    whole, cut = family.model.encoder, set()
    family.model.encoder = family.tower(4)
    try:
        engine = family.engine(scheduler="latency", chat_itl_ms=1.0, chat_ttft_ms=1.0)
        frames = images_of(engine, clip)
        for case in (chat, clip):
            engine.add(case.request)
        answers: dict[str, list[int]] = {"chat": [], "clip": []}
        cache = engine.scheduler.encoder_cache
        while engine.has_work:
            for event in engine.step():
                answers[event.request_id] += event.token_ids
            cut |= {i.digest for i in frames if i.digest in cache and cache.num_left(i)}
    finally:
        family.model.encoder = whole
    assert answers == {case.name: family.greedy(case) for case in (chat, clip)}
    assert cut


def test_clips_and_images_side_by_side_in_little_memory(family: Family) -> None:
    """E6, E8, E16: room for one frame and a bit; sequences are preempted, and no token changes."""
    shared = clip_of(family, (21, 22, 23, 24))
    cases = [
        Case("a", ("What is this?", shared), 40),
        Case("b", (shared, "Is anybody there?"), 6, {"priority": "background"}),
        Case("c", (family.picture(25, 3, 3), "and then?"), 40),
        Case("d", ("z", clip_of(family, (24, 21)), "?"), 8, {"priority": "background"}),
    ]
    whole = family.engine()
    room = max(image.length for image in images_of(whole, *cases)) * 3 // 2
    num_kv = tight_limits(whole, cases)["kv_cache_tokens"] * 7 // 10
    engine = family.engine(max_num_batched_tokens=20, kv_cache_tokens=num_kv, encoder_cache_tokens=room)
    assert run(engine, cases, every=2) == {case.name: family.greedy(case) for case in cases}
    assert engine.stats().num_preemptions > 0


def test_time_and_order_count(family: Family) -> None:
    """E10: frames in another order, or at another rate where the family knows of time, share no keys."""
    there, back, slow = (
        Case(name, (clip_of(family, seeds, fps), "What is happening?"), 8)
        for name, seeds, fps in (
            ("there", (1, 2, 3, 4), 2.0),
            ("back", (4, 3, 2, 1), 2.0),
            ("slow", (1, 2, 3, 4), 0.2),
        )
    )
    engine = family.engine()
    answers = [run(engine, [case])[case.name] for case in (there, back, slow)]
    assert answers == [family.greedy(case) for case in (there, back, slow)]
    assert answers[0] != answers[1]
    assert (answers[0] == answers[2]) == (family.name == "qwen2_vl")


def test_the_same_clip_with_a_new_question(family: Family) -> None:
    """E3: nothing is encoded again, all but the question is cached, though the tower's cache forgot."""
    clip = clip_of(family, (1, 2, 3, 4))
    cases = [Case(text, (clip, text), 6) for text in ("What is happening?", "Is anybody there?")]
    engine = family.engine(encoder_cache_tokens=20)
    assert run(engine, cases[:1]) == {cases[0].name: family.greedy(cases[0])}
    frames = images_of(engine, cases[0])
    assert engine.stats().num_encoded_images == len(frames)
    for case in cases:
        engine.add(case.request)
        events = drain(engine)
        assert [token for event in events for token in event.token_ids] == family.greedy(case)
        usage = events[-1].usage
        assert usage is not None
        assert usage.cached_tokens >= frames[-1].end // BLOCK * BLOCK
    assert engine.stats().num_encoded_images == len(frames)


def test_a_clip_that_went_on_shares_its_frames(family: Family) -> None:
    """What the tower read at once for a clip two frames earlier is not encoded again."""
    first, second = ((clip_of(family, seeds), "What?") for seeds in ((1, 2, 3, 4), (3, 4, 5, 6)))
    engine, num_new = family.engine(), 2 if family.has_tiles else 1
    case = Case("first", first, 6)
    assert run(engine, [case])["first"] == family.greedy(case)
    num_before = engine.stats().num_encoded_images
    case = Case("second", second, 6)
    assert run(engine, [case])["second"] == family.greedy(case)
    assert engine.stats().num_encoded_images == num_before + num_new


def test_a_clip_crosses_to_the_engines_process(family: Family) -> None:
    """What the front prepared is what the engine gets: places, digests, positions and pixels."""
    case = Case("x", ("a", clip_of(family, (1, 2, 3), 0.7), "b"))
    sent = family.model.prompts.prepare(case.messages)
    header, *tensors = wire.encode_submit(case.request, sent, 0.0)
    submit = wire.decode_to_server(header)
    assert isinstance(submit, wire.Submit)
    _, got = wire.decode_submit(submit, [bytes(tensor) for tensor in tensors])
    assert (got.token_ids, got.position_delta) == (sent.token_ids, sent.position_delta)
    assert got.placeholders == sent.placeholders
    assert torch.equal(got.positions, sent.positions)
    for there, here in zip(got.images, sent.images, strict=True):
        assert there.grid == here.grid
        assert torch.equal(there.pixels, here.pixels)


BLACK = Image.new("RGB", (64, 64))


@pytest.mark.parametrize(
    ("video", "field", "message"),
    [
        ({"frames": [BLACK]}, "frames", "two or more"),
        ({"frames": "movie.mp4"}, "frames", "two or more"),
        ({"frames": [BLACK, BLACK.resize((32, 32))]}, "frames", "one size"),
        ({"frames": [BLACK] * 2, "fps": 0}, "fps", "positive"),
        ({"frames": [BLACK] * 2, "fps": float("nan")}, "fps", "positive"),
        ({"frames": [BLACK] * 2, "fps": True}, "fps", "positive"),
    ],
)
def test_what_is_no_video_is_refused(family: Family, video: dict[str, Any], field: str, message: str) -> None:
    messages = [{"role": "user", "content": [{"type": "video", **video}]}]
    with pytest.raises(RequestError, match=message) as refused:
        family.model.prompts.prepare(messages)
    assert refused.value.field == f"messages[0].content[0].{field}"


def test_a_clip_that_the_processor_cannot_take_is_named(family: Family) -> None:
    """E24: the part that fails alone, not the whole conversation."""
    thin = Image.new("RGB", (4000, 2))
    parts = (
        {"type": "text", "text": "a"},
        as_content(Clip((thin, thin))),
        as_content(clip_of(family, (1, 2))),
    )
    if family.has_tiles:  # why: it scales any shape to a square
        return
    with pytest.raises(RequestError, match="cannot take this picture") as refused:
        family.model.prompts.prepare([{"role": "user", "content": list(parts)}])
    assert refused.value.field == "messages[0].content[1]"


@pytest.mark.parametrize(
    "checkpoint", ["idefics3_checkpoint", "internvl_checkpoint", "gemma3_checkpoint", "llama_checkpoint"]
)
def test_other_families_refuse_videos(request: pytest.FixtureRequest, checkpoint: str) -> None:
    prompts = load_prompts(EngineConfig(str(request.getfixturevalue(checkpoint))))
    assert not prompts.reads_videos
    with pytest.raises(RequestError, match="reads no videos") as refused:
        prompts.prepare([{"role": "user", "content": [as_content(Clip((BLACK, BLACK)))]}])
    assert refused.value.field == "messages[0].content[0]"


def test_smolvlm_reads_no_images_beside_videos(smolvlm_checkpoint: Path) -> None:
    """As the stock model, whose processor loses the images without a word."""
    prompts = load_prompts(EngineConfig(str(smolvlm_checkpoint)))
    parts = [as_content(BLACK), as_content(Clip((BLACK, BLACK)))]
    with pytest.raises(RequestError, match="not both") as refused:
        prompts.prepare([{"role": "user", "content": parts}])
    assert refused.value.field == "messages[0].content[1]"
