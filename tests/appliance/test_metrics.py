"""Camera counts that never fall, whatever becomes of the vision worker."""

from appliance.jobs import CameraStatus
from appliance.metrics import CameraTotals, camera_families


def status(num_frames: int, num_jobs: int, *, name: str = "street", updated_at: float = 1.0) -> CameraStatus:
    return CameraStatus(
        name=name, state="running", num_frames=num_frames, num_jobs=num_jobs, updated_at=updated_at
    )


def test_counts_go_on_over_a_restart_of_the_worker() -> None:
    totals = CameraTotals()
    for num_frames, num_jobs in ((10, 2), (20, 3), (5, 1), (6, 1)):
        totals.update([status(num_frames, num_jobs)])
    assert totals.counts()["street"]["num_frames"] == 26
    assert totals.counts()["street"]["num_jobs"] == 4


def test_a_silent_worker_takes_nothing_away() -> None:
    """Its statuses have expired: the board says `connecting` with zeros."""
    totals = CameraTotals()
    totals.update([status(10, 2), status(7, 1, name="yard")])
    totals.update([CameraStatus(name="street", state="connecting"), status(8, 1, name="yard")])
    totals.update([status(11, 2), status(9, 1, name="yard")])
    assert totals.counts()["street"]["num_frames"] == 11
    assert totals.counts()["yard"]["num_frames"] == 9


def test_together_cameras_are_summed() -> None:
    totals = CameraTotals()
    statuses = [status(10, 2), status(7, 1, name="yard")]
    totals.update(statuses)
    families = {family.name: family for family in camera_families(statuses, totals, per_camera=False)}
    assert [sample.value for sample in families["appliance_frames"].samples] == [17]
    assert families["appliance_jobs"].samples[0].labels == {}
    assert "appliance_camera_up" not in families
