"""Running one piece of asyncio work beside others that must live as long as it does."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class StoppedError(Exception):
    """The work was cancelled because its stop event was set."""


async def run_beside(work: Coroutine[Any, Any, T], *background: Coroutine[Any, Any, Any]) -> T:
    """The result of `work`; an error in a `background` coroutine ends it and is raised instead.

    All of them are cancelled and awaited before this returns, however it ends.
    """
    main = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(coroutine) for coroutine in background]
    waiting = {main, *others}
    try:
        while not main.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return main.result()
    finally:
        for task in (main, *others):
            task.cancel()
        await asyncio.gather(main, *others, return_exceptions=True)


async def run_until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when `stop` is set first, `work` is cancelled and `StoppedError` raised."""

    async def interrupt() -> None:
        await stop.wait()
        raise StoppedError

    return await run_beside(work, interrupt())
