"""Running one piece of asyncio work beside others that must live as long as it does."""

import asyncio
import logging
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_AGAIN_S = 2.0
PERSIST_AGAIN_S = 5.0

logger = logging.getLogger(__name__)


class StoppedError(Exception):
    """The work was cancelled because its stop event was set."""


class SignalError(Exception):
    """The work was ended by the signal of this `number`."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"stopped by {number.name}")
        self.number = number


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
        await end_all([main, *others])


async def persist(
    name: str, work: Callable[[], Coroutine[Any, Any, object]], num_failures: Counter[str]
) -> None:
    """Runs `work` until it ends or this is cancelled; when it fails, it begins again after a pause.

    For what must end nothing else, whatever is wrong with it; failures are logged and counted under `name`.
    """
    while True:
        try:
            await work()
        except Exception:
            num_failures[name] += 1
            logger.exception("%s failed and begins again in %.0f s", name, PERSIST_AGAIN_S)
        else:
            return
        await asyncio.sleep(PERSIST_AGAIN_S)


async def end_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels the tasks until all have ended; their results and errors are dropped."""
    alive = {task for task in tasks if not task.done()}
    while alive:
        for task in alive:
            task.cancel()
        # why: Python 3.11's `asyncio.wait_for`, under every Redis call, may swallow a cancellation.
        _, alive = await asyncio.wait(alive, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


async def outlast(future: asyncio.Future[Any]) -> None:
    """Waits until `future` has ended, also when cancelled meanwhile; that cancellation is raised then."""
    is_cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError


async def run_until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; when `stop` is set first, `work` is cancelled and `StoppedError` raised."""

    async def interrupt() -> None:
        await stop.wait()
        raise StoppedError

    return await run_beside(work, interrupt())


async def run_until_signal(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; at SIGINT or SIGTERM it is cancelled and `SignalError` raised. Main thread only.

    A second signal does what it does by default.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    numbers: list[signal.Signals] = []

    def note(number: signal.Signals) -> None:
        numbers.append(number)
        stop.set()
        forget()

    def forget() -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(one)

    for one in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(one, note, one)
    try:
        return await run_until(stop, work)
    except StoppedError:
        raise SignalError(numbers[0]) from None
    finally:
        forget()
