"""What holds for every mix of sequences, sizes and limits."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlm_engine.builders import finish_step, image, make_scheduler, make_sequence
from vlm_engine.plan import StepPlan
from vlm_engine.scheduler import Scheduler
from vlm_engine.sequence import Sequence

CAPACITY = 96


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    parts = draw(
        st.lists(st.tuples(st.integers(0, 12), st.integers(1, 20), st.sampled_from("abc")), max_size=2)
    )
    images, position, both_ways = [], draw(st.integers(0, 3)), draw(st.booleans())
    for gap, length, content in parts:
        position += gap + 1
        images.append(image(position, length, f"{content}{length}", both_ways=both_ways))
        position += length
    num_prompt = position + draw(st.integers(1, 10))
    return make_sequence(
        num_prompt,
        max_tokens=draw(st.integers(1, 12)),
        priority=draw(st.sampled_from(["interactive", "background"])),
        images=tuple(images),
        text=draw(st.integers(0, 2)),
        expires_at=draw(st.sampled_from([None, None, 5.0])),
        tenant=draw(st.sampled_from(["", "yard"])),
    )


def check_plan(scheduler: Scheduler, plan: StepPlan, encoded: set[bytes], budget: int) -> None:
    # why: an image that may not be cut can be longer than a step
    whole = [
        c.num_tokens
        for c in plan.chunks
        for i in c.sequence.images_between(c.start, c.end)
        if i.attends_both_ways
    ]
    assert plan.num_tokens <= budget or (whole and plan.num_tokens - max(whole) < budget)
    assert len({chunk.sequence.request_id for chunk in plan.chunks}) == len(plan.chunks)
    assert len(scheduler.running) <= scheduler.max_num_seqs
    encoded.difference_update(plan.evicted)
    for item in plan.encodes:
        assert item.image.digest not in encoded, "encoded while still there"
        encoded.add(item.image.digest)
    for chunk in plan.chunks:
        assert 0 <= chunk.start < chunk.end <= chunk.sequence.num_tokens
        assert len(chunk.sequence.block_ids) * scheduler.pool.block_size >= chunk.end
        for picture in chunk.sequence.images_between(chunk.start, chunk.end):
            assert picture.digest in encoded, "image token before its image"
            assert chunk.end >= picture.end or not picture.attends_both_ways, "image was cut"


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(st.tuples(sequences(), st.integers(0, 8)), min_size=1, max_size=10),
    budget=st.integers(1, 40),
    num_blocks=st.integers(24, 40),
    encoder_tokens=st.integers(20, 64),
    max_num_seqs=st.integers(1, 5),
    cancels=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30)), max_size=3),
    num_chat_blocks=st.sampled_from([0, 4, 12, 23]),
)
def test_blocks_are_conserved_budget_kept_and_all_finish(
    arrivals: list[tuple[Sequence, int]],
    budget: int,
    num_blocks: int,
    encoder_tokens: int,
    max_num_seqs: int,
    cancels: list[tuple[int, int]],
    num_chat_blocks: int,
) -> None:
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        encoder_tokens=encoder_tokens,
        budget=budget,
        max_num_seqs=max_num_seqs,
        num_chat_blocks=num_chat_blocks,
    )
    encoded: set[bytes] = set()
    step, pending = 0, sorted(arrivals, key=lambda pair: pair[1])
    while pending or scheduler.has_work:
        assert step < 5000, "no progress"
        while pending and pending[0][1] <= step:
            scheduler.add(pending.pop(0)[0])
        for index, when in cancels:
            if (
                when == step
                and index < len(arrivals)
                and arrivals[index][0] in scheduler.running + scheduler.waiting
            ):
                scheduler.finish(arrivals[index][0], "cancelled")
        had_work = scheduler.has_work
        plan = scheduler.plan(float(step))
        assert plan.chunks or plan.expired or not had_work, "a step without progress"
        check_plan(scheduler, plan, encoded, budget)
        finish_step(scheduler, plan)
        scheduler.check_integrity()
        step += 1
    assert scheduler.pool.num_free == num_blocks
    assert all(s.finish_reason in {"length", "expired", "cancelled"} for s, _ in arrivals)
    assert all(s.num_output_tokens == s.max_tokens for s, _ in arrivals if s.finish_reason == "length")


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30), data=st.data())
def test_the_pool_conserves_blocks(lengths: list[int], data: st.DataObject) -> None:
    pool = make_scheduler(num_blocks=40).pool
    holders: list[list[int]] = []
    for number, length in enumerate(lengths):
        if length > pool.num_free and holders:
            pool.release(holders.pop(data.draw(st.integers(0, len(holders) - 1))))
        if length <= pool.num_free:
            holders.append(pool.allocate(length))
            pool.publish(holders[-1][0], b"%d" % (number % 5))
        found = pool.find([b"%d" % data.draw(st.integers(0, 4))])
        if found:
            pool.hold(found)
            holders.append(found)
        pool.check_integrity(holders)
    assert pool.num_free + len({block for holder in holders for block in holder}) == 40
