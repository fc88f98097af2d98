"""What the vision worker makes of frames: batches of all cameras; pictures that stand for themselves."""

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from appliance.ingest import VisionWorker
from appliance.reader import BACK_OFF_S
from appliance.settings import load_settings
from queues import EmbeddedServer
from tests.appliance.running import until
from vision.annotate import encode_jpeg
from vision.sources import open_source

NAMES = ("a", "b", "c", "d")
NUM_PICTURES = 4


@pytest.fixture
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.mark.parametrize("collect_ms", [1000, 0])
def test_the_first_frame_waits_for_those_of_other_cameras(server, monkeypatch, collect_ms):
    """As long as it may: then each batch has a frame of every camera, and else of those that had one."""
    sources = {name: {"source": f"synthetic://street?seed={ord(name)}&fps=10&live=1"} for name in NAMES}
    detector = {"device": "cpu", "imgsz": 64, "runtime": "torch", "collect_ms": collect_ms}
    worker = VisionWorker(load_settings(None, {"detector": detector, "cameras": sources}), server.url)
    batches: list[tuple[str, ...]] = []
    detect = worker._detector.detect

    def count(images, min_score=None):
        sizes.append(len(images))
        return detect(images, min_score)

    sizes: list[int] = []
    process = worker._pipeline.process

    def note(frames, on_failure=None):
        batches.append(tuple(sorted(frame.camera for frame in frames)))
        return process(frames, on_failure)

    monkeypatch.setattr(worker._detector, "detect", count)
    monkeypatch.setattr(worker._pipeline, "process", note)
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        if collect_ms:
            until(lambda: batches[-3:] == [NAMES] * 3)
        else:
            until(lambda: any(len(batch) < len(NAMES) for batch in batches[-5:]) and len(batches) > 20)
    finally:
        stop.set()
        thread.join(30)
    assert all(len(set(batch)) == len(batch) for batch in batches), "a camera has one frame in a batch"
    assert sizes == [len(batch) for batch in batches], "all in one go"


def test_the_pictures_of_a_folder_stand_for_themselves(server, monkeypatch, tmp_path):
    """As in `replay`: each with something in it is described, also where the folder comes late."""
    monkeypatch.setattr("vision.sources.PacedSource.__iter__", lambda self: iter(self._source))
    monkeypatch.setattr("appliance.reader.BACK_OFF_S", dict.fromkeys(BACK_OFF_S, (0.05,)))
    folder = tmp_path / "pictures"
    camera = {"source": str(folder), "describe": {"replace": "none"}}
    detector = {"device": "cpu", "imgsz": 320, "runtime": "torch"}
    worker = VisionWorker(
        load_settings(None, {"detector": detector, "cameras": {"album": camera}}), server.url
    )
    stop = threading.Event()
    thread = threading.Thread(target=worker.run, args=(stop,))
    thread.start()
    try:
        until(lambda: worker._cameras["album"].status({}).state == "not_found")
        write_pictures(tmp_path / "new")
        (tmp_path / "new").rename(folder)
        until(lambda: worker._cameras["album"].status({}).state == "ended")
        until(lambda: worker._cameras["album"].num_jobs == NUM_PICTURES)
    finally:
        stop.set()
        thread.join(30)


def write_pictures(folder: Path) -> None:
    """Frames of a drawn street that are far apart, each with a car in it."""
    folder.mkdir()
    street = open_source("synthetic://street?seed=3&fps=5&frames=60", camera="a")
    for frame in islice(street, 10, 10 + NUM_PICTURES):
        (folder / f"{frame.index}.jpg").write_bytes(encode_jpeg(frame.image))
