"""Our rotary positions are the stock model's."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from vlm_engine.models.qwen_prompt import rotary_positions

IMAGE = 9


@pytest.mark.parametrize(
    "checkpoint", ["qwen3_vl_checkpoint", "qwen2_5_vl_checkpoint", "qwen2_vl_checkpoint"]
)
@pytest.mark.parametrize(
    ("texts", "grids"),
    [
        ([5], []),
        ([0, 3], [(1, 2, 7)]),
        ([4, 0], [(1, 6, 2)]),
        ([3, 1, 6], [(1, 2, 2), (1, 5, 3)]),
        ([2, 2], [(3, 2, 4)]),
    ],
)
def test_positions_equal_the_stock_models(
    request: pytest.FixtureRequest, checkpoint: str, texts: list[int], grids: list[tuple[int, int, int]]
) -> None:
    """E12: text before, between and after images of any grid; one delta for all that follows."""
    stock = AutoModelForImageTextToText.from_pretrained(request.getfixturevalue(checkpoint)).model
    ids: list[int] = []
    starts = []
    for text, grid in zip(texts, [*grids, None], strict=True):
        ids += [1] * text
        if grid is not None:
            starts.append(len(ids))
            ids += [IMAGE] * (grid[0] * grid[1] * grid[2])
    tokens = torch.tensor([ids])
    thw = torch.tensor([(t, 2 * h, 2 * w) for t, h, w in grids]) if grids else None
    wanted, delta = stock.get_rope_index(tokens, (tokens == IMAGE).int(), image_grid_thw=thw)
    positions, own_delta = rotary_positions(len(ids), starts, grids)
    assert torch.equal(positions, wanted[:, 0])
    assert own_delta == int(delta[0])
