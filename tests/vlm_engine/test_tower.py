"""The sliced encoder gives what the stock tower gives, at every slicing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_engine import EngineConfig
from vlm_engine.models import ImageInput, load_model
from vlm_engine.models.tower import QwenTower
from vlm_engine.slices import TowerLayout, cut, joined, segments_between

GRIDS = [(1, 4, 4), (1, 10, 14), (1, 18, 22), (2, 6, 8)]


@pytest.fixture(
    scope="module", params=["qwen3_vl_checkpoint", "qwen2_5_vl_checkpoint", "qwen2_vl_checkpoint"]
)
def model(request: pytest.FixtureRequest) -> Any:
    folder: Path = request.getfixturevalue(request.param)
    return load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))


def image_of(model: Any, grid: tuple[int, int, int]) -> ImageInput:
    patch_dim = model.encoder._visual.patch_embed.proj.weight[0].numel()
    generator = torch.Generator().manual_seed(sum(grid))
    return ImageInput(torch.randn(grid[0] * grid[1] * grid[2], patch_dim, generator=generator), grid)


def stock(model: Any, image: ImageInput) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        output = model.encoder._visual(image.pixels, grid_thw=torch.tensor([image.grid]), return_dict=True)
    return (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("rows", [1, 8, 20, 64, 10_000])
def test_slices_equal_the_stock_tower(model: Any, grid: tuple[int, int, int], rows: int) -> None:
    image, tower = image_of(model, grid), QwenTower(model.encoder._visual, model.spec, rows)
    state = tower.start(image)
    for part in tower.slices(image):
        tower.run(state, [part])
    for wanted, given_ in zip(stock(model, image), tower.features(state), strict=True):
        assert (wanted - given_).abs().max() / wanted.abs().max() < 1e-5


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("group", [2, 7, 1000])
def test_slices_that_run_together_equal_the_stock_tower(
    model: Any, grid: tuple[int, int, int], group: int
) -> None:
    """Neighbours become one piece, but not over the border of two frames."""
    image, tower = image_of(model, grid), QwenTower(model.encoder._visual, model.spec, 8)
    slices, state = tower.slices(image), tower.start(image)
    for at in range(0, len(slices), group):
        tower.run(state, slices[at : at + group])
    for wanted, given_ in zip(stock(model, image), tower.features(state), strict=True):
        assert (wanted - given_).abs().max() / wanted.abs().max() < 1e-5


def test_a_lost_slice_changes_the_answer(model: Any) -> None:
    image, tower = image_of(model, (1, 10, 14)), QwenTower(model.encoder._visual, model.spec, 40)
    slices = tower.slices(image)
    gone = next(i for i, part in enumerate(slices) if part.stage == "rows" and part.index == 1)
    state = tower.start(image)
    tower.run(state, [*slices[:gone], *slices[gone + 1 :]])
    assert (tower.features(state)[0] - stock(model, image)[0]).abs().max() > 1e-3


@st.composite
def layouts(draw: st.DrawFn) -> TowerLayout:
    windows = draw(st.lists(st.sampled_from([4, 8, 16]), min_size=1, max_size=12))
    ends = [sum(windows[: i + 1]) for i in range(len(windows))]
    full = draw(st.lists(st.booleans(), min_size=1, max_size=4))
    return TowerLayout(ends[-1], 4, (ends[-1],), tuple(ends), tuple(full), (len(full) - 1,))


@settings(max_examples=100, deadline=None)
@given(layout=layouts(), size=st.integers(1, 60))
def test_slices_cover_every_row_of_every_stage_once_and_in_order(layout: TowerLayout, size: int) -> None:
    slices = cut(layout, size)
    order: list[tuple[str, int]] = list(dict.fromkeys((part.stage, part.index) for part in slices))
    wanted = [("embed", 0)]
    for block, is_full in enumerate(layout.full_blocks):
        wanted += [("keys", block), ("rows", block)] if is_full else [("windows", block)]
    assert order == [*wanted, ("merge", 0)]
    for stage in order:
        rows = [
            row for part in slices if (part.stage, part.index) == stage for row in range(part.start, part.end)
        ]
        assert rows == list(range(layout.num_rows))
    for part in slices:
        if part.stage == "windows":
            parts = segments_between(layout.windows or (), part.start, part.end)
            assert sum((end - begin) ** 2 for begin, end in parts) == part.num_pairs
            assert len(parts) == 1 or part.end - part.start <= max(size, 4)


@settings(max_examples=100, deadline=None)
@given(layout=layouts(), size=st.integers(1, 20), max_rows=st.integers(1, 60))
def test_joined_slices_are_the_same_work(layout: TowerLayout, size: int, max_rows: int) -> None:
    slices = cut(layout, size)
    pieces = list(joined(slices, max_rows, layout.frames))
    assert len(pieces) <= len(slices)
    assert all(piece in slices or piece.end - piece.start <= max_rows for piece in pieces)
    assert [(p.stage, p.index, row) for p in pieces for row in range(p.start, p.end)] == [
        (p.stage, p.index, row) for p in slices for row in range(p.start, p.end)
    ]
    assert sum(p.num_pairs for p in pieces) == sum(p.num_pairs for p in slices)
