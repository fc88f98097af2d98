"""Child processes: started in a session of their own, restarted when they die, never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from appliance import processes, tasks
from appliance.processes import EXIT_UNUSABLE, Child, ChildError, Supervisor
from appliance.tasks import StoppedError, outlast, persist, run_beside, run_until

WAIT_S = 60.0


def sleep_for_ever() -> None:
    """The target of children that work until they are told to stop."""
    sys.stdin.read()
    time.sleep(600)


def ignore_sigterm() -> None:
    """The target of a child that hangs; the file that its payload names tells when."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(sys.stdin.read()).touch()
    time.sleep(600)


def refuse_settings() -> None:
    """The target of a child whose settings cannot be used."""
    sys.exit(EXIT_UNUSABLE)


def complain() -> None:
    """The target of a child that says something, as does a child of its own."""
    print("the child", file=sys.stderr, flush=True)
    subprocess.run(["sh", "-c", "echo a child of it >&2"], check=True)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_what_a_child_and_its_children_say_is_heard():
    child = Child("tests.appliance.test_processes:complain", b"", is_heard=True)

    assert list(child.lines()) == ["the child", "a child of it"]
    child.stop()


def test_a_child_gets_its_payload_and_a_session_of_its_own(tmp_path):
    path = tmp_path / "said"
    child = Child("tests.appliance.test_processes:write_payload", str(path).encode())
    wait_until(lambda: child.exit_code is not None)

    assert child.exit_code == 0
    assert path.read_text() == f"{child.pid} {child.pid}"


def write_payload() -> None:
    """The target of a child that says who it is, into the file that its payload names."""
    with open(sys.stdin.read(), "w") as file:
        file.write(f"{os.getsid(0)} {os.getpid()}")


def read_late() -> None:
    """The target of a child that first waits for the file that its first line names, and writes there."""
    path = Path(os.read(0, 4096).decode().split()[0])
    wait_until(path.exists)
    for line in sys.stdin:
        with path.open("a") as file:
            file.write(f"{line[0]}{len(line)} ")


def test_nobody_waits_for_a_child_that_does_not_read(tmp_path):
    """It gets what was begun, in whole lines, and then the newest."""
    path = tmp_path / "read"
    target = "tests.appliance.test_processes:read_late"
    child = Child(target, str(path).encode().ljust(4096), is_told_more=True)
    for letter in (b"a", b"b", b"c"):
        child.send(letter * 200_000 + b"\n")
    path.touch()
    wait_until(lambda: "c" in path.read_text())
    child.send(b"d\n")
    wait_until(lambda: "d" in path.read_text())

    assert path.read_text().split() == ["a200001", "c200001", "d2"]
    child.stop()
    assert "child-pipe" not in [thread.name for thread in threading.enumerate()]


def test_a_child_that_never_reads_can_be_stopped():
    child = Child("tests.appliance.test_processes:hear_nothing", b"x" * 300_000, is_told_more=True)
    child.send(b"x" * 300_000)
    child.stop()
    assert "child-pipe" not in [thread.name for thread in threading.enumerate()]


def hear_nothing() -> None:
    """The target of a child that never reads."""
    time.sleep(600)


def test_stop_asks_first():
    child = Child("tests.appliance.test_processes:sleep_for_ever", b"")

    child.stop()

    assert child.exit_code == -signal.SIGTERM
    child.stop()


def test_stop_ends_a_child_that_does_not_listen(tmp_path):
    """V6."""
    marker = tmp_path / "deaf"
    child = Child("tests.appliance.test_processes:ignore_sigterm", str(marker).encode())
    wait_until(marker.exists)

    child.stop(timeout_s=0.5)

    assert child.exit_code == -signal.SIGKILL


def test_a_child_ends_when_its_parent_is_killed():
    code = (
        "import time; from appliance.processes import Child; "
        "print(Child('tests.appliance.test_processes:sleep_for_ever', b'').pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.3)
        assert not is_gone(pid)
        parent.kill()
    wait_until(lambda: is_gone(pid))


async def test_a_child_that_dies_is_started_again_with_back_off(monkeypatch):
    monkeypatch.setattr(processes, "BACK_OFF_S", (0.01, 0.3))
    supervisor = Supervisor("worker", lambda: Child("tests.appliance.test_processes:sleep_for_ever", b""))
    watching = asyncio.create_task(supervisor.run())
    pids = [supervisor.pid]
    for _ in range(2):
        os.kill(supervisor.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        while supervisor.pid == pids[-1]:
            await asyncio.sleep(0.01)
        pids.append(supervisor.pid)

    assert time.monotonic() - killed_at >= 0.3
    assert supervisor.num_restarts == 2
    assert len(set(pids)) == 3
    await supervisor.stop()
    await asyncio.wait_for(watching, WAIT_S)
    assert all(is_gone(pid) for pid in pids)


async def test_a_child_that_refuses_its_settings_is_not_started_again():
    """V18: what no restart can cure is an error at once."""
    supervisor = Supervisor("worker", lambda: Child("tests.appliance.test_processes:refuse_settings", b""))

    with pytest.raises(ChildError, match="worker"):
        await asyncio.wait_for(supervisor.run(), WAIT_S)
    assert supervisor.num_restarts == 0


async def test_work_ends_with_the_error_of_what_runs_beside_it():
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("work")

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ChildError("gone")

    with pytest.raises(ChildError):
        await run_beside(work(), fail())
    assert ended == ["work"]


async def test_what_runs_beside_the_work_ends_with_it():
    ended = []

    async def beside() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("beside")

    async def done() -> None:
        """Ends before the work does, which must not matter."""

    async def work() -> str:
        await asyncio.sleep(0.02)
        return "done"

    assert await run_beside(work(), beside(), done()) == "done"
    assert ended == ["beside"]


async def test_work_that_fails_begins_again_and_ends_nothing_else(monkeypatch, caplog):
    monkeypatch.setattr(tasks, "PERSIST_AGAIN_S", 0.01)
    num_failures, tries = Counter(), []

    async def work() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise OverflowError("getsockaddrarg: port must be 0-65535.")

    await run_beside(persist("output webhook", work, num_failures))
    assert (len(tries), num_failures) == (3, {"output webhook": 2})
    assert "output webhook failed and begins again" in caplog.text
    cancelled = asyncio.ensure_future(persist("output", lambda: asyncio.sleep(60), num_failures))
    await asyncio.sleep(0.01)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled


async def test_a_swallowed_cancellation_is_repeated(monkeypatch):
    """Python 3.11's `asyncio.wait_for` swallows one when its future is done in the same moment."""
    monkeypatch.setattr(tasks, "CANCEL_AGAIN_S", 0.05)
    ended = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            await asyncio.sleep(600)
        finally:
            ended.append("stubborn")

    assert await asyncio.wait_for(run_beside(asyncio.sleep(0.01, "done"), stubborn()), WAIT_S) == "done"
    assert ended == ["stubborn"]


async def test_what_must_end_politely_outlasts_cancellations():
    may_end = asyncio.Event()
    polite = asyncio.ensure_future(may_end.wait())
    waiting = asyncio.ensure_future(outlast(polite))
    for _ in range(3):
        await asyncio.sleep(0.02)
        waiting.cancel()
    await asyncio.sleep(0.02)
    assert not polite.done()
    may_end.set()

    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert polite.result() is True


async def test_work_can_be_stopped():
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.02, stop.set)

    with pytest.raises(StoppedError):
        await run_until(stop, asyncio.sleep(60))
    assert await run_until(asyncio.Event(), asyncio.sleep(0, "done")) == "done"
