"""The engine's greedy tokens are those of `generate()`, however the work is cut, shared or cached."""

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from PIL import Image

from tests.vlm_engine.guesses import Guesses
from tests.vlm_engine.reference import (
    Case,
    Family,
    drain,
    images_of,
    least_chunks,
    near_identical,
    prompt_length,
    run,
    tight_limits,
)
from vlm_engine import Engine

ONE_PASS = 4096
BLOCK = 16
FAMILIES = [
    "qwen3_vl_checkpoint",
    "qwen2_5_vl_checkpoint",
    "qwen2_vl_checkpoint",
    "smolvlm_checkpoint",
    "idefics3_checkpoint",
    "internvl_checkpoint",
    "gemma3_checkpoint",
]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return Family.load(request.getfixturevalue(request.param))


def shapes_of(family: Family) -> list[Case]:
    """An image at the start, in the middle, at the end, two, three of odd sizes, none."""
    a, b = family.picture(1), family.picture(2, columns=3, rows=7)
    long = "Two people are walking on the left, and a red car is parked. "
    return [
        Case("no image", ("What is happening here?",)),
        Case("start", (a, "What is happening here?")),
        Case("middle", (long, a, "Is anybody there?")),
        Case("end", (long, a)),
        Case("two images", (a, "and then", b, "What changed?")),
        Case("same image twice", (b, "and", b)),
        Case(
            "three odd images",
            (family.picture(3, 2, 2), family.picture(4, 9, 1), family.picture(5, 1, 5), long),
        ),
    ]


@pytest.fixture(scope="module")
def shapes(family: Family) -> list[tuple[Case, list[int]]]:
    return [(case, family.greedy(case)) for case in shapes_of(family)]


@pytest.mark.parametrize("chunk", [1, 7, 32, 256, ONE_PASS])
def test_any_chunk_size(family: Family, shapes: list[tuple[Case, list[int]]], chunk: int) -> None:
    """One request at a time, with nothing cached, so that every prompt is really cut into such chunks."""
    for case, expected in shapes:
        engine = family.engine(max_num_batched_tokens=chunk, enable_prefix_caching=False)
        assert run(engine, [case])[case.name] == expected, case.name
        num_chunks = least_chunks(engine, case, chunk)
        # why: a chunk also ends before an image for which the encoder has no budget left in this step
        num_early_ends = engine.stats().num_steps - (num_chunks + case.num_tokens - 1)
        assert 0 <= num_early_ends <= (len(images_of(engine, case)) if family.has_tiles else 0), case.name


@pytest.mark.parametrize("rows_per_slice", [4, 20, 64])
def test_any_slices_of_the_encoder(
    family: Family, shapes: list[tuple[Case, list[int]]], rows_per_slice: int
) -> None:
    model = family.model
    whole = model.encoder
    model.encoder = family.tower(rows_per_slice)
    try:
        for case, expected in shapes:
            assert run(family.engine(), [case])[case.name] == expected, case.name
    finally:
        model.encoder = whole


def test_an_image_encoded_over_many_steps(family: Family) -> None:
    """E9: a chat's target is so short that the encoder stops between slices; no token changes."""
    chat = Case("chat", ("What is happening here?",), 60)
    frame = Case("frame", ("and", family.picture(9, 8, 8), "What is this?"), 6, {"priority": "background"})
    model, whole = family.model, family.model.encoder
    model.encoder = family.tower(4)
    try:
        engine = family.engine(scheduler="latency", chat_itl_ms=1.0, chat_ttft_ms=1.0)
        images, is_cut = images_of(engine, frame), set()
        for case in (chat, frame):
            engine.add(case.request)
        answers: dict[str, list[int]] = {"chat": [], "frame": []}
        cache = engine.scheduler.encoder_cache
        while engine.has_work:
            for event in engine.step():
                answers[event.request_id] += event.token_ids
            is_cut |= {i.digest for i in images if i.digest in cache and cache.num_left(i)}
    finally:
        model.encoder = whole
    assert answers == {case.name: family.greedy(case) for case in (chat, frame)}
    assert is_cut


@pytest.fixture(scope="module")
def mixed(family: Family) -> list[tuple[Case, list[int]]]:
    """Eight requests of other shapes, lengths and importance; two of them share a picture, two a question."""
    shared, long = family.picture(11), "It is night and the street is empty. " * 3
    cases = [
        Case("a", ("What is this?", shared), 24),
        Case("b", ("What is happening in this picture?",), 9),
        Case(
            "c", (family.picture(12, 4, 4), "and", family.picture(13, 2, 3)), 16, {"priority": "background"}
        ),
        Case("d", (long, shared), 5),
        Case(
            "e",
            ("What is happening in this picture?", family.picture(14, 7, 7)),
            12,
            {"priority": "background"},
        ),
        Case("f", (long + "Is anybody there?",), 30),
        Case("g", (family.picture(15, 3, 3),), 1),
        Case("h", ("a", family.picture(16, 5, 2), "b"), 18, {"priority": "background"}),
    ]
    return [(case, family.greedy(case)) for case in cases]


@pytest.mark.parametrize("every", [0, 1, 5])
@pytest.mark.parametrize("chunk", [7, 32, 256])
def test_eight_sequences_that_come_and_go(
    family: Family, mixed: list[tuple[Case, list[int]]], chunk: int, every: int
) -> None:
    engine = family.engine(max_num_batched_tokens=chunk, max_num_seqs=5)
    answers = run(engine, [case for case, _ in mixed], every=every)
    assert answers == {case.name: expected for case, expected in mixed}
    images = images_of(engine, *(case for case, _ in mixed))
    assert engine.stats().num_encoded_images == len(images)
    assert family.has_tiles or len(images) == 6


def test_eight_sequences_with_proposed_tokens(family: Family, mixed: list[tuple[Case, list[int]]]) -> None:
    """Right and wrong ones beside chunks of prompts; then once more on what was left in the cache."""
    engine = family.engine(max_num_batched_tokens=24, max_num_seqs=5)
    coming = {case.name: expected for case, expected in mixed}
    engine.scheduler.speculator = guesses = Guesses(coming)
    for every in (1, 5):
        assert run(engine, [case for case, _ in mixed], every=every) == coming
    assert guesses.stats.num_draft_tokens > guesses.stats.num_accepted_tokens > 20


def test_eight_sequences_in_too_little_memory(family: Family, mixed: list[tuple[Case, list[int]]]) -> None:
    """E8, E16: sequences are preempted, images fall out of the encoder cache, no token changes."""
    limits = tight_limits(family.engine(), [case for case, _ in mixed])
    engine = family.engine(max_num_batched_tokens=20, **limits)
    answers = run(engine, [case for case, _ in mixed], every=2)
    assert answers == {case.name: expected for case, expected in mixed}
    assert engine.stats().num_preemptions > 0


def test_cancelled_sequences_leave_the_others_alone(
    family: Family, mixed: list[tuple[Case, list[int]]]
) -> None:
    """E20: every second request is cancelled, each after one more step; all its memory is free at once."""
    engine = family.engine(max_num_batched_tokens=16)
    for case, _ in mixed:
        engine.add(case.request)
    answers: dict[str, list[int]] = {case.name: [] for case, _ in mixed}
    for name in "bdfh":
        for event in engine.step():
            answers[event.request_id] += event.token_ids
        event = engine.abort(name)
        assert event is not None
        engine.check_integrity()
    for event in drain(engine):
        answers[event.request_id] += event.token_ids
    for case, expected in mixed:
        size = len(answers[case.name]) if case.name in "bdfh" else None
        assert answers[case.name] == expected[:size], case.name


@pytest.fixture(scope="module")
def shifted(family: Family) -> list[tuple[Case, list[int]]]:
    """The same image of 100 tokens, or many tiles, behind ever one more token of text."""
    image = family.picture(21, 10, 10)
    cases = [Case(f"offset {n}", ("z" * n, image, "What is this?"), 4) for n in range(34)]
    return [(case, family.greedy(case)) for case in cases]


def test_image_at_every_offset_of_the_chunk(family: Family, shifted: list[tuple[Case, list[int]]]) -> None:
    """E1: budget 32, an image of more tokens, its start at every offset against the chunk."""
    engine = family.engine(max_num_batched_tokens=32, enable_prefix_caching=False)
    starts = []
    for case, expected in shifted:
        images = images_of(engine, case)
        starts.append(images[0].start)
        assert images[-1].end - images[0].start > 32
        assert run(engine, [case])[case.name] == expected, case.name
    assert {start % 32 for start in starts} == set(range(32))
    assert engine.stats().num_encoded_images == len(images)


def test_image_at_every_offset_of_a_cached_prefix(
    family: Family, shifted: list[tuple[Case, list[int]]]
) -> None:
    """E1, E3: the same, each twice, so that the second run begins somewhere else."""
    engine = family.engine(max_num_batched_tokens=32, kv_cache_tokens=16384)
    for case, expected in shifted[: BLOCK + 1]:
        assert [run(engine, [case])[case.name] for _ in range(2)] == [expected] * 2, case.name


def test_chunk_after_the_image_needs_no_image(family: Family) -> None:
    """E2: the last chunk holds text only; the image may be forgotten before it runs."""
    case = Case("x", (family.picture(31, 5, 4), "What is this? " * 6), 8)
    images = images_of(family.engine(), case)
    engine = family.engine(max_num_batched_tokens=32, encoder_cache_tokens=max(i.length for i in images))
    engine.add(case.request)
    answer: list[int] = []
    while engine.scheduler.waiting or engine.scheduler.running[0].num_computed_tokens < images[-1].end:
        answer += [token for event in engine.step() for token in event.token_ids]
    assert engine.scheduler.running[0].num_left > 1
    assert engine.scheduler.encoder_cache.num_held == 0
    for image in images:
        engine.scheduler.encoder_cache.drop(image.digest)
    answer += [token for event in drain(engine) for token in event.token_ids]
    assert answer == family.greedy(case)
    assert engine.stats().num_encoded_images == len(images)


def test_same_request_twice_encodes_nothing(family: Family) -> None:
    """E3: the second run starts on cached blocks, past the image, although the embeddings are long gone."""
    case = Case("x", (family.picture(41), "What is this picture of? " * 3), 12)
    other = Case("y", (family.picture(42), "and this?"), 3)
    num_images = len(images_of(family.engine(), case, other))
    longest = max(image.length for image in images_of(family.engine(), case))
    engine = family.engine(encoder_cache_tokens=longest)
    expected = family.greedy(case)
    assert run(engine, [case])["x"] == expected
    run(engine, [other])
    assert engine.stats().num_encoded_images == num_images
    engine.add(case.request)
    events = drain(engine)
    assert [token for event in events for token in event.token_ids] == expected
    usage = events[-1].usage
    assert usage is not None
    assert usage.cached_tokens == (usage.prompt_tokens - 1) // BLOCK * BLOCK
    assert engine.stats().num_encoded_images == num_images


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_cached_prefix_ends_inside_the_image(family: Family, is_forgotten: bool) -> None:
    """E4: an image over three blocks, the reused blocks end in its middle, the embeddings are sliced."""
    picture = family.picture(51, 8, 6)
    engine = family.engine(block_size=BLOCK)
    num_inside = 0
    for n in range(0, BLOCK, 3):
        case = Case(f"text {n}", ("z" * n, picture), 6)
        images = images_of(engine, case)
        reused = (prompt_length(engine, case) - 1) // BLOCK * BLOCK
        num_inside += any(image.start < reused < image.end for image in images)
        expected = family.greedy(case)
        assert run(engine, [case])[case.name] == expected, case.name
        if is_forgotten:
            for image in images:
                engine.scheduler.encoder_cache.drop(image.digest)
        assert run(engine, [case])[case.name] == expected, case.name
    assert num_inside >= (1 if family.has_tiles else 3)
    assert (engine.stats().num_encoded_images == len(images)) != is_forgotten


def test_an_image_over_two_requests_is_encoded_once(family: Family) -> None:
    """E9: a prompt cut into 8 chunks, and a second one with the same image beside it."""
    cases = [Case(name, (name, family.picture(61, 10, 10), "What is this?"), 6) for name in "xy"]
    engine = family.engine()
    chunk = -(-prompt_length(engine, cases[0]) // 8)
    engine = family.engine(max_num_batched_tokens=chunk)
    assert run(engine, cases[:1]) == {"x": family.greedy(cases[0])}
    assert family.has_tiles or engine.stats().num_steps == 8 + 5
    assert run(engine, cases[1:]) == {"y": family.greedy(cases[1])}
    assert engine.stats().num_encoded_images == len(images_of(engine, *cases))


def test_images_that_do_not_fit_together_take_turns(family: Family) -> None:
    """E6, E7, E9: room for 1.1 images, three of them in two prompts cut into chunks; each is encoded once."""
    a, b, c = (family.picture(seed, 10, 10) for seed in (62, 63, 64))
    cases = [Case("x", (a, "and", b), 4), Case("y", (c, "What is this?"), 4)]
    expected = {case.name: family.greedy(case) for case in cases}
    images = images_of(family.engine(), *cases)
    room = int(1.1 * sum(image.length for image in images) / 3)
    engine = family.engine(max_num_batched_tokens=24, encoder_cache_tokens=room)
    assert run(engine, cases) == expected
    assert engine.stats().num_encoded_images == len(images)


def test_same_bytes_in_another_shape_are_another_image(family: Family) -> None:
    """E10: 30x150 and 150x30 pixels of the same bytes give their own answers, with all caches on."""
    data = np.random.default_rng(7).integers(0, 256, 30 * 150 * 3, dtype=np.uint8).tobytes()
    images = [Image.frombytes("RGB", size, data) for size in ((30, 150), (150, 30))]
    cases = [Case(f"{image.size}", (image, "What is this?"), 12) for image in images]
    expected = {case.name: family.greedy(case) for case in cases}
    engine = family.engine()
    # why: one after the other, so that the second finds what the first left in the caches
    assert run(engine, cases[:1]) | run(engine, cases[1:]) == expected
    assert len({tuple(tokens) for tokens in expected.values()}) == 2
    assert engine.stats().num_encoded_images == len(images_of(engine, *cases))


def test_each_of_16_near_identical_frames_has_its_own_answer(family: Family) -> None:
    """E11: at concurrency 16, with the same question."""
    frames = near_identical(family)
    cases = [Case(f"frame {i}", (frame, "What is this?"), 8) for i, frame in enumerate(islice(frames, 16))]
    expected = {case.name: family.greedy(case) for case in cases}
    assert len({tuple(tokens) for tokens in expected.values()}) >= 8
    engine = family.engine(max_num_seqs=16, max_num_batched_tokens=64)
    assert run(engine, cases) == expected
    images = images_of(engine, *cases)
    assert engine.stats().num_encoded_images == len(images)
    assert len(images) == 16 * len(images_of(engine, cases[0]))


def test_position_delta_is_one_constant_of_the_sequence(family: Family) -> None:
    """E12: a prompt of 40 tokens with an image, budget 32; later tokens go on at the right position."""
    case = Case("x", ("z" * 5, family.picture(81, 5, 4)), 30)
    engine = family.engine(max_num_batched_tokens=32)
    assert family.has_tiles or 36 <= prompt_length(engine, case) <= 44
    assert engine.prepare(case.request)[0].position_delta == (0 if family.has_tiles else -15)
    assert run(engine, [case])["x"] == family.greedy(case)


def test_max_tokens_end_at_the_context(family: Family) -> None:
    """E23: as many tokens as the context has room for, and they are the right ones."""
    case = Case("x", (family.picture(91, 3, 3), "hello"), 500)
    length = prompt_length(family.engine(), case)
    engine: Engine = family.engine(max_model_len=length + 11)
    short = Case("x", case.parts, 11)
    assert run(engine, [case])["x"] == family.greedy(short)


def test_text_is_the_decode_of_the_tokens(family: Family, mixed: list[tuple[Case, list[int]]]) -> None:
    """E21: deltas of eight streams side by side, each joined, are the decodes of `generate()`."""
    engine, texts = family.engine(), {case.name: "" for case, _ in mixed}
    for case, _ in mixed:
        engine.add(case.request)
    for event in drain(engine):
        texts[event.request_id] += event.text
    decode = family.processor.tokenizer.decode
    assert texts == {case.name: decode(ids, skip_special_tokens=True) for case, ids in mixed}


def test_the_models_end_token_ends_the_answer(family: Family) -> None:
    """As in `generate()`: the token counts, but is no text; with `ignore_eos` it is like any other."""
    case = Case("x", (family.picture(1), "What is this?"), 20)
    expected = family.greedy(case)
    end = next(i for i in range(5, 20) if expected[i] not in expected[:i])
    model, spec = family.model, family.model.spec
    model.spec = replace(spec, stop_token_ids=frozenset({expected[end]}))
    try:
        engine = family.engine()
        sampling = replace(case.request.sampling, ignore_eos=False)
        engine.add(replace(case.request, sampling=sampling))
        events = drain(engine)
        assert run(engine, [case])["x"] == expected
    finally:
        model.spec = spec
    assert [token for event in events for token in event.token_ids] == expected[: end + 1]
    assert "".join(event.text for event in events) == family.processor.tokenizer.decode(expected[:end])
    assert [event.finish_reason for event in events] == [None] * end + ["stop"]


def test_a_stop_string_ends_the_answer(family: Family) -> None:
    """E22: across tokens; the text ends before it, and the blocks are free at once."""
    case = Case("x", ("What is happening here?",), 30)
    text = family.processor.tokenizer.decode(family.greedy(case))
    stop = text[11:15]
    engine = family.engine()
    engine.add(replace(case.request, sampling=replace(case.request.sampling, stop=(stop,))))
    events = drain(engine)
    assert "".join(event.text for event in events) == text[: text.index(stop)]
    assert events[-1].finish_reason == "stop"
    assert len(events) < 30
    engine.check_integrity()


def test_a_seed_gives_the_same_tokens_in_any_company(
    family: Family, mixed: list[tuple[Case, list[int]]]
) -> None:
    """Alone in one pass; cut, crowded, preempted and computed again: the same random answer."""
    case = Case("seeded", (family.picture(1), "Tell me more."), 24)
    sampling = replace(case.request.sampling, temperature=1.5, top_p=0.95, seed=11)
    request = replace(case.request, sampling=sampling)
    answers = []
    tight = tight_limits(family.engine(), [case for case, _ in mixed])
    for limits in ({}, {"max_num_batched_tokens": 20} | tight):
        engine = family.engine(**limits)
        for other in [each.request for each, _ in mixed] if limits else []:
            engine.add(other)
        engine.add(request)
        events = drain(engine)
        answers.append([t for e in events if e.request_id == "seeded" for t in e.token_ids])
    assert engine.stats().num_preemptions > 0
    assert answers[0] == answers[1]
    assert len(answers[0]) == 24
    assert answers[0] != family.greedy(case)
