"""How the vision encoder's work on one image is cut: pure Python, exact, as fine as wanted.

A tower attends both ways, so it cannot be cut by tokens as a decoder can. But it is a stack of
blocks, and inside a block a row depends on other rows only through their keys and values. So a
block is cut into *slices*: first queries, keys and values of ranges of rows, then attention and
MLP of ranges of rows. A block that attends in windows needs no first stage: ranges of whole
windows are independent.
"""

from bisect import bisect_left
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from vlm_engine.cost_model import SliceWork

Stage = Literal["embed", "keys", "rows", "windows", "merge"]


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows ``[start, end)`` of one stage.

    Args:
        stage: ``embed`` patches; ``keys`` (queries, keys and values), ``rows`` (attention and MLP)
            or ``windows`` (both) of a block; ``merge`` patches to image tokens.
        index: The block; for ``merge`` the output, 0 for the tower's last.
        start: First row, in patches.
        end: Row after the last.
        num_pairs: Query-key pairs of the attention.
    """

    stage: Stage
    index: int
    start: int
    end: int
    num_pairs: int = 0

    @property
    def work(self) -> SliceWork:
        """What the cost model needs to know of it."""
        num_rows = self.end - self.start
        return SliceWork(
            num_slices=1,
            num_edge_rows=num_rows if self.stage in {"embed", "merge"} else 0,
            num_key_rows=num_rows if self.stage in {"keys", "windows"} else 0,
            num_rows=num_rows if self.stage in {"rows", "windows"} else 0,
            num_pairs=self.num_pairs,
        )


@dataclass(frozen=True, slots=True)
class TowerLayout:
    """What slicing needs to know of a tower and one image.

    Args:
        num_rows: Patches.
        merge_unit: Patches an image token.
        frames: Ends of the parts that attend to themselves in a full block, ascending.
        windows: The same for the other blocks; None where every block is full.
        full_blocks: For each block, whether it is a full one.
        merges_after: Block after which each output is merged; the tower's own output, merged after
            the last block, comes first, then those for DeepStack.
    """

    num_rows: int
    merge_unit: int
    frames: tuple[int, ...]
    windows: tuple[int, ...] | None
    full_blocks: tuple[bool, ...]
    merges_after: tuple[int, ...]


def cut(layout: TowerLayout, rows_per_slice: int) -> tuple[Slice, ...]:
    """All slices of an image in an order that is valid to run.

    Args:
        layout: Tower and image.
        rows_per_slice: About how many rows a slice has; at least one merge unit or window.
    """
    size = max(rows_per_slice, layout.merge_unit)
    slices = list(_even("embed", 0, layout.num_rows, size, layout.merge_unit))
    for block, is_full in enumerate(layout.full_blocks):
        slices += _full(block, layout, size) if is_full else _windowed(block, layout, size)
        for output, after in enumerate(layout.merges_after):
            if after == block:
                slices += _even("merge", output, layout.num_rows, size, layout.merge_unit)
    return tuple(slices)


def _even(stage: Stage, index: int, num_rows: int, size: int, unit: int) -> Iterator[Slice]:
    """Ranges of about `size` rows, all but the last a multiple of `unit`."""
    step = max(1, size // unit) * unit
    for start in range(0, num_rows, step):
        yield Slice(stage, index, start, min(start + step, num_rows))


def _full(block: int, layout: TowerLayout, size: int) -> Iterator[Slice]:
    yield from _even("keys", block, layout.num_rows, size, layout.merge_unit)
    begin = 0
    for end in layout.frames:
        for start in range(begin, end, size):
            stop = min(start + size, end)
            yield Slice("rows", block, start, stop, (stop - start) * (end - begin))
        begin = end


def _windowed(block: int, layout: TowerLayout, size: int) -> Iterator[Slice]:
    assert layout.windows is not None, "a windowed block in a tower without windows"
    start, pairs, previous = 0, 0, 0
    for end in layout.windows:
        if start < previous and end - start > size:
            yield Slice("windows", block, start, previous, pairs)
            start, pairs = previous, 0
        pairs += (end - previous) ** 2
        previous = end
    yield Slice("windows", block, start, previous, pairs)


def joined(slices: Iterable[Slice], max_rows: int, frames: Container[int]) -> Iterator[Slice]:
    """The same work in fewer pieces: neighbours in one stage become one slice of at most `max_rows` rows.

    Args:
        slices: In the order in which they run.
        max_rows: Rows from which a larger slice is no faster.
        frames: Rows at which another frame begins, whose rows read other keys.
    """
    last: Slice | None = None
    for part in slices:
        if last and _can_join(last, part, max_rows) and not (part.stage == "rows" and part.start in frames):
            pairs = last.num_pairs + part.num_pairs
            last = Slice(part.stage, part.index, last.start, part.end, pairs)
            continue
        if last:
            yield last
        last = part
    if last:
        yield last


def _can_join(left: Slice, right: Slice, max_rows: int) -> bool:
    is_next = (left.stage, left.index, left.end) == (right.stage, right.index, right.start)
    return is_next and right.end - left.start <= max_rows


def segments_between(ends: Sequence[int], start: int, end: int) -> list[tuple[int, int]]:
    """The parts ``[begin, end)`` of `ends` that lie in ``[start, end)``, which must be whole."""
    first = bisect_left(ends, start + 1)
    parts, begin = [], start
    for stop in ends[first:]:
        parts.append((begin, stop))
        begin = stop
        if stop >= end:
            break
    assert begin == end, f"rows {start}:{end} cut a window"
    return parts
