"""What runs next, decided without a model."""

import pytest

from tests.vlm_engine.builders import finish_step, image, make_scheduler, make_sequence, run
from vlm_engine.plan import StepPlan
from vlm_engine.scheduler import Scheduler
from vlm_engine.sequence import Sequence, Status


def test_a_prompt_is_prefilled_in_chunks_of_the_budget() -> None:
    scheduler = make_scheduler(budget=32)
    scheduler.add(make_sequence(70, max_tokens=2))
    plans = run(scheduler)
    assert [[(c.start, c.end) for c in plan.chunks] for plan in plans] == [
        [(0, 32)],
        [(32, 64)],
        [(64, 70)],
        [(70, 71)],
    ]


def test_decodes_come_first_then_interactive_then_background_prefill() -> None:
    scheduler = make_scheduler(budget=16)
    background = make_sequence(40, priority="background")
    chat = make_sequence(4, max_tokens=9)
    scheduler.add(background)
    scheduler.add(chat)
    finish_step(scheduler, scheduler.plan(0.0))
    late = make_sequence(6)
    scheduler.add(late)
    plan = scheduler.plan(1.0)
    assert [(c.sequence, c.num_tokens) for c in plan.chunks] == [(chat, 1), (late, 6), (background, 9)]


@pytest.mark.parametrize("is_running", [False, True])
def test_a_short_chat_passes_a_long_one_but_not_for_ever(is_running: bool) -> None:
    for waited_s, first in ((1.0, "short"), (60.0, "long")):
        scheduler = make_scheduler(budget=8)
        long, short = make_sequence(100, arrival_s=0.0), make_sequence(6, arrival_s=waited_s)
        scheduler.add(long)
        if is_running:
            finish_step(scheduler, scheduler.plan(0.0))
        scheduler.add(short)
        (chunk, *_) = scheduler.plan(waited_s).chunks
        assert chunk.sequence is {"short": short, "long": long}[first]


def test_background_decodes_step_beside_a_long_interactive_prefill() -> None:
    scheduler = make_scheduler(budget=8)
    frame = make_sequence(4, priority="background", max_tokens=20)
    scheduler.add(frame)
    finish_step(scheduler, scheduler.plan(0.0))
    scheduler.add(make_sequence(100))
    for step in range(5):
        plan = scheduler.plan(float(step))
        assert plan.num_tokens == 8
        assert frame in [c.sequence for c in plan.chunks]
        finish_step(scheduler, plan)


def test_an_image_is_encoded_once_and_before_its_tokens() -> None:
    """E9: one image in a prompt cut into eight chunks."""
    scheduler = make_scheduler(budget=8)
    scheduler.add(make_sequence(64, images=(image(10, 40, "a"),)))
    plans = run(scheduler)
    encodes = [i for i, plan in enumerate(plans) for _ in plan.encodes]
    first_read = next(i for i, plan in enumerate(plans) if plan.chunks[0].end > 10)
    assert encodes == [first_read]


def test_text_after_an_image_wants_no_encoding() -> None:
    """E2: the cached prefix covers the image, the rest is text only."""
    scheduler = make_scheduler(budget=64)
    picture = (image(4, 8, "a"),)
    scheduler.add(make_sequence(40, images=picture, text=0))
    run(scheduler)
    scheduler.add(make_sequence(40, images=picture, text=0))
    (plan, *_) = run(scheduler)
    assert plan.chunks[0].start == 36
    assert plan.encodes == ()


def test_equal_prompts_share_blocks_and_other_images_do_not() -> None:
    scheduler = make_scheduler(budget=64)
    scheduler.add(make_sequence(40, images=(image(4, 8, "a"),), text=0))
    run(scheduler)
    same, other = (make_sequence(40, images=(image(4, 8, name),), text=0) for name in "ab")
    scheduler.add(same)
    scheduler.add(other)
    run(scheduler)
    assert (same.num_cached_tokens, other.num_cached_tokens) == (36, 4)


def test_a_cached_prefix_that_ends_inside_an_image_encodes_it_again() -> None:
    """E4: the image spans three blocks, the prefix ends in it."""
    scheduler = make_scheduler(budget=64, encoder_tokens=20)
    picture = image(4, 12, "a")
    scheduler.add(make_sequence(13, images=(image(4, 9, "a"),), max_tokens=1, text=0))
    run(scheduler)
    scheduler.encoder_cache.drop(picture.digest)
    longer = make_sequence(30, images=(picture,), max_tokens=1, text=0)
    scheduler.add(longer)
    (plan,) = run(scheduler)
    assert longer.num_cached_tokens == 12
    assert [item.image for item in plan.encodes] == [picture]


def test_two_images_fit_one_after_the_other() -> None:
    """E6: the encoder cache holds 1.1 images."""
    scheduler = make_scheduler(budget=64, encoder_tokens=44)
    scheduler.add(make_sequence(100, images=(image(2, 40, "a"), image(50, 40, "b"))))
    plans = run(scheduler)
    assert [len(plan.encodes) for plan in plans if plan.encodes] == [1, 1]


def test_waiting_sequences_hold_nothing() -> None:
    """E7: the encoder cache is full, many wait."""
    scheduler = make_scheduler(budget=8, encoder_tokens=40, max_num_seqs=2)
    for name in "abcdef":
        scheduler.add(make_sequence(50, images=(image(4, 40, name),)))
    plans = run(scheduler)
    assert sum(len(plan.encodes) for plan in plans) >= 6


def test_preempted_inside_an_image_finishes_later() -> None:
    """E8: the image of a preempted sequence is kept or encoded again, never missing."""
    scheduler = make_scheduler(num_blocks=16, budget=16)
    frame = make_sequence(50, images=(image(4, 40, "a"),), priority="background")
    scheduler.add(frame)
    finish_step(scheduler, scheduler.plan(0.0))
    scheduler.add(make_sequence(60))
    run(scheduler)
    assert frame.num_preemptions == 1
    assert frame.finish_reason == "length"


def test_the_image_stays_while_a_second_request_reads_it() -> None:
    """E8: two requests share an image and one ends first."""
    scheduler = make_scheduler(budget=16, encoder_tokens=40)
    first, second = (make_sequence(50, images=(image(4, 40, "a"),), text=i) for i in (0, 1))
    scheduler.add(first)
    scheduler.add(second)
    finish_step(scheduler, scheduler.plan(0.0))
    finish_step(scheduler, scheduler.plan(1.0))
    scheduler.finish(first, "cancelled")
    plans = run(scheduler)
    assert second.finish_reason == "length"
    assert not any(plan.encodes for plan in plans)


def test_one_of_many_is_preempted_and_all_finish() -> None:
    """E16: the pool is full with running sequences only."""
    scheduler = make_scheduler(num_blocks=12, budget=32)
    sequences = [make_sequence(12, max_tokens=20) for _ in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    run(scheduler)
    assert [s.finish_reason for s in sequences] == ["length"] * 3
    assert [s.num_output_tokens for s in sequences] == [20] * 3
    assert scheduler.preemptions.total() >= 1
    assert sequences[0].num_preemptions == 0


def test_interactive_takes_a_slot_from_background_and_equals_do_not() -> None:
    """E17: all slots are taken."""
    scheduler = make_scheduler(max_num_seqs=2, budget=64)
    frames = [make_sequence(8, priority="background", max_tokens=30) for _ in range(2)]
    for frame in frames:
        scheduler.add(frame)
    finish_step(scheduler, scheduler.plan(0.0))
    equal = make_sequence(8, priority="background")
    scheduler.add(equal)
    finish_step(scheduler, scheduler.plan(1.0))
    assert equal.status is Status.WAITING
    chat = make_sequence(8)
    scheduler.add(chat)
    finish_step(scheduler, scheduler.plan(2.0))
    assert chat.status is Status.RUNNING
    assert [frame.num_preemptions for frame in frames] == [0, 1]


def test_chats_wait_for_the_slots_of_their_equals() -> None:
    """E17: who came first too, as long as it does not run."""
    scheduler = make_scheduler(max_num_seqs=2, budget=64)
    chats = [make_sequence(8, max_tokens=5) for _ in range(2)]
    for chat in chats:
        scheduler.add(chat)
    finish_step(scheduler, scheduler.plan(0.0))
    early = make_sequence(4, arrival_s=-9.0)
    scheduler.add(early)
    finish_step(scheduler, scheduler.plan(1.0))
    assert early.status is Status.WAITING
    run(scheduler)
    assert not scheduler.preemptions.total()
    assert early.finish_reason == "length"


def test_a_preempted_sequence_keeps_its_place() -> None:
    """E18: preempted again and again, it still comes before those that arrived later."""
    scheduler = make_scheduler(num_blocks=10, max_num_seqs=4, budget=64)
    frame = make_sequence(20, priority="background", max_tokens=12)
    scheduler.add(frame)
    for round_ in range(4):
        finish_step(scheduler, scheduler.plan(0.0))
        chat = make_sequence(30, max_tokens=1)
        scheduler.add(chat)
        assert finish_step(scheduler, scheduler.plan(0.0)) == [chat], round_
    later = make_sequence(20, priority="background", text=90)
    scheduler.add(later)
    ended: list[Sequence] = []
    while scheduler.has_work:
        ended += finish_step(scheduler, scheduler.plan(9.0))
    assert frame.num_preemptions >= 2
    assert ended.index(frame) < ended.index(later)


def test_expired_and_cancelled_in_the_queue_never_run() -> None:
    """E19."""
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_sequence(8, max_tokens=6))
    finish_step(scheduler, scheduler.plan(0.0))
    late, gone = make_sequence(8, expires_at=3.0), make_sequence(8)
    scheduler.add(late)
    scheduler.add(gone)
    scheduler.finish(gone, "cancelled")
    assert scheduler.plan(2.9).expired == ()
    assert scheduler.plan(3.0).expired == (late,)
    assert late.finish_reason == "expired"
    assert late.first_step_s is None
    assert gone.first_step_s is None


def test_expired_work_never_reaches_the_encoder() -> None:
    """A frame that runs already, and one that was preempted, are as stale as one that waits."""
    scheduler = make_scheduler(budget=8, num_blocks=24)
    frame = make_sequence(60, images=(image(30, 20, "a"),), priority="background", expires_at=2.0)
    scheduler.add(frame)
    assert not finish_and_plan(scheduler, 0.0).encodes
    plan = scheduler.plan(2.0)
    assert (plan.expired, plan.encodes, frame.finish_reason) == ((frame,), (), "expired")
    scheduler.check_integrity()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_a_frame_that_expires_after_its_encoding_is_finished() -> None:
    scheduler = make_scheduler(budget=8)
    frame = make_sequence(60, images=(image(2, 40, "a"),), priority="background", expires_at=2.0)
    scheduler.add(frame)
    assert finish_and_plan(scheduler, 0.0).encodes
    run(scheduler)
    assert frame.finish_reason == "length"


def test_a_preempted_frame_expires_as_one_that_waits() -> None:
    scheduler = make_scheduler(budget=32, num_blocks=16)
    frame = make_sequence(50, images=(image(4, 40, "a"),), priority="background", expires_at=2.0)
    scheduler.add(frame)
    finish_and_plan(scheduler, 0.0)
    chat = make_sequence(60)
    scheduler.add(chat)
    while not frame.num_preemptions:
        finish_and_plan(scheduler, 1.0)
    assert scheduler.plan(2.0).expired == (frame,)


def test_a_preempted_answer_that_has_begun_does_not_expire() -> None:
    """What is half written is finished, though its time is over and it stands in the queue again."""
    scheduler = make_scheduler(budget=64, num_blocks=18)
    frame = make_sequence(
        50, images=(image(4, 40, "a"),), priority="background", expires_at=2.0, max_tokens=9
    )
    scheduler.add(frame)
    finish_and_plan(scheduler, 0.0)
    assert frame.num_output_tokens == 1
    scheduler.add(make_sequence(60))
    while not frame.num_preemptions:
        finish_and_plan(scheduler, 1.0)
    assert scheduler.plan(2.0).expired == ()
    run(scheduler)
    assert (frame.finish_reason, frame.num_output_tokens) == ("length", 9)


def test_of_background_one_prompt_is_computed_after_the_other() -> None:
    """Frames that are half done would hold memory and slots that a more urgent one needs."""
    scheduler = make_scheduler(budget=16)
    frames = [make_sequence(24, priority="background", max_tokens=8) for _ in range(3)]
    for frame in frames:
        scheduler.add(frame)
    finish_and_plan(scheduler, 0.0)
    assert scheduler.running == frames[:1]
    finish_and_plan(scheduler, 1.0)
    assert scheduler.running == frames[:2], "the first one's end leaves room"


def finish_and_plan(scheduler: Scheduler, now: float) -> StepPlan:
    plan = scheduler.plan(now)
    finish_step(scheduler, plan)
    return plan


@pytest.mark.parametrize("steps", range(6))
def test_cancel_frees_everything_at_once(steps: int) -> None:
    """E20: in the queue, while encoding, inside the image, in decode."""
    scheduler = make_scheduler(budget=16)
    sequence = make_sequence(50, images=(image(4, 40, "a"),), max_tokens=9)
    scheduler.add(sequence)
    for step in range(steps):
        finish_step(scheduler, scheduler.plan(float(step)))
    scheduler.finish(sequence, "cancelled")
    scheduler.check_integrity()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    assert scheduler.encoder_cache.num_held == 0


def test_an_empty_plan_does_nothing() -> None:
    scheduler = make_scheduler()
    plan = scheduler.plan(0.0)
    assert plan.is_empty
    assert not scheduler.has_work


def test_stalls_are_named_and_counted() -> None:
    """E25: what gets nothing says why."""
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_sequence(8, max_tokens=6))
    scheduler.add(make_sequence(8))
    finish_step(scheduler, scheduler.plan(0.0))
    assert dict(scheduler.plan(1.0).stalled) == {"slots": 1}
    assert scheduler.counts["slots"] == 2
