"""`replay`, the whole job on recorded video: what is described, what is written, and that nothing is lost."""

import io
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import av
import pytest
from PIL import Image

from appliance.recordings import find_recordings
from appliance.replay import ReplayOptions, run_replay
from appliance.settings import BUNDLED_DETECTOR, Settings, SettingsError, load_settings
from appliance.video_writer import VideoWriter
from queues import EmbeddedServer
from tests.vision.test_video_file import damage
from vision.errors import SourceNotFound, SourceUnsupported
from vision.sources import FrameSource, open_source
from vlm_engine import Engine, EngineStopped

STREET = "synthetic://street?seed=3&fps=5&frames=60"
VISITS = ((56, 204), (226, 452), (498, 704), (738, 876), (918, 1212), (1230, 1364))
"""First and last frame with a person in the clip of V22, by eye."""


@pytest.fixture
def settings(qwen3_vl_checkpoint: Path) -> Settings:
    """The bundled detector, and a tiny model of random weights that says four tokens."""
    return load_settings(
        None,
        {
            "engine": {
                "model": str(qwen3_vl_checkpoint),
                "device": "cpu",
                "kv_cache_tokens": 4096,
                "num_threads": 1,
            },
            "detector": {"device": "cpu", "imgsz": 320},
            "describe": {"max_tokens": 4, "cooldown_s": 1, "min_hits": 2, "context": False},
        },
    )


def changed(settings: Settings, part: str, **values: Any) -> Settings:
    """The settings with some values of one part replaced."""
    data = settings.model_dump()
    data[part].update(values)
    return Settings(**data)


def play(settings: Settings, tmp_path: Path, *sources: str, **options: Any) -> list[dict[str, Any]]:
    """The descriptions of a run in which nothing failed."""
    output = tmp_path / "out" / "descriptions.jsonl"
    assert run_replay(settings, find_recordings(sources), ReplayOptions(output=output, **options)) == 0
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_each_line_says_what_was_seen_asked_and_answered(settings, tmp_path):
    lines = play(settings, tmp_path, STREET)

    assert lines
    for line in lines:
        assert line["source"] == STREET
        assert line["time_s"] == pytest.approx(line["frame_index"] / 5)
        assert line["description"]
        assert line["error"] is None
        assert line["prompt"].startswith("Describe this camera frame")
        assert f"1 {line['label']}" in line["prompt"] or f"{line['label']} (" in line["prompt"]
        assert line["track_id"] in [detection["track_id"] for detection in line["detections"]]
        assert set(line["detections"][0]) == {"name", "class", "confidence", "box", "track_id"}
        assert line["timings"]["prefill_ms"] > 0
        assert line["timings"]["queue_ms"] >= 0, "a job taken within its first millisecond waited 0.0"


def test_a_full_queue_holds_the_player_up_and_loses_nothing(settings, tmp_path):
    """Recorded pictures wait for room where a live camera drops: one place, and twelve that come at once."""
    folder = tmp_path / "pictures"
    write_pictures(folder, range(10, 22))
    narrow = changed(changed(settings, "queue", max_len=1), "describe", concurrency=1)

    lines = play(narrow, tmp_path, str(folder))

    assert len({line["source"] for line in lines}) == len(lines) == 12


def test_only_the_wanted_classes_are_described(settings, tmp_path):
    lines = play(changed(settings, "describe", labels=["person"]), tmp_path, STREET)

    assert lines
    assert {line["label"] for line in lines} == {"person"}


def test_the_users_prompt_is_the_one_that_is_asked(settings, tmp_path):
    lines = play(changed(settings, "describe", prompt="Who is there?"), tmp_path, STREET)

    assert all(line["prompt"].startswith("Who is there?\n[image]\nDetected: ") for line in lines)


def test_a_shared_redis_is_left_as_it_was(settings, tmp_path):
    """Every detection goes through Redis, and the run's keys are gone afterwards."""
    import redis

    with EmbeddedServer() as server, redis.Redis.from_url(server.url) as client:
        lines = play(changed(settings, "redis", url=server.url), tmp_path, STREET)
        num_added = client.info("commandstats")["cmdstat_xadd"]["calls"]
        left = [key for key in client.scan_iter() if client.type(key) == b"stream"]

    assert num_added >= 2 * len(lines)
    assert left == []


def test_save_writes_a_snapshot_a_description_and_a_video(settings, tmp_path):
    folder = tmp_path / "saved"

    lines = play(settings, tmp_path, STREET, save=folder)

    snapshots = sorted(folder.glob("*.jpg"))
    assert len(snapshots) == len(lines)
    assert [path.name.split("-")[1] for path in snapshots] == sorted(
        f"{line['frame_index']:06}" for line in lines
    )
    with Image.open(snapshots[0]) as snapshot:
        assert snapshot.width == 448
        assert snapshot.height > 256
    with av.open(str(folder / "street-annotated.mp4")) as video:
        times = [float(frame.time or 0) for frame in video.decode(video=0)]
        assert video.streams.video[0].codec_context.name in {"h264", "mpeg4"}
    assert times == pytest.approx([index / 5 for index in range(60)], abs=1e-3)


def test_what_is_saved_beside_the_recordings_leaves_them_as_they_are(settings, tmp_path):
    """Two videos of one name, a name that is taken, a picture, links, all saved where they are."""
    folder, other = tmp_path / "films", tmp_path / "others"
    other.mkdir()
    write_pictures(folder, range(10, 12))
    write_clip(folder / "clip.mp4", fps=30)
    write_clip(other / "clip.mp4", fps=25)
    (folder / "clip-annotated.mp4").symlink_to(other / "clip.mp4")
    (folder / "10-000000-car.jpg").symlink_to(folder / "11.png")
    sources = [folder / "clip.mp4", other / "clip.mp4", folder / "10.png", folder / "11.png"]
    before = [path.read_bytes() for path in sources]

    play(settings, tmp_path, *map(str, sources), save=folder)

    assert [path.read_bytes() for path in sources] == before
    saved = {path.name for path in folder.iterdir() if not path.is_symlink()} - {
        path.name for path in sources
    }
    assert {
        "clip-annotated-2.mp4",
        "clip-2-annotated.mp4",
        "10-000000-car-2.jpg",
        "11-000000-car.jpg",
    } <= saved


def test_descriptions_do_not_go_into_what_is_read(settings, tmp_path):
    config = tmp_path / "cameras.yaml"
    config.write_text("cameras: {}\n")

    with pytest.raises(SettingsError, match="choose another --output"):
        run_replay(settings, find_recordings([STREET]), ReplayOptions(output=config, config=config))

    assert config.read_text() == "cameras: {}\n"


@pytest.mark.parametrize("name", ["out/descriptions.jsonl", "street-annotated.mp4", "snapshots"])
def test_a_full_disk_ends_a_run_with_a_reason(settings, tmp_path, name):
    (tmp_path / "out").mkdir()
    names = [f"street-{index:06}-{label}.jpg" for index in range(60) for label in ("person", "car", "dog")]
    for one in names if name == "snapshots" else [name]:
        (tmp_path / one).symlink_to("/dev/full")

    with pytest.raises(SettingsError, match=r"cannot be written.*No space left on device"):
        play(settings, tmp_path, STREET, save=tmp_path)


def test_pictures_are_described_one_by_one(settings, tmp_path):
    """A folder's pictures stand for themselves: no tracking, no cooldown between them."""
    folder = tmp_path / "pictures"
    write_pictures(folder, range(10, 14))

    lines = play(settings, tmp_path, str(folder))

    sources = {line["source"] for line in lines}
    assert sources == {str(folder / f"{index}.png") for index in range(10, 14)}
    assert len(lines) == 4


def test_a_source_that_fails_on_the_way_does_not_take_the_others_with_it(settings, tmp_path):
    good = tmp_path / "good.png"
    frame = next(iter(open_street()))
    Image.fromarray(frame.image[:, :, ::-1]).save(good)
    bad = tmp_path / "bad.png"
    bad.write_bytes(good.read_bytes()[:200])
    output = tmp_path / "out.jsonl"

    num_failed = run_replay(settings, find_recordings([str(bad), STREET]), ReplayOptions(output=output))

    assert num_failed == 1
    assert output.read_text().count("\n") > 0


def write_pictures(folder: Path, indices: range) -> None:
    """Drawn frames with a car in view, each a file of its own."""
    folder.mkdir()
    for frame in open_street():
        if frame.index in indices:
            Image.fromarray(frame.image[:, :, ::-1]).save(folder / f"{frame.index}.png")


def open_street() -> FrameSource:
    return open_source(STREET, camera="a")


def test_json_lines_go_to_a_standard_output_that_is_no_terminal(settings, monkeypatch, tmp_path):
    stdout = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr("sys.stdout", stdout)

    assert run_replay(settings, find_recordings([STREET]), ReplayOptions()) == 0

    lines = stdout.buffer.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(json.loads(line)["camera"] == "street" for line in lines)
    assert lines


def test_the_speed_changes_nothing(settings, tmp_path):
    """V22: the same set at 1x and at max, from a file that plays for four seconds."""
    path = tmp_path / "clip.mp4"
    write_clip(path, fps=15)

    fast = play(settings, tmp_path, str(path))
    begun = time.monotonic()
    slow = play(settings, tmp_path, str(path), realtime=True)
    took_s = time.monotonic() - begun

    def what(lines):
        return {(line["frame_index"], line["time_s"], line["track_id"], line["label"]) for line in lines}

    assert what(fast) == what(slow)
    assert len(fast) > 1
    assert took_s > 59 / 15


def write_clip(path: Path, *, fps: int) -> None:
    """Sixty drawn frames as a video file."""
    with VideoWriter(path) as video:
        for frame in open_street():
            video.write(frame.image, frame.index / fps)


def test_a_recording_is_looked_at_as_a_camera_is(settings, tmp_path):
    """Zones, triggers, rate and masks of the camera; the masked half is black in all that is written."""
    lower = "0,0.5,1,0.5,1,1,0,1"
    camera = {
        "source": "rtsp://10.0.0.1/",
        "detect": {"fps": 2.5},
        "zones": {"ground": {"coordinates": lower, "inertia": 2, "objects": "person"}},
        "privacy": {"mask": [lower.replace("0.5", "0.9")]},
        "describe": {"triggers": ["zone_entry"], "cooldown_s": 0, "prompt": "Who is at {camera}?"},
    }
    seen = changed(settings, "cameras", gate=camera)

    fast = play(seen, tmp_path, STREET, camera="gate", save=tmp_path / "saved")
    lines = play(seen, tmp_path, STREET, camera="gate")

    assert [line["frame_index"] for line in fast] == [line["frame_index"] for line in lines]
    assert {(line["reason"], line["label"]) for line in lines} == {("zone_entry:ground", "person")}
    assert all(line["frame_index"] % 2 == 0 and line["zones"] == ["ground"] for line in lines)
    assert {(line["camera"], line["prompt"].partition("?")[0]) for line in lines} == {
        ("street", "Who is at gate")
    }
    assert all("zones" in detection for line in lines for detection in line["detections"])
    for path in (tmp_path / "saved").glob("*.jpg"):
        with Image.open(path) as snapshot:
            corner = snapshot.convert("L").crop((0, 236, 12, 254))
            assert corner.getextrema()[1] < 40, "the mask is under all that is drawn"
    with pytest.raises(SettingsError, match="no such camera; there is gate"):
        play(seen, tmp_path, STREET, camera="door")


@pytest.mark.slow
@pytest.mark.e2e
def test_one_description_per_visit_and_none_for_the_empty_room(settings, media, tmp_path):
    """V22."""
    real = changed(settings, "detector", model=str(media / "yolo26n_int8_320.tflite"), imgsz=None)
    usual = changed(real, "describe", cooldown_s=10, min_hits=3)

    lines = play(usual, tmp_path, str(media / "one-by-one-person-detection.mp4"))

    frames = [line["frame_index"] for line in lines]
    assert [sum(first <= frame <= last for frame in frames) for first, last in VISITS] == [1] * len(VISITS)
    assert len(frames) == len(VISITS)


def test_an_engine_that_dies_ends_the_run(settings, tmp_path, monkeypatch):
    """A7: nothing would ever be described, so waiting for it is no way to end."""

    def die(engine: Engine) -> None:
        raise MemoryError("no more")

    monkeypatch.setattr(Engine, "step", die)

    with pytest.raises(EngineStopped, match="no more"):
        play(settings, tmp_path, STREET)


def test_a_recording_that_is_cut_off_is_told(settings, tmp_path, capsys):
    path = tmp_path / "clip.mp4"
    write_clip(path, fps=5)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    play(settings, tmp_path, str(path), save=tmp_path / "saved")

    told = capsys.readouterr().err
    counts = re.search(
        r"^(\d+) frames, .*, (\d+) frames missing: their source was cut off", told, re.MULTILINE
    )
    assert counts is not None
    num_frames, num_missing = map(int, counts.groups())
    # why: the picture that the cut goes through may be read, and is damaged then
    num_damaged = len(re.findall(r"1 damaged frame left out", told))
    assert num_frames + num_damaged + num_missing == 60
    assert num_missing > 10
    assert f"cut off or is damaged ({path}: {num_missing})" in told


def test_damage_is_told_with_the_file_that_it_is_in(settings, tmp_path, capsys):
    good, bad = tmp_path / "good.mp4", tmp_path / "bad.mp4"
    write_clip(good, fps=5)
    write_clip(bad, fps=5)
    damage(bad, 11, 14)

    play(settings, tmp_path, str(good), str(bad))

    told = capsys.readouterr().err
    assert re.search(rf", (\d+) damaged frames? left out \({bad}: \1\)", told)


def test_how_far_a_run_is_stands_in_a_log_too(settings, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("appliance.display.TELL_EVERY_S", 0.05)
    monkeypatch.setattr("appliance.saving.TELL_EVERY_S", 0.0)

    play(settings, tmp_path, STREET, save=tmp_path)

    told = capsys.readouterr().err
    assert re.search(r"^street: frame \d+ of 60  .* frames/s .* descriptions  queue \d+$", told, re.MULTILINE)
    assert f"saving {tmp_path}/street-annotated.mp4: frame 60 of 60" in told


def test_what_there_is_one_of_is_told_in_the_singular(settings, tmp_path, capsys):
    play(settings, tmp_path, STREET.replace("frames=60", "frames=1"))

    assert "1 frame, " in capsys.readouterr().err


def test_what_is_asked_for_is_found_before_anything_is_loaded(tmp_path):
    with pytest.raises(SourceNotFound, match=r"no file or folder .*none\.mp4"):
        find_recordings([STREET, str(tmp_path / "none.mp4")])
    with pytest.raises(SourceNotFound, match="no video and no picture"):
        find_recordings([str(tmp_path)])
    with pytest.raises(SourceUnsupported, match="rtsp://"):
        find_recordings(["rtsp://user:secret@host/1"])
    for scene in ("synthetic://yard", "synthetic://yard?seed=7"):
        with pytest.raises(SourceUnsupported, match=r"has no end: .*frames=100") as caught:
            find_recordings([scene])
        (recording,) = find_recordings([str(caught.value).rsplit(" ", 1)[-1]])
        assert recording.num_frames == 100
    with pytest.raises(SourceUnsupported, match="leave out live=1"):
        find_recordings([f"{STREET}&live=1"])


def test_all_that_cannot_be_played_is_told_at_once(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.mp4").write_text("this is no video\n" * 100)
    sources = [
        "none.mp4",
        str(tmp_path / "empty"),
        STREET,
        str(tmp_path / "notes.mp4"),
        "rtsp://u:secret@h/1",
    ]

    with pytest.raises(SourceNotFound) as raised:
        find_recordings(sources)

    lines = str(raised.value).splitlines()
    told = ("none.mp4", "empty holds no video", "notes.mp4 cannot be read as a video", "rtsp://h/… is a live")
    assert len(lines) == 4
    assert all(words in line for words, line in zip(told, lines, strict=True))
    assert "secret" not in str(raised.value)


def test_names_of_files_may_be_any_bytes(settings, tmp_path, capsys):
    """A folder with a Latin-1 name, a picture of such a name in it, one that is damaged, and a video."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    write_pictures(folder, range(10, 12))
    (folder / "10.png").rename(folder / os.fsdecode(b"t\xe9te.png"))
    write_clip(folder / os.fsdecode(b"rou\xe9.mp4"), fps=25)
    bad = folder / os.fsdecode(b"us\xe9.png")
    bad.write_bytes((folder / "11.png").read_bytes()[:200])
    output, save = folder / os.fsdecode(b"\xe9.jsonl"), folder / os.fsdecode(b"gard\xe9")

    options = ReplayOptions(output=output, save=save)
    num_failed = run_replay(settings, find_recordings([str(folder)]), options)

    sources = {json.loads(line)["source"] for line in output.read_text().splitlines()}
    assert {rf"{tmp_path}/caf\xe9/t\xe9te.png", f"{tmp_path}/caf\\xe9/11.png"} <= sources
    assert num_failed == 1
    assert (save / "rou-annotated.mp4").stat().st_size
    assert rf"saved in {tmp_path}/caf\xe9/gard\xe9" in capsys.readouterr().err


def test_sources_of_one_name_get_names_of_their_own():
    names = [recording.name for recording in find_recordings([STREET, STREET, "synthetic://yard?frames=9"])]

    assert names == ["street", "street-2", "yard"]


def test_the_bundled_detector_is_there():
    assert Path(BUNDLED_DETECTOR).is_file()
