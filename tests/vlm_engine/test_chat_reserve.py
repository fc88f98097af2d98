"""KV blocks that background work leaves to chats, and the slot that chats leave to it."""

import pytest

from tests.vlm_engine.builders import finish_step, make_scheduler, make_sequence, run
from vlm_engine.config import EngineConfig
from vlm_engine.scheduler import Scheduler
from vlm_engine.sequence import Sequence, Status


def step(scheduler: Scheduler, now: float = 0.0) -> None:
    finish_step(scheduler, scheduler.plan(now))
    scheduler.check_integrity()


def frames(count: int, num_prompt: int, **more: int) -> list[Sequence]:
    return [make_sequence(num_prompt, priority="background", **more) for _ in range(count)]


def test_a_chat_finds_blocks_where_frames_want_all() -> None:
    scheduler = make_scheduler(num_blocks=20, budget=100, num_chat_blocks=8)
    for frame in frames(3, 21):
        scheduler.add(frame)
    step(scheduler)
    assert (len(scheduler.running), scheduler.pool.num_free) == (2, 8)
    chat = make_sequence(28)
    scheduler.add(chat)
    step(scheduler)
    assert chat.status is Status.RUNNING
    run(scheduler)
    assert not scheduler.preemptions


def test_chats_use_the_reserve_and_then_what_frames_use_too() -> None:
    scheduler = make_scheduler(num_blocks=20, budget=100, num_chat_blocks=8)
    scheduler.add(make_sequence(32, max_tokens=1))
    for frame in frames(3, 15):
        scheduler.add(frame)
    step(scheduler)
    assert len(scheduler.running) == 3, "the chat holds the reserve, so the frames get all the rest"


def test_a_frame_larger_than_the_rest_runs_and_gives_way() -> None:
    scheduler = make_scheduler(num_blocks=20, budget=16, num_chat_blocks=12)
    (large,) = frames(1, 70)
    scheduler.add(large)
    for _ in range(4):
        step(scheduler)
    assert scheduler.pool.num_free < 12
    chat = make_sequence(40)
    scheduler.add(chat)
    run(scheduler)
    assert (large.num_preemptions, chat.num_preemptions) == (1, 0)
    assert (large.finish_reason, chat.finish_reason) == ("length", "length")


@pytest.mark.parametrize(("num_chat_blocks", "num_cached"), [(0, 0), (8, 28)])
def test_frames_do_not_push_out_what_a_chat_will_ask_again(num_chat_blocks: int, num_cached: int) -> None:
    """The next turn of a conversation begins with all of the last one."""
    scheduler = make_scheduler(num_blocks=20, budget=100, num_chat_blocks=num_chat_blocks)
    scheduler.add(make_sequence(30, text=0))
    run(scheduler)
    for frame in frames(8, 30):
        scheduler.add(frame)
    run(scheduler)
    again = make_sequence(40, text=0)
    scheduler.add(again)
    run(scheduler)
    assert again.num_cached_tokens == num_cached


def test_chats_leave_a_slot_to_frames_that_wait() -> None:
    scheduler = make_scheduler(max_num_seqs=2, budget=64)
    chats = [make_sequence(8, max_tokens=20) for _ in range(4)]
    (frame,) = frames(1, 8, max_tokens=2)
    for sequence in (*chats, frame):
        scheduler.add(sequence)
    step(scheduler)
    assert scheduler.running == [chats[0], frame]
    step(scheduler)
    step(scheduler)
    assert scheduler.running == chats[:2], "all slots without frames"


def test_a_reserve_of_everything_is_refused() -> None:
    with pytest.raises(ValueError, match="chat_kv_reserve: must be at least 0 and below 1, not 1"):
        EngineConfig("model", chat_kv_reserve=1)
