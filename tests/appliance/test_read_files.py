"""That nothing is written over what is read."""

import os
from pathlib import Path

import pytest

from appliance.output import DescriptionWriter
from appliance.read_files import ReadFiles
from appliance.settings import SettingsError


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"film")
    return path


def test_a_file_is_known_by_each_way_to_it(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = clip.parent
    (folder / "symlink.mp4").symlink_to(clip)
    os.link(clip, folder / "hardlink.mp4")
    (folder / "sub").mkdir()
    (folder / "other.mp4").write_bytes(b"film")
    monkeypatch.chdir(folder)
    same = ["clip.mp4", "symlink.mp4", "hardlink.mp4", "sub/../clip.mp4", str(clip)]

    for source in (str(clip), "clip.mp4", "symlink.mp4", f"file://{clip}", str(folder)):
        assert all(ReadFiles([source]).has(Path(one)) for one in same), source
    assert not ReadFiles([clip]).has(Path("other.mp4"))
    assert not ReadFiles([clip, "synthetic://street", "org/model"]).has(Path("none.mp4"))


def test_another_name_is_free_of_all_of_them(clip: Path) -> None:
    second = clip.with_name("clip-2.mp4")
    second.symlink_to(clip)

    assert ReadFiles([clip]).spare(clip) == clip.with_name("clip-3.mp4")
    assert ReadFiles([clip]).spare(clip.with_name("new.mp4")) == clip.with_name("new.mp4")


def test_descriptions_are_not_written_over_what_is_read(clip: Path) -> None:
    with pytest.raises(SettingsError, match=r"clip\.mp4: is what this run reads: choose another --output"):
        DescriptionWriter(clip, ReadFiles([clip]))
    assert clip.read_bytes() == b"film"
