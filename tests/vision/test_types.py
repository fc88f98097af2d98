"""Detections as columns."""

import numpy as np
import pytest

from vision.types import Detections

NAMES = {0: "person", 2: "car"}
BOXES = np.array([[0, 0, 10, 20], [5, 5, 9, 9], [1, 2, 1, 9]], np.float32)


@pytest.fixture
def found() -> Detections:
    return Detections(BOXES, np.array([0.9, 0.5, 0.25], np.float32), np.array([0, 2, 0]), NAMES)


def test_rows_are_chosen_by_mask_positions_or_slice(found: Detections) -> None:
    tracked = found.with_tracks(np.array([7, 8, 9]))
    assert len(tracked) == 3
    assert tracked[tracked.scores > 0.4].track_ids.tolist() == [7, 8]  # type: ignore[union-attr]
    assert tracked[np.array([2, 0])].labels == ["person", "person"]
    assert tracked[1:].boxes.tolist() == BOXES[1:].tolist()
    assert found[:1].track_ids is None


def test_labels_and_areas(found: Detections) -> None:
    assert found.labels == ["person", "car", "person"]
    assert found.areas.tolist() == [200.0, 16.0, 0.0]


def test_summary_is_that_of_ultralytics(found: Detections) -> None:
    """Key for key and value for value what `Results.summary()` gives."""
    results = pytest.importorskip("ultralytics.engine.results")
    columns = np.column_stack([found.boxes, [4, 5, 6], found.scores, found.class_ids])
    theirs = results.Results(
        np.zeros((30, 30, 3), np.uint8), path="", names=NAMES, boxes=columns.astype(np.float32)
    )
    assert found.with_tracks(np.array([4, 5, 6])).to_summary() == theirs.summary()
    assert "track_id" not in found.to_summary()[0]


def test_empty() -> None:
    none = Detections.empty(NAMES, tracked=True)
    assert (len(none), none.labels, none.to_summary()) == (0, [], [])
    assert none.track_ids is not None
    assert none[none.scores > 0.5].boxes.shape == (0, 4)
