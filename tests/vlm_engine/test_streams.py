"""Events on their way to readers that read late."""

import pytest

from vlm_engine import RequestError, TokenEvent
from vlm_engine.streams import Streams


async def read(streams: Streams) -> list[TokenEvent]:
    """What a reader gets that was away until now."""
    stream = streams._streams["x"]
    return [event async for event in streams.follow("x", stream)]


async def test_an_answer_that_is_complete_is_told_however_the_engine_ends() -> None:
    streams = Streams()
    streams.open("x")
    streams.deliver([TokenEvent("x", "all "), TokenEvent("x", "of it", finish_reason="stop")])
    streams.end_all("the engine is gone")
    (event,) = await read(streams)
    assert (event.text, event.finish_reason, event.error) == ("all of it", "stop", None)
    assert "x" not in streams


async def test_of_several_answers_the_complete_ones_are_told_before_the_error() -> None:
    streams = Streams()
    streams.open("x", 3)
    streams.deliver([TokenEvent("x", "half", index=1), TokenEvent("x", "whole", (), "length", index=2)])
    streams.end_all("the engine is gone")
    streams.deliver([TokenEvent("x", "late", index=1)])
    *told, last = await read(streams)
    assert ("whole", "length") in [(event.text, event.finish_reason) for event in told]
    assert (last.finish_reason, last.error, last.index) == ("error", "the engine is gone", 0)
    assert not any("late" in event.text for event in told)


async def test_what_was_read_goes_before_the_error() -> None:
    streams = Streams()
    streams.open("x")
    streams.deliver([TokenEvent("x", "half")])
    streams.end_all("the engine is gone")
    (event,) = await read(streams)
    assert (event.text, event.finish_reason, event.error) == ("half", "error", "the engine is gone")


async def test_a_refusal_is_an_exception_of_its_reader() -> None:
    streams = Streams()
    stream = streams.open("x")
    streams.refuse("x", RequestError("not so", field="n"))
    streams.refuse("gone", RequestError("not so"))
    with pytest.raises(RequestError, match="not so"):
        await stream.pull()
