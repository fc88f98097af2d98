"""What a model needs in memory, what there is, and what is said when the first is more than the second."""

from pathlib import Path

import pytest
import torch

from vlm_engine import Engine, EngineConfig, NotEnoughMemory
from vlm_engine.models import memory
from vlm_engine.models.free_memory import free_memory
from vlm_engine.models.loading import describe, read_config
from vlm_engine.models.memory import Demand, MemoryNeeds
from vlm_engine.models.weight_files import read_tensors

MIB = 2**20
CPU = torch.device("cpu")


def demand_of(folder: Path, **settings: object) -> Demand:
    config = EngineConfig(str(folder), device="cpu", **settings)  # type: ignore[arg-type]
    return describe(config, read_config(config.model), read_tensors(config.model))


def leave(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """A machine with so much free memory."""
    monkeypatch.setattr(memory, "free_memory", lambda device: num_bytes)


def test_the_parts(qwen3_vl_checkpoint: Path) -> None:
    """By hand: tied head, three layers of two key heads of 16, DeepStack twice."""
    needs = demand_of(qwen3_vl_checkpoint, kv_cache_tokens=100, encoder_cache_tokens=50).needs()
    size = (qwen3_vl_checkpoint / "model.safetensors").stat().st_size
    assert size - 65536 < needs.weights < size
    assert needs.kv_cache == 100 * 3 * 2 * 2 * 16 * 4
    assert needs.encoder_cache == 50 * 64 * 3 * 4
    assert needs.total == needs.weights + needs.kv_cache + needs.encoder_cache + needs.working


def test_other_settings_need_other_memory(qwen3_vl_checkpoint: Path, qwen3_checkpoint: Path) -> None:
    wide, half = demand_of(qwen3_vl_checkpoint), demand_of(qwen3_vl_checkpoint, dtype="bfloat16")
    assert half.needs().kv_cache * 2 == wide.needs().kv_cache
    # a converted checkpoint has its tied head twice: packed, and as the embedding
    head = wide.text.vocab_size * wide.text.hidden_size
    assert half.needs().weights == wide.needs().weights // 2 + head * 2
    assert demand_of(qwen3_vl_checkpoint, quantization="int8").needs().weights < wide.needs().weights
    assert demand_of(qwen3_checkpoint).needs().encoder_cache == 0


def test_what_does_not_fit_is_refused_before_it_is_loaded(
    qwen3_vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = demand_of(qwen3_vl_checkpoint).needs()
    leave(monkeypatch, needs.total - 1)
    monkeypatch.setattr("vlm_engine.models.loading._load_weights", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(NotEnoughMemory) as refusal:
        Engine(EngineConfig(str(qwen3_vl_checkpoint), device="cpu"))
    message = str(refusal.value)
    assert message.startswith(f"{qwen3_vl_checkpoint}: needs {needs} in float32 on cpu, ")
    for words in ("weights", "KV cache", "encoder cache", "working room", "are free; it would fit with"):
        assert words in message
    for setting in ("encoder_cache_tokens: 4096", "dtype: bfloat16", "quantization: int8"):
        assert setting in message


def test_a_smaller_cache_is_offered_and_fits(
    qwen3_vl_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demand = demand_of(qwen3_vl_checkpoint, kv_cache_tokens=1_000_000)
    free = demand_of(qwen3_vl_checkpoint, kv_cache_tokens=8000).needs().total
    leave(monkeypatch, free)
    advice = memory.what_would_fit(demand, free)
    tokens = int(advice.removeprefix("it would fit with kv_cache_tokens: ").split()[0])
    assert 4096 <= tokens < 1_000_000
    assert isinstance(memory.check_memory(demand.changed(kv_cache_tokens=tokens)), MemoryNeeds)


def test_where_nothing_helps_it_says_what_size_would(qwen3_vl_checkpoint: Path) -> None:
    demand = demand_of(qwen3_vl_checkpoint, encoder_cache_tokens=4096, dtype="bfloat16", quantization="int8")
    assert memory.what_would_fit(demand, MIB) == "about 0 million parameters would fit in int8 and bfloat16"


def machine(root: Path, *, available: int, groups: str, files: dict[str, str]) -> Path:
    """A `/proc` and a `/sys` with so much memory."""
    (root / "proc/self").mkdir(parents=True)
    text = f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n"
    (root / "proc/meminfo").write_text(text, encoding="ascii")
    (root / "proc/self/cgroup").write_text(groups, encoding="utf-8")
    for name, content in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="ascii")
    return root


def limits(folder: str, limit: str, used: int, cached: int) -> dict[str, str]:
    """A group of version 2."""
    return {
        f"{folder}memory.max": f"{limit}\n",
        f"{folder}memory.current": f"{used}\n",
        f"{folder}memory.stat": f"anon {used - cached}\ninactive_file {cached}\nactive_file 0\n",
    }


def test_without_groups_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert free_memory(CPU, machine(tmp_path, available=500 * MIB, groups="", files={})) == 500 * MIB
    assert free_memory(CPU) > MIB


def test_a_container_with_a_limit(tmp_path: Path) -> None:
    """The group is the tree's root inside a container; what only caches files does not count as used."""
    files = limits("", str(300 * MIB), 200 * MIB, 150 * MIB)
    root = machine(tmp_path, available=900 * MIB, groups="0::/docker/abc\n", files=files)
    assert free_memory(CPU, root) == 250 * MIB


def test_a_service_inside_a_slice(tmp_path: Path) -> None:
    """The narrowest of all groups around a process counts."""
    files = limits("a.slice/", str(100 * MIB), 60 * MIB, 0) | limits("a.slice/b/", "max", 10 * MIB, 0)
    root = machine(tmp_path, available=900 * MIB, groups="0::/a.slice/b\n", files=files)
    assert free_memory(CPU, root) == 40 * MIB


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": str(64 * MIB),
        "memory/job/memory.usage_in_bytes": str(100 * MIB),
        "memory/job/memory.stat": "cache 0\ntotal_inactive_file 1048576\n",
    }
    root = machine(tmp_path, available=900 * MIB, groups="5:cpu,memory:/job\n0::/\n", files=files)
    assert free_memory(CPU, root) == 0


@pytest.mark.parametrize("broken", ["memory.max", "memory.stat"])
def test_a_group_that_cannot_be_read_sets_no_limit(tmp_path: Path, broken: str) -> None:
    files = limits("", str(MIB), 0, 0)
    files.pop(broken)
    root = machine(tmp_path, available=90 * MIB, groups="0::/\n", files=files)
    assert free_memory(CPU, root) == 90 * MIB
