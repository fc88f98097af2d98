"""The CPU kernels: exact sums against float64, one result however a step is put together, clear refusals."""

import ctypes
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from tests.vlm_engine.reference import Case, run
from vlm_engine import Engine, EngineConfig
from vlm_engine.errors import ModelLoadError
from vlm_engine.models import VisionLanguageModel, load_model
from vlm_engine.native import library
from vlm_engine.native.library import KernelsUnavailable, load_library
from vlm_engine.native.ops import (
    AttentionPanels,
    NativeGate,
    NativeLinear,
    NativeRMSNorm,
    attend_windows,
    split_heads,
)
from vlm_engine.native.tuning import tune_threads

try:
    load_library()
    REASON = ""
except KernelsUnavailable as error:
    REASON = str(error)
needs_kernels = pytest.mark.skipif(bool(REASON), reason=REASON)
FAMILIES = [
    "qwen3_vl_checkpoint",
    "qwen2_5_vl_checkpoint",
    "qwen2_vl_checkpoint",
    "smolvlm_checkpoint",
    "internvl_checkpoint",
    "llama_checkpoint",
    "qwen3_checkpoint",
]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(7)


def make_linear(columns: int, depth: int, *, bias: bool = True) -> nn.Linear:
    return nn.Linear(depth, columns, bias=bias).to(BF16).requires_grad_(False)


def assert_close(given: Tensor, exact: Tensor, num_roundings: int = 1) -> None:
    """Within what so many roundings to bfloat16 cost, of this result and of others of the usual size."""
    assert given.shape == exact.shape
    error = (given.double() - exact).abs()
    limit = num_roundings * 2**-8 * (exact.abs() + exact.abs().mean())
    assert float((error / limit).max()) <= 1


@needs_kernels
@pytest.mark.parametrize("rows", [1, 2, 3, 9, 10, 11, 20, 21, 64])
@pytest.mark.parametrize(("columns", "depth"), [(32, 16), (80, 48), (1, 2), (33, 130), (200, 64)])
def test_linear(rows: int, columns: int, depth: int) -> None:
    layer, x = make_linear(columns, depth), torch.randn(rows, depth).to(BF16)
    exact = linear(x.double(), layer.weight.double(), layer.bias.double())
    native = NativeLinear(layer)
    assert_close(native(x), exact)
    assert torch.equal(native.wide(x), native(x).float())


@needs_kernels
def test_linear_takes_any_shape_and_layers_side_by_side() -> None:
    first, second = make_linear(24, 32), make_linear(40, 32, bias=False)
    x = torch.randn(3, 5, 64).to(BF16)[..., ::2]
    outputs = [linear(x.double(), each.weight.double()) for each in (first, second)]
    outputs[0] += first.bias
    assert_close(NativeLinear(first, second)(x), torch.cat(outputs, dim=-1))


@needs_kernels
@pytest.mark.parametrize("rows", [1, 8, 10, 40])
def test_the_number_of_threads_changes_no_bit(rows: int) -> None:
    kernels, native, x = load_library(), NativeLinear(make_linear(2000, 64)), torch.randn(rows, 64).to(BF16)
    threads, results = torch.get_num_threads(), []
    try:
        torch.set_num_threads(3)
        for count in (1, 2, 3, 0):
            kernels.vlm_set_threads(min(rows, kernels.vlm_tile_rows()), count)
            results.append(native(x))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


@needs_kernels
def test_threads_are_chosen_for_every_number_of_rows() -> None:
    chosen = tune_threads(NativeLinear(make_linear(512, 64)))
    assert list(chosen) == [1, 2, 4, 8]
    assert all(1 <= count <= torch.get_num_threads() for count in chosen.values())


@needs_kernels
@pytest.mark.parametrize(("columns", "rows"), [(16, 1), (40, 7), (1, 3), (96, 33)])
def test_gate(columns: int, rows: int) -> None:
    gate, up = make_linear(columns, 64), make_linear(columns, 64)
    x = torch.randn(rows, 64).to(BF16)
    gates, ups = (linear(x.double(), each.weight.double(), each.bias.double()) for each in (gate, up))
    assert_close(NativeGate(gate, up)(x), silu(gates) * ups, num_roundings=4)


def coded(layer: nn.Linear) -> tuple[nn.Linear, Tensor]:
    """A layer with its weight in eight bits, and that weight in double."""
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    weight: Any = layer.weight
    # why: the kernels have no -128; torchao gives it to the lowest number of some rows
    return layer, weight.qdata.clamp(min=-127).double() * weight.scale.double()


@needs_kernels
@pytest.mark.parametrize(("columns", "depth"), [(80, 48), (1, 2), (33, 130)])
def test_linear_of_eight_bits(columns: int, depth: int) -> None:
    """By tiles and, for many rows, over widened panels: the same to the bit."""
    layer, weight = coded(make_linear(columns, depth))
    other, other_weight = coded(make_linear(40, depth, bias=False))
    native, x = NativeLinear(layer, other), torch.randn(33, depth).to(BF16)
    exact = torch.cat([linear(x.double(), weight, layer.bias.double()), x.double() @ other_weight.T], dim=-1)
    assert_close(native(x), exact)
    for rows in (1, 2, 10, 11):
        assert torch.equal(native(x[:rows]), native(x)[:rows])


@needs_kernels
@pytest.mark.parametrize(("columns", "rows"), [(16, 1), (40, 7), (1, 3), (96, 33)])
def test_gate_of_eight_bits(columns: int, rows: int) -> None:
    (gate, gate_weight), (up, up_weight) = (coded(make_linear(columns, 64, bias=False)) for _ in range(2))
    x = torch.randn(rows, 64).to(BF16)
    exact = silu(x.double() @ gate_weight.T) * (x.double() @ up_weight.T)
    assert_close(NativeGate(gate, up)(x), exact, num_roundings=4)


@needs_kernels
@pytest.mark.parametrize("size", [16, 72, 5])
def test_rms_norm_rounds_as_the_stock_one(size: int) -> None:
    x, weight = torch.randn(21, size).to(BF16), torch.rand(size).to(BF16)
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(BF16)
    given = NativeRMSNorm(weight, 1e-6)(x)
    assert (given.float() - (weight * normed).float()).abs().max() <= 2**-7 * normed.float().abs().max()
    assert (given == weight * normed).float().mean() > 0.98


@needs_kernels
@pytest.mark.parametrize(("num_heads", "num_keys", "num_rows", "head_dim"), [(2, 1, 1, 16), (3, 300, 47, 64)])
@pytest.mark.parametrize("extra", [0, 8, 16])
def test_attention_both_ways(num_heads: int, num_keys: int, num_rows: int, head_dim: int, extra: int) -> None:
    head_dim += extra
    keys, values = torch.randn(2, num_heads, num_keys, head_dim).to(BF16)
    query = torch.randn(num_heads, num_rows + 3, head_dim).to(BF16)[:, 1 : num_rows + 1]
    panels = AttentionPanels(num_heads, num_keys, head_dim)
    panels.pack(keys, values)
    exact = scaled_dot_product_attention(query.double(), keys.double(), values.double(), scale=0.3)
    assert_close(panels.attend(query, 0.3), exact.transpose(0, 1), num_roundings=2)


@needs_kernels
def test_windows() -> None:
    qkv = torch.randn(3, 2, 90, 32).to(BF16)
    bounds, outputs = [0, 1, 17, 49, 90], []
    for begin, end in pairwise(bounds):
        outputs.append(scaled_dot_product_attention(*qkv[:, :, begin:end].double()).transpose(0, 1))
    given = attend_windows(qkv, torch.tensor(bounds), 32**-0.5)
    assert_close(given, torch.cat(outputs), num_roundings=2)


@needs_kernels
def test_heads_are_split_and_rotated() -> None:
    num_rows, num_heads, head_dim = 6, 2, 24
    qkv = torch.randn(num_rows, 3 * num_heads * head_dim).to(BF16)
    angles = torch.rand(num_rows, 1, head_dim // 2).repeat(1, 1, 2)
    out = torch.zeros(3, num_heads, num_rows + 4, head_dim, dtype=BF16)
    split_heads(qkv, (angles.cos(), angles.sin()), out, 4)
    parts = qkv.view(num_rows, 3, num_heads, head_dim).permute(1, 2, 0, 3).double()
    first, second = parts[:2].chunk(2, dim=-1)
    turned = parts[:2] * angles[:, 0].cos() + torch.cat([-second, first], -1) * angles[:, 0].sin()
    assert_close(out[:2, :, 4:], turned)
    assert torch.equal(out[2, :, 4:].double(), parts[2])
    assert not out[:, :, :4].any()


@needs_kernels
def test_what_is_no_number_stays_none() -> None:
    """A fault in the weights must reach the check of the logits, not vanish in a maximum."""
    keys, values, query = torch.randn(3, 1, 40, 16).to(BF16)
    panels = AttentionPanels(1, 40, 16)
    query[0, 3, 2] = torch.nan
    panels.pack(keys, values)
    is_nan = panels.attend(query, 0.25).isnan().any(dim=-1)[:, 0]
    assert is_nan.tolist() == [row == 3 for row in range(40)]
    keys[0, 17] = torch.nan
    panels.pack(keys, values)
    assert panels.attend(query, 0.25).isnan().all()


# -- whole models -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="module")
def native(checkpoint: Path) -> VisionLanguageModel:
    return load_model(EngineConfig(str(checkpoint), dtype="bfloat16", device="cpu", cpu_kernels="native"))


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> VisionLanguageModel:
    return load_model(EngineConfig(str(checkpoint), dtype="bfloat16", device="cpu", cpu_kernels="torch"))


def picture(seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((192, 160))


def cases(model: VisionLanguageModel) -> list[Case]:
    long = "Two people are walking on the left, and a red car is parked. "
    texts = [Case("short", ("What is this?",), 12), Case("long", (long * 4,), 12)]
    if model.spec.family in {"llama", "qwen3"}:
        return texts
    shared = picture(1)
    return [*texts, Case("frame", (shared, "What is this?"), 8), Case("two", (long, shared, picture(2)), 8)]


def engine_of(model: VisionLanguageModel, **limits: Any) -> Engine:
    config = {"kv_cache_tokens": 8192, "scheduler": "static", "enable_prefix_caching": False} | limits
    return Engine(EngineConfig(model.spec.name, **config), model=model)


class Logits:
    """Keeps the logits of every step of an engine, by request and position."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[tuple[str, int], Tensor] = {}
        self._engine, self._head = engine, engine.model.logits
        self._execute: Callable[..., Any] = engine.runner.execute
        monkeypatch.setattr(engine.runner, "execute", self._watch)
        monkeypatch.setattr(engine.model, "logits", self._keep)

    def _watch(self, plan: Any) -> Any:
        chunks = sorted(plan.chunks, key=lambda chunk: chunk.num_tokens > 1)
        self._names = [(chunk.sequence.request_id, chunk.end) for chunk in chunks if chunk.samples]
        return self._execute(plan)

    def _keep(self, hidden: Tensor) -> Tensor:
        logits = self._head(hidden)
        self.rows.update(zip(self._names, logits, strict=True))
        return logits


def logits_of(model: VisionLanguageModel, **limits: Any) -> Iterator[tuple[tuple[str, int], Tensor]]:
    engine, one_by_one = engine_of(model, **limits), limits.get("max_num_seqs") == 1
    with pytest.MonkeyPatch.context() as monkeypatch:
        kept = Logits(engine, monkeypatch)
        for batch in [[case] for case in cases(model)] if one_by_one else [cases(model)]:
            run(engine, batch)
    yield from sorted(kept.rows.items(), key=lambda item: item[0])


@needs_kernels
@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": chunk} for chunk in (1, 7, 32, 256)], ids=str)
def test_no_bit_depends_on_how_a_step_is_put_together(
    native: VisionLanguageModel, limits: dict[str, int]
) -> None:
    """Logits in bfloat16, whole prompts one after the other, against chunks in mixed batches: equal bits."""
    whole = dict(logits_of(native, max_num_batched_tokens=4096, max_num_seqs=1))
    mixed = dict(logits_of(native, **limits))
    assert whole.keys() == mixed.keys()
    for key, row in whole.items():
        assert torch.equal(row, mixed[key]), key


@needs_kernels
def test_as_near_to_float32_as_torch_is(native: VisionLanguageModel, plain: VisionLanguageModel) -> None:
    """Prompt logits against a float32 model: the kernels are off by no more than torch's bfloat16 is."""
    exact = load_model(EngineConfig(native.spec.name, dtype="float32", device="cpu"))
    errors = {}
    with_first_token_only = {case.name for case in cases(native)}
    for name, model in (("native", native), ("torch", plain)):
        wanted, given = (first_logits(each, with_first_token_only) for each in (exact, model))
        errors[name] = sum(float((wanted[key] - given[key]).square().mean()) for key in wanted) ** 0.5
    assert 0 < errors["native"] <= 1.25 * errors["torch"]


def first_logits(model: VisionLanguageModel, names: set[str]) -> dict[str, Tensor]:
    first: dict[str, Tensor] = {}
    for (name, _), row in logits_of(model, max_num_batched_tokens=4096):
        first.setdefault(name, row)
    assert first.keys() == names
    return first


# -- where they cannot be had -------------------------------------------------------------------------


@pytest.fixture
def unloaded() -> Iterator[None]:
    load_library.cache_clear()
    yield
    load_library.cache_clear()


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unloaded: None) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv(library.KERNELS_ENV, str(tmp_path))
    monkeypatch.setattr(library, "_check_processor", lambda: None)


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_the_engine_runs_on_torch(llama_checkpoint: Path) -> None:
    model = load_model(EngineConfig(str(llama_checkpoint), dtype="bfloat16", device="cpu"))
    assert not model.spec.use_kernels
    with pytest.raises(ModelLoadError, match=r"cpu_kernels: native: no GNU C\+\+ compiler .*install g\+\+"):
        load_model(EngineConfig(str(llama_checkpoint), dtype="bfloat16", device="cpu", cpu_kernels="native"))


@needs_kernels
def test_another_dtype_is_refused_when_asked_for(llama_checkpoint: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"bfloat16 on the CPU, not torch\.float32"):
        load_model(EngineConfig(str(llama_checkpoint), dtype="float32", device="cpu", cpu_kernels="native"))


@needs_kernels
@pytest.mark.usefixtures("unloaded")
def test_built_once_and_never_from_where_others_may_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(library.KERNELS_ENV, str(tmp_path / "own"))
    assert isinstance(load_library(), ctypes.CDLL)
    built = list((tmp_path / "own").iterdir())
    assert [path.suffix for path in built] == [".so"]
    load_library.cache_clear()
    monkeypatch.setattr(library, "_build", lambda *_: pytest.fail("built again"))
    load_library()
    load_library.cache_clear()
    (tmp_path / "own").chmod(0o777)
    with pytest.raises(KernelsUnavailable, match="others may write there"):
        load_library()


def test_the_users_cache_is_no_relative_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the standard of `XDG_CACHE_HOME` has it: such a one is as good as none."""
    monkeypatch.delenv(library.KERNELS_ENV, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert library._cache_dir().is_relative_to(tmp_path)


@pytest.mark.usefixtures("unloaded")
def test_a_processor_without_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_cpu_info", lambda: {"flags": frozenset({"sse2"})})
    with pytest.raises(KernelsUnavailable, match=r"avx512_bf16|there are none for"):
        load_library()


@needs_kernels
@pytest.mark.usefixtures("unloaded")
def test_a_broken_build_says_what_the_compiler_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(library.KERNELS_ENV, str(tmp_path))
    monkeypatch.setattr(library, "OPTIONS", ("--no-such-option",))
    with pytest.raises(KernelsUnavailable, match="no-such-option"):
        load_library()
    assert not list(tmp_path.iterdir())
