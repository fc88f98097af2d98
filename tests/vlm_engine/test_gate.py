"""The door to the device with real sockets and processes: many detectors, dead and hung, dead engines."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from vlm_engine import turn_queue
from vlm_engine.config import TurnConfig
from vlm_engine.errors import GateError
from vlm_engine.gate_client import GateClient
from vlm_engine.gate_server import GateServer
from vlm_engine.gate_wire import Ask, Hello, Release, encode
from vlm_engine.static_budget import StaticBudget

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the gate needs Linux's sockets")


@pytest.fixture
def long_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """None ends because the machine has others to serve."""
    monkeypatch.setattr(turn_queue, "LEASE_LEAST_MS", 60_000.0)


class Loop:
    """An engine that does nothing but lend its device, in a thread; `step_s` is what its steps take."""

    def __init__(self, folder: Path, *, device: str = "cpu", step_s: float = 0.0) -> None:
        self.address = str(folder / "gate.sock")
        self.gate = GateServer(TurnConfig(self.address, 2.0), device)
        self._step_s = step_s
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        turns, budget = self.gate.turns, StaticBudget(1)
        while not self._is_stopping.is_set():
            self.gate.read(0.0 if turns.is_waiting else 0.02)
            turn = turns.propose(budget, time.monotonic())
            if turn is not None:
                turns.start(turn)
                self.gate.lend(turn)
            time.sleep(self._step_s)

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.gate.turns.stats().counts)

    @property
    def num_rounds(self) -> int:
        return self.gate.turns.stats().num_rounds

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()
        self.gate.close()


@contextmanager
def engine(folder: Path, **options: object) -> Iterator[Loop]:
    loop = Loop(folder, **options)  # type: ignore[arg-type]
    try:
        yield loop
    finally:
        loop.stop()


@contextmanager
def detector(address: str, kind: str = "loop") -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "tests.vlm_engine.detectors", address, kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def until(what: object, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def rounds(gate: GateClient, num_rounds: int, num_pieces: int = 3) -> None:
    for _ in range(num_rounds):
        left = [1.0] * num_pieces
        while left:
            left = left[gate.acquire(left) :]
            gate.release()


@pytest.mark.usefixtures("long_leases")
def test_a_turn_begins_and_ends(tmp_path: Path) -> None:
    with engine(tmp_path) as loop:
        gate = GateClient(loop.address, "cpu", patience_s=30.0)
        rounds(gate, 5)
        until(lambda: loop.num_rounds == 5)
        assert gate.num_ungated == 0
        stats = loop.gate.turns.stats()
        assert stats.wait.num_values == stats.length.num_values == 5
        assert stats.num_clients == 1
        gate.close()
        until(lambda: loop.gate.turns.stats().num_clients == 0)


@pytest.mark.usefixtures("long_leases")
def test_many_detectors_one_at_a_time(tmp_path: Path) -> None:
    """Whoever has the device is alone with it, and all come to their end."""
    alone, overlaps = threading.Lock(), []

    def work(gate: GateClient) -> None:
        for _ in range(20):
            gate.acquire([1.0])
            if not alone.acquire(blocking=False):
                overlaps.append(gate)
            time.sleep(0.0005)
            alone.release()
            gate.release()

    with engine(tmp_path) as loop:
        gates = [GateClient(loop.address, "cpu", patience_s=30.0) for _ in range(12)]
        threads = [threading.Thread(target=work, args=(gate,)) for gate in gates]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not overlaps
        until(lambda: loop.num_rounds == 240)
        assert sum(gate.num_ungated for gate in gates) == 0
        for gate in gates:
            gate.close()


@pytest.mark.usefixtures("long_leases")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_detector_that_dies_frees_the_device_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """By its closed connection: long before its lease would end."""
    with engine(tmp_path) as loop, detector(loop.address, "keep") as keeper:
        assert line(keeper).startswith("turn")
        keeper.send_signal(number)
        until(lambda: loop.counts["died"] == 1)
        gate = GateClient(loop.address, "cpu", patience_s=30.0)
        rounds(gate, 2)
        assert gate.num_ungated == 0
        assert loop.counts["expired"] == 0
        gate.close()


def test_a_detector_that_hangs_frees_the_device_by_its_lease(tmp_path: Path) -> None:
    """And is served again when it wakes up."""
    with engine(tmp_path) as loop, detector(loop.address) as hung:
        assert line(hung) == "turn 3 ungated 0"
        os.kill(hung.pid, signal.SIGSTOP)
        gate = GateClient(loop.address, "cpu", patience_s=30.0)
        rounds(gate, 3)
        assert gate.num_ungated == 0
        os.kill(hung.pid, signal.SIGCONT)
        before = loop.num_rounds
        until(lambda: loop.num_rounds > before + 3)
        gate.close()


def test_a_lease_that_ends_is_counted_and_the_late_end_is_learned(tmp_path: Path) -> None:
    with engine(tmp_path) as loop:
        gate = GateClient(loop.address, "cpu", patience_s=30.0)
        gate.acquire([1.0])
        until(lambda: loop.counts["expired"] == 1)
        num_learned = loop.gate.turns.cost.num_learned
        gate.release()
        until(lambda: loop.gate.turns.cost.num_learned == num_learned + 1)
        rounds(gate, 1)
        until(lambda: loop.num_rounds == 1)
        assert gate.num_ungated == 0
        gate.close()


@pytest.mark.usefixtures("long_leases")
def test_without_an_engine_the_detector_goes_on_and_asks_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dead, being started again, and back; what went without an answer is counted at both sides."""
    gate = GateClient(str(tmp_path / "gate.sock"), "cpu", patience_s=30.0, retry_after_s=0.0)
    rounds(gate, 3)
    assert gate.num_ungated == 3
    for generation in (1, 2):
        with engine(tmp_path) as loop:
            rounds(gate, 2)
            until(lambda loop=loop: loop.num_rounds == 2)
            assert loop.counts["ungated"] == gate.num_ungated - (0 if generation == 1 else 3)
        rounds(gate, 1)
        assert gate.num_ungated == 3 + generation
    assert not [record for record in caplog.records if "gate_client" in record.name], "no news"
    gate.close()


def test_an_engine_that_does_not_answer_is_waited_for_no_longer_than_patience(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = GateServer(TurnConfig(str(tmp_path / "gate.sock")), "cpu")
    gate = GateClient(str(tmp_path / "gate.sock"), "cpu", patience_s=0.2, retry_after_s=600.0)
    started_s = time.monotonic()
    assert gate.acquire([1.0, 1.0]) == 2
    assert time.monotonic() - started_s >= 0.2
    gate.release()
    started_s = time.monotonic()
    for _ in range(1000):
        assert gate.acquire([1.0]) == 1
    assert time.monotonic() - started_s < 100, "waiting each time would be 200 s"
    assert gate.num_ungated == 1001
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once, not each time"
    server.close()


def test_a_stale_socket_is_replaced_and_a_living_one_is_not(tmp_path: Path) -> None:
    """A killed engine leaves its socket behind; two engines at one address would be a mistake."""
    path = tmp_path / "gate.sock"
    stale = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stale.bind(str(path))
    stale.close()
    server = GateServer(TurnConfig(str(path)), "cpu")
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(GateError, match=r"gate\.sock.*another engine"):
        GateServer(TurnConfig(str(path)), "cpu")
    server.close()
    path.write_text("mine")
    with pytest.raises(GateError, match="a file of that name"):
        GateServer(TurnConfig(str(path)), "cpu")
    with pytest.raises(GateError, match="nowhere"):
        GateServer(TurnConfig(str(tmp_path / "nowhere" / "gate.sock")), "cpu")
    with pytest.raises(GateError, match="too long"):
        GateServer(TurnConfig(str(tmp_path / ("x" * 200))), "cpu")


@pytest.mark.usefixtures("long_leases")
@pytest.mark.parametrize(
    ("device", "is_shared"), [("cuda:0", True), ("cuda:1", False), ("cpu", False), (None, True)]
)
def test_detectors_of_other_devices_do_not_wait(
    tmp_path: Path, device: str | None, is_shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(tmp_path, device="cuda:0") as loop:
        gate = GateClient(loop.address, device, patience_s=30.0)
        rounds(gate, 4)
        assert gate.is_shared == is_shared
        assert gate.num_ungated == 0
        until(lambda: loop.num_rounds == 4 * is_shared)
        gate.close()
    assert not caplog.records


@pytest.mark.parametrize(
    "messages",
    [
        [b"\xc1"],
        [b"hello"],
        [encode(Ask([1.0], 0.0, 0))],
        [encode(Hello("cpu")), encode(Ask([], 0.0, 0))],
        [encode(Hello("cpu")), encode(Ask([float("nan")], 0.0, 0))],
        [encode(Hello("cpu")), encode(Ask([-1.0], 0.0, 0))],
        [encode(Hello("cpu")), encode(Ask([1.0], 0.0, -1))],
        [encode(Hello("cpu")), encode(Ask([1.0], float("nan"), 0))],
        [encode(Hello("cpu")), encode(Ask([1.0], 0.0, 0, float("inf")))],
        [encode(Hello("cpu")), encode(Ask([1.0] * 5000, 0.0, 0))],
        [encode(Hello("cpu")), encode(Release(7))],
        [encode(Hello("cpu")), encode(Hello("cpu"))],
        [encode(Hello("cpu")), encode(Ask([1.0], 0.0, 0)), encode(Ask([1.0], 0.0, 0)), encode(Release(99))],
    ],
)
def test_who_talks_nonsense_is_sent_away_and_nobody_else_is_hurt(
    tmp_path: Path, messages: list[bytes]
) -> None:
    with engine(tmp_path) as loop:
        gate = GateClient(loop.address, "cpu", patience_s=30.0)
        rounds(gate, 1)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rude:
            rude.settimeout(30.0)
            rude.connect(loop.address)
            with suppress(ConnectionError):
                for message in messages:
                    rude.send(message)
                while rude.recv(100):
                    pass
        rounds(gate, 1)
        until(lambda: loop.gate.turns.stats().num_clients == 1)
        assert gate.num_ungated == 0
        gate.close()


@pytest.mark.parametrize("hours", [300, -300])
def test_what_a_detector_says_of_the_time_is_not_trusted(tmp_path: Path, hours: int) -> None:
    with engine(tmp_path) as loop, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as odd:
        odd.connect(loop.address)
        odd.send(encode(Hello("cpu")))
        odd.send(encode(Ask([1.0], max(0.0, time.monotonic() + 3600 * hours), 0)))
        assert odd.recv(100)
        assert loop.gate.turns.stats().wait.sum <= 61.0
        until(lambda: loop.counts["expired"] == 1)
