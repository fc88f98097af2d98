"""Settings: where values come from, and what a mistake looks like."""

import subprocess
import sys
from pathlib import Path

import pytest

from appliance.camera_settings import CameraSettings
from appliance.settings import BUNDLED_DETECTOR, BUNDLED_VLM, Settings, SettingsError, load_settings, to_json

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def write(tmp_path: Path):
    def write_yaml(text: str) -> Path:
        path = tmp_path / "box.yaml"
        path.write_text(text)
        return path

    return write_yaml


def problem(path: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(path)
    return str(caught.value)


def test_without_a_file_the_demo_models_and_an_embedded_server_are_used():
    settings = load_settings()

    assert settings.detector.model == BUNDLED_DETECTOR
    assert settings.engine.model == BUNDLED_VLM
    assert settings.redis.url is None
    assert settings.server.host == "127.0.0.1"
    assert settings.cameras == {}


def test_file_then_environment_then_options(write, monkeypatch):
    path = write("server: {port: 1, host: 127.0.0.2}\nengine: {max_num_seqs: 3}\ndescribe: {max_tokens: 7}\n")
    monkeypatch.setenv("APPLIANCE_SERVER__PORT", "2")
    monkeypatch.setenv("APPLIANCE_DESCRIBE__MAX_TOKENS", "9")

    settings = load_settings(path, {"server": {"port": 3}})

    assert settings.server.port == 3
    assert settings.server.host == "127.0.0.2"
    assert settings.describe.max_tokens == 9
    assert settings.engine.max_num_seqs == 3
    assert settings.engine.model == BUNDLED_VLM


def test_environment_can_name_a_camera_and_a_list(monkeypatch):
    monkeypatch.setenv("APPLIANCE_CAMERAS__DOOR__SOURCE", "synthetic://street")
    monkeypatch.setenv("APPLIANCE_DESCRIBE__LABELS", "person, car")

    settings = load_settings()

    assert settings.cameras["door"].source == "synthetic://street"
    assert settings.describe.labels == ("person", "car")


def test_unknown_key_names_its_path_and_what_is_allowed(write):
    path = write("cameras:\n  front: {source: a.mp4, colour: red}\n")

    known = ", ".join(sorted(CameraSettings.model_fields))
    assert problem(path) == f"{path}: cameras.front.colour: unknown key; allowed here: {known}"


def test_unknown_key_of_a_library_and_at_the_top(write):
    text = problem(write("detector: {confidence: 0.5}\ncamera: {}\n"))

    assert "detector.confidence: unknown key; allowed here: classes, collect_ms, conf," in text
    assert "camera: unknown key; allowed here: cameras, describe, detect, detector, engine" in text


def test_bad_value_names_its_path_and_the_value(write):
    text = problem(write("server: {port: ninety}\ntracker: sort\n"))

    assert "server.port: Input should be a valid integer" in text
    assert "got 'ninety'" in text
    assert "tracker: Input should be 'bytetrack' or 'botsort', got 'sort'" in text


def test_a_librarys_own_check_names_its_path(write):
    text = problem(write("queue: {max_len: 0}\nengine: {max_num_seqs: 0}\ndetector: {conf: 5}\n"))

    assert "queue.max_len: must be greater than 0, not 0" in text
    assert "engine.max_num_seqs: must be at least 1, not 0" in text
    assert "detector.conf: must be from 0 to 1, not 5.0" in text


def test_missing_key_is_named(write):
    assert "cameras.front.source: is missing" in problem(write("cameras:\n  front: {}\n"))


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words"])
def test_a_file_that_is_no_table(write, text):
    assert "must be a table of keys" in problem(write(text))


def test_broken_yaml_and_missing_file(write, tmp_path):
    assert "not valid YAML" in problem(write("a: [1"))
    told = problem(write("cameras:\n gate: {source: rtsp://u:my pw: hush@cam/x}: ["))
    assert "not valid YAML" in told
    assert "line 2" in told
    assert "hush" not in told
    assert "no such file" in problem(tmp_path / "none.yaml")


def test_empty_file_is_the_defaults(write):
    assert load_settings(write("# nothing yet\n")) == load_settings()


def test_password_of_a_camera_is_not_in_the_error(write):
    """A2: a mistake in a camera block does not print its URL."""
    camera = "cameras: {front: {source: ['rtsp://a:s3cret@b']}}"
    text = problem(write(f"redis: {{url: 'http://me:s3cret@host'}}\n{camera}\n"))

    assert "redis.url" in text
    assert "cameras.front.source" in text
    assert "s3cret" not in text


@pytest.mark.parametrize("name", ["front door", "a/b", "türe"])
def test_camera_names_are_plain(write, name):
    assert "use letters, digits" in problem(write(f"cameras: {{'{name}': {{source: a}}}}\n"))


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:81"),
        ("0.0.0.0", "http://127.0.0.1:81"),
        ("::", "http://[::1]:81"),
        ("[::1]", "http://[::1]:81"),
        ("box.lan", "http://box.lan:81"),
    ],
)
def test_where_a_client_on_this_machine_finds_the_server(write, host, url):
    assert load_settings(write(f"server: {{host: '{host}', port: 81}}")).server.url == url


def test_the_key_reaches_a_child_process_and_no_log(write):
    settings = load_settings(write("server: {api_key: s3cret}"))

    assert Settings.model_validate_json(to_json(settings)).server.key == "s3cret"
    assert "s3cret" not in repr(settings)


def test_settings_survive_the_way_to_a_child_process(write):
    text = "cameras: {front: {source: a.mp4, fps: 5}}\ndetector: {classes: [person]}\n"
    settings = load_settings(write(text))

    assert Settings.model_validate_json(to_json(settings)) == settings


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path):
    assert load_settings(path).cameras


def test_nothing_heavy_is_imported():
    code = (
        "import sys, appliance.cli, appliance.settings; "
        "print([m for m in ('torch', 'ultralytics', 'transformers') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "[]"
