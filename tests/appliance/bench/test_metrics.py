"""The arithmetic of the benchmarks, on events made by hand; times in seconds, results in milliseconds."""

import pytest

from appliance.bench.load import Recording
from appliance.bench.metrics import gaps_ms, measurements, stall_share, summary, ttfts_ms
from appliance.bench.target import Exchange


def answer(due_at: float, *times: float, ended_at: float | None = None, **more: object) -> Exchange:
    """An answer whose tokens came one by one at `times`."""
    return Exchange(due_at, [(time, 1) for time in times], ended_at, **more)


def test_percentiles_are_linear_between_ranks():
    told = summary([float(value) for value in range(101)])

    assert told == {"n": 101, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100, "mean": 50}
    assert summary([10.0, 20.0])["p50"] == 15
    assert summary([7.0])["p99"] == 7


def test_nothing_measured_is_no_number():
    assert summary([]) == {
        "n": 0,
        "p50": None,
        "p90": None,
        "p95": None,
        "p99": None,
        "max": None,
        "mean": None,
    }
    assert stall_share([]) is None


def test_the_share_of_stalls_is_one_of_time_not_of_gaps():
    assert stall_share([100.0] * 6 + [400.0]) == 0.4
    assert stall_share([20.0] * 9) == 0


def test_gaps_lie_between_chunks_of_one_answer_inside_the_window():
    chats = [
        answer(0, 0.5, 0.9, 1.1, 1.15, ended_at=1.2),
        answer(1.2, 1.9, 1.95, 2.1, ended_at=2.2),
    ]

    assert gaps_ms(chats, begin=1, end=2) == pytest.approx([200, 50, 50])


def test_a_gap_that_is_still_open_counts_when_it_is_the_longest():
    stalled = answer(0, 1.0, 1.1)

    assert gaps_ms([stalled], begin=0, end=9) == pytest.approx([100, 7900])
    assert gaps_ms([stalled], begin=0, end=1.15) == pytest.approx([100])
    assert gaps_ms([stalled], begin=2, end=9) == pytest.approx([7000])


def test_the_first_token_is_timed_from_when_the_request_was_due():
    asked = [answer(0.5, 1.2), answer(1.0, 1.25), answer(1.5, 3.5), answer(2.0, 2.1)]

    assert ttfts_ms(asked, begin=1, end=2) == pytest.approx([250, 2000])


def test_a_chat_that_never_got_a_token_is_seen():
    assert ttfts_ms([answer(1.0), answer(1.0, 1.5, ended_at=2.0)], begin=0, end=5) == pytest.approx(
        [500, 4000]
    )


def test_a_run_in_numbers():
    recording = Recording(begin=10, end=20, num_pictures=3)
    recording.chats = [
        answer(10, 10.5, 10.75, ended_at=11, prompt_tokens=60, has_counts=True),
        answer(11, 11.5, ended_at=11.6, error="500 broken"),
    ]
    recording.chats[0].chunks.append((10.9, 3))
    recording.frames = [
        answer(9, 9.5, ended_at=10.5),
        answer(12, 13, ended_at=14, timings={"encode_ms": 300.0}),
        answer(19, 21, ended_at=22, timings={"encode_ms": 500.0}),
        answer(15, 16),
    ]

    told = measurements(recording)

    chat, frames = told["chat"], told["frames"]
    assert (chat["num_answers"], chat["num_tokens"], chat["tokens_per_s"]) == (1, 6, 0.6)
    assert chat["tokens_per_chunk"] == 1.5
    assert chat["prompt_tokens"] == 60
    assert (frames["num_sent"], frames["num_done"], frames["num_open_at_end"]) == (3, 2, 2)
    assert frames["frames_per_s"] == 0.2
    assert frames["num_repeated"] == 1
    assert frames["latency_ms"]["max"] == 3000
    assert frames["server_ms"] == {"encode_ms": 400.0}
    assert told["errors"] == {"num": 1, "messages": {"500 broken": 1}}


def test_tokens_are_counted_by_the_server_where_it_tells():
    told, untold = Exchange(0), Exchange(0)
    delta = {"choices": [{"delta": {"content": "x"}}]}
    for count in (0, 1, 4, 4):
        told.read(delta | {"usage": {"prompt_tokens": 9, "completion_tokens": count}}, now=count)
    for _ in range(2):
        untold.read(delta | {"usage": None}, now=1)
    untold.read({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}, now=2)

    assert told.chunks == [(1, 1), (4, 3)]
    assert told.has_counts
    assert untold.chunks == [(1, 1), (1, 1)]
    assert untold.prompt_tokens == 9
    assert not untold.has_counts
