"""From frames to observations, with a real model on real pictures."""

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import psutil
import pytest

from appliance.settings import BUNDLED_DETECTOR
from vision.detector import Detector, DetectorConfig
from vision.errors import UnknownClass
from vision.pipeline import CameraConfig, FrameResult, Pipeline
from vision.scenes import SceneStream
from vision.sources import open_source
from vision.trigger import ON_DEMAND, TriggerConfig
from vision.types import Frame, Image, Observation

LEAK_ROUNDS = int(os.environ.get("APPLIANCE_TEST_LEAK_ROUNDS", "20"))

PEOPLE = TriggerConfig(labels=("person",))


@pytest.fixture(scope="module")
def yolo26n_320(media: Path) -> Detector:
    pytest.importorskip("ai_edge_litert", reason="the extra `test` brings the runtime of .tflite models")
    return Detector(DetectorConfig(str(media / "yolo26n_int8_320.tflite")))


def frames_of(image: Image, camera: str, num_frames: int = 6) -> Iterator[Frame]:
    return (Frame(camera, index, index / 10, 0.0, image) for index in range(num_frames))


def test_several_cameras_in_one_batch(yolo26n_320: Detector, bus: Image) -> None:
    """V17: one model, a tracker each, ids unique as (camera, track)."""
    cameras = [CameraConfig("gate", 10, trigger=PEOPLE), CameraConfig("yard", 10, trigger=PEOPLE)]
    pipeline = Pipeline(yolo26n_320, cameras)
    rounds = [
        pipeline.process(pair)
        for pair in zip(frames_of(bus, "gate"), frames_of(bus[:540], "yard"), strict=True)
    ]
    assert [[result.frame.camera for result in results] for results in rounds] == [["gate", "yard"]] * 6
    for column in (0, 1):
        seen = [results[column].observation for results in rounds]
        assert [observation is not None for observation in seen] == [False, False, True, False, False, False]
    gate, yard = rounds[-1]
    for result in (gate, yard):
        assert result.detections.track_ids is not None
        assert min(result.detections.track_ids.tolist()) == 1
        assert len(set(result.detections.track_ids.tolist())) == len(result.detections)
    assert (gate.detections.boxes[:, 3] > 540).any()
    assert (yard.detections.boxes <= 810).all()
    pipeline.reset("gate")
    after = pipeline.process([*frames_of(bus, "gate", 1), *frames_of(bus[:540], "yard", 1)])
    assert min(after[0].detections.track_ids.tolist()) > max(gate.detections.track_ids.tolist())  # type: ignore[union-attr]
    assert after[1].detections.track_ids.tolist() == yard.detections.track_ids.tolist()  # type: ignore[union-attr]


def test_another_size_begins_anew(yolo26n_320: Detector, bus: Image) -> None:
    """V1, V13: tracks of the old picture are not carried over into another one."""
    pipeline = Pipeline(yolo26n_320, [CameraConfig("gate", 10, trigger=PEOPLE)])
    images = [bus] * 2 + [bus[:540, :400].copy()] * 2
    tracks = [
        pipeline.process([Frame("gate", i, i / 10, 0.0, image)])[0].detections.track_ids
        for i, image in enumerate(images)
    ]

    assert all(ids is not None and len(ids) for ids in tracks)
    old, new = (set(ids.tolist()) for ids in (tracks[1], tracks[3]) if ids is not None)
    assert min(new) > max(old)


def test_pictures_stand_for_themselves(yolo26n_320: Detector, bus: Image) -> None:
    """Each picture of a folder with somebody in it is described, at once; ids go on."""
    pipeline = Pipeline(yolo26n_320, [CameraConfig("album", trigger=PEOPLE, is_video=False)])
    pictures = [bus, bus, np.zeros_like(bus), bus[:, ::-1].copy()]
    results = [
        pipeline.process([Frame("album", i, float(i), 0.0, image)])[0] for i, image in enumerate(pictures)
    ]
    assert [result.observation is not None for result in results] == [True, True, False, True]
    ids = [result.observation.track_id for result in results if result.observation]
    assert ids == sorted(set(ids))


def test_labels_are_checked_against_the_model(yolo26n_320: Detector) -> None:
    """V18: at start, with the camera's name and the names that there are."""
    with pytest.raises(UnknownClass, match=r"'gate'.*no class 'persn'.*person, bicycle"):
        Pipeline(yolo26n_320, [CameraConfig("gate", trigger=TriggerConfig(labels=("persn",)))])


def test_a_label_that_the_detector_leaves_out_is_an_error(media: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    detector = Detector(DetectorConfig(str(media / "yolo26n_int8_320.tflite"), classes=("person", "car")))
    with pytest.raises(UnknownClass, match=r"no class 'dog'.*It knows: person, car\."):
        Pipeline(detector, [CameraConfig("gate", trigger=TriggerConfig(labels=("dog",)))])


def test_camera_names_are_used_once(yolo26n_320: Detector, bus: Image) -> None:
    with pytest.raises(ValueError, match="same name"):
        Pipeline(yolo26n_320, [CameraConfig("gate"), CameraConfig("gate")])
    with pytest.raises(KeyError):
        Pipeline(yolo26n_320, [CameraConfig("gate")]).process(list(frames_of(bus, "yard", 1)))
    assert Pipeline(yolo26n_320, []).process([]) == []


def watch(detector: Detector, clip: Path, trigger: TriggerConfig, num_frames: int) -> list[FrameResult]:
    source = open_source(clip, camera="room")
    pipeline = Pipeline(detector, [CameraConfig("room", source.fps, trigger=trigger)])
    results = [
        replace(result, frame=replace(result.frame, image=np.empty((0, 0, 3), np.uint8)))
        for frame in islice(source, num_frames)
        for result in pipeline.process([frame])
    ]
    source.close()
    return results


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_description_a_visit(yolo26n_320: Detector, media: Path) -> None:
    """V22: people come one at a time; the room is empty before and between.

    The first two of the six, which `replay` sees all. That 1× gives the same follows from
    `test_pacing_follows_the_time_stamps`: same frames, same times.
    """
    results = watch(yolo26n_320, media / "one-by-one-person-detection.mp4", PEOPLE, num_frames=480)
    seen: list[Observation] = [result.observation for result in results if result.observation]
    arrivals_s = [6.2, 22.8]
    assert len(seen) == len(arrivals_s)
    for observation, arrival_s in zip(seen, arrivals_s, strict=True):
        assert 0 < observation.frame.time_s - arrival_s < 1.0
        assert observation.detections.labels.count("person") == 1
    assert len({observation.track_id for observation in seen}) == len(seen)
    empty = [result for result in results if result.frame.index < 41 or 205 <= result.frame.index < 220]
    assert not any("person" in result.detections.labels for result in empty)


def test_memory_and_state_stay_flat(export_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V16: two cameras on a busy street are detected and tracked; with 1,000 leak rounds 10,000 frames."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(export_cache))
    detector = Detector(DetectorConfig(BUNDLED_DETECTOR, imgsz=320, runtime="auto"))
    pipeline = Pipeline(detector, [CameraConfig(name, 5) for name in "ab"])
    street = SceneStream("street", 5, 5.0, (160, 90))
    pictures = [street.frame(index)[0] for index in range(100)]
    megabytes, sizes = [], []
    for index in range(5 * LEAK_ROUNDS):
        picture = pictures[index % len(pictures)]
        pipeline.process([Frame(name, index, index / 5, 0.0, picture) for name in "ab"])
        if index % LEAK_ROUNDS == LEAK_ROUNDS - 1:
            megabytes.append(psutil.Process().memory_info().rss / 2**20)
            cameras = pipeline._cameras.values()
            sizes.append(max(len(camera._tracker._ids) + camera.trigger.num_visits for camera in cameras))
    assert megabytes[-1] - megabytes[1] < 16
    assert 0 < sizes[-1] < 100


def test_another_way_to_look_keeps_what_it_can(yolo26n_320: Detector, bus: Image) -> None:
    """Tracks where only cooldowns are others; counts, and a description that was asked for, always."""
    gate = CameraConfig("gate", 10, trigger=replace(PEOPLE, cooldown_s=1.0))
    pipeline = Pipeline(yolo26n_320, [gate])
    *_, seen = [pipeline.process([frame])[0] for frame in frames_of(bus, "gate", 4)]
    held_back = pipeline.num_held_back("gate")

    assert not pipeline.put(replace(gate, trigger=replace(PEOPLE, cooldown_s=0.0, camera_cooldown_s=99.0)))
    pipeline.ask("gate")
    (after,) = pipeline.process([Frame("gate", 4, 0.4, 0.0, bus)])
    assert after.detections.track_ids.tolist() == seen.detections.track_ids.tolist()  # type: ignore[union-attr]
    assert after.observation is not None

    pipeline.ask("gate")
    assert pipeline.put(replace(gate, trigger=replace(PEOPLE, min_hits=99)))
    assert pipeline.num_held_back("gate").items() >= held_back.items()
    (anew,) = pipeline.process([Frame("gate", 5, 0.5, 0.0, bus)])
    assert anew.observation is not None
    assert anew.observation.reason == ON_DEMAND
    assert not pipeline.put(replace(gate, trigger=replace(PEOPLE, min_hits=99, track_cooldown_s=9.0)))
