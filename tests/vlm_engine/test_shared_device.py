"""An engine in its process that lends its device to detectors while people chat, dies and comes back."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.vlm_engine.test_async_engine import collect, config_of, until
from tests.vlm_engine.test_engine_process import START_S, started
from vlm_engine import EngineProcess, GateClient, GateError, TurnConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the gate needs Linux's sockets")


class Detector:
    """Asks for rounds of four pieces for ever, in a thread."""

    def __init__(self, address: str) -> None:
        self.gate = GateClient(address, "cpu", patience_s=10.0, retry_after_s=0.05)
        self.num_rounds = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            left = [1.0] * 4
            while left:
                count = self.gate.acquire(left)
                self._stop.wait(0.001 * count)
                self.gate.release()
                left = left[count:]
            self.num_rounds += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.gate.close()


@asynccontextmanager
async def detector(address: str) -> AsyncIterator[Detector]:
    running = Detector(address)
    try:
        yield running
    finally:
        await asyncio.to_thread(running.stop)


async def test_chat_and_detector_share_the_engines_device(qwen3_vl_checkpoint: Path, tmp_path: Path) -> None:
    """A7, E25: idle, under chat, dead and started again; no count falls, and the text is the same."""
    address = str(tmp_path / "gate.sock")
    config = config_of(qwen3_vl_checkpoint)
    async with started(EngineProcess(config, turns=TurnConfig(address, 5.0))) as engine:
        wanted = await collect(engine, "alone", "hello", max_tokens=60)
        async with detector(address) as seen:
            await until(lambda: engine.stats().turns.num_rounds >= 3)
            assert engine.stats().turns.num_clients == 1
            answer = await collect(engine, "beside", "hello", max_tokens=60)
            assert "".join(e.text for e in answer) == "".join(e.text for e in wanted)
            await until(lambda: engine.stats().turns.num_rounds >= 10)
            assert seen.gate.num_ungated == 0
            await kill_and_come_back(engine, seen)
        await until(lambda: engine.stats().turns.num_clients == 0)
    assert not Path(address).exists()


async def kill_and_come_back(engine: EngineProcess, seen: Detector) -> None:
    before = engine.stats().turns
    assert before.wait.num_values >= before.length.num_values > 0
    assert before.work.total_ms > 0

    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: not engine.is_healthy)
    assert engine.stats().turns.num_clients == 0
    num_rounds = seen.num_rounds
    await until(lambda: seen.num_rounds > num_rounds + 3)
    assert seen.gate.num_ungated > 0

    await until(lambda: engine.is_healthy, START_S)
    # why: until the detector asks again the books are those of the dead engine, a little later than `before`
    await until(lambda: engine.stats().turns.counts["ungated"] > 0)
    after = engine.stats().turns
    assert after.num_rounds >= before.num_rounds
    await until(lambda: engine.stats().turns.num_rounds > after.num_rounds)
    assert engine.stats().turns.wait.num_values > before.wait.num_values


async def test_an_address_that_cannot_be_is_said_at_the_start(
    qwen3_vl_checkpoint: Path, tmp_path: Path
) -> None:
    address = str(tmp_path / "nowhere" / "gate.sock")
    engine = EngineProcess(config_of(qwen3_vl_checkpoint), turns=TurnConfig(address))
    with pytest.raises(GateError, match="nowhere"):
        await engine.start()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), 1e9])
def test_a_floor_out_of_range_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="min_per_s"):
        TurnConfig("x", rate)
