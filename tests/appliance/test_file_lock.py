"""Two appliances cannot have one event file."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.file_lock import FileInUseError, sole_use
from appliance.serve import sole_events
from appliance.settings import Settings, SettingsError

HOLDER = """
import sys
from pathlib import Path
from appliance.file_lock import sole_use
with sole_use(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def settings_of(path: Path) -> Settings:
    return Settings.model_validate({"events": {"path": str(path)}})


def test_another_process_is_named_and_its_kill_frees_the_file(tmp_path: Path) -> None:
    """Also by another name of the file; what a killed process left behind is no obstacle."""
    path, link = tmp_path / "events.db", tmp_path / "link"
    link.symlink_to(tmp_path)
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        assert other.stdout.readline() == b"held\n"
        try:
            for name in (path, link / "events.db"):
                with (
                    pytest.raises(
                        SettingsError, match=rf"events\.path: \S+ is in use by process {other.pid}"
                    ),
                    sole_events(settings_of(name)),
                ):
                    pass
        finally:
            os.kill(other.pid, signal.SIGKILL)
            other.wait()
    assert f"process {other.pid}" in (tmp_path / "events.db.lock").read_text()
    with sole_events(settings_of(path)):
        assert f"process {os.getpid()}" in (tmp_path / "events.db.lock").read_text()


def test_the_lock_ends_with_its_block_though_a_child_lives_on(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    with sole_use(path):
        with pytest.raises(FileInUseError, match=f"process {os.getpid()}"), sole_use(path):
            pass
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    try:
        with sole_use(path):
            pass
    finally:
        child.communicate()


def test_a_folder_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with (
        pytest.raises(SettingsError, match=r"events\.path: .*nowhere/events\.db\.lock: cannot be made"),
        sole_events(settings_of(tmp_path / "nowhere" / "events.db")),
    ):
        pass


def test_events_in_memory_need_no_lock() -> None:
    with sole_events(Settings()) as one, sole_events(Settings()) as other:
        assert one is not other
