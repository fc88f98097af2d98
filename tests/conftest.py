"""Shared fixtures: no test may wait for a network, every service runs on loopback with its own port."""

import fcntl
import os
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
os.environ.setdefault("YOLO_OFFLINE", "true")
os.environ.setdefault("YOLO_AUTOINSTALL", "false")
os.environ.setdefault("APPLIANCE_ENGINE__COST_CACHE", "off")
# why: an export takes seconds, and is the concern of a few tests.
os.environ.setdefault("APPLIANCE_DETECTOR__RUNTIME", "torch")
# why: each HTTP client would read the world's certificates, which takes longer than what most tests ask.
os.environ.setdefault("SSL_CERT_DIR", str(Path(__file__).parent))

# why: a busy machine is slow, not wrong.
hypothesis.settings.register_profile("appliance", deadline=None)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=3000)
hypothesis.settings.load_profile("appliance")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long tests come first, and of several processes one does a file, one all that start the appliance.

    why: fixtures of a module are made once, two appliances on two cores would be a test of the machine, and
    a file that is long and starts last is done by one process while the others have nothing left to do.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.get_closest_marker("e2e") is None, item.path not in slow))
    for item in items:
        is_e2e = item.get_closest_marker("e2e") is not None
        group = "e2e" if is_e2e else f"{item.path.parent.name}.{item.path.stem}"
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def media() -> Path:
    """The folder of test clips and weights, which are not part of the repository."""
    default = Path(__file__).resolve().parents[2] / "shared" / "media"
    folder = Path(os.environ.get("APPLIANCE_TEST_MEDIA", default))
    if not folder.is_dir():
        pytest.skip(f"no test media at {folder}: set APPLIANCE_TEST_MEDIA to the folder with the clips")
    return folder


@pytest.fixture(scope="session")
def export_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's cache of tests that export the bundled detector: it is made once, and others find it."""
    folder = tmp_path_factory.getbasetemp()
    # why: each of several processes has a folder of its own beside the others
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    with (folder / "export-cache.lock").open("w") as lock:
        # why: who makes one beside another process has more in the cache than is kept
        fcntl.flock(lock, fcntl.LOCK_EX)
        if find_spec("openvino") and not (folder / "export-cache").exists():
            _export_detector(folder / "export-cache")
    return folder / "export-cache"


def _export_detector(cache: Path) -> None:
    from appliance.settings import BUNDLED_DETECTOR
    from vision.detector import Detector, DetectorConfig

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        Detector(DetectorConfig(BUNDLED_DETECTOR, imgsz=320, runtime="openvino"))


@pytest.fixture(scope="session")
def qwen3_vl_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random-weight Qwen3-VL (one image token is 32x32 pixels)."""
    from tests.checkpoints import tiny_qwen3_vl

    return tiny_qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(scope="session")
def qwen2_5_vl_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random-weight Qwen2.5-VL (one image token is 28x28 pixels)."""
    from tests.checkpoints import tiny_qwen2_5_vl

    return tiny_qwen2_5_vl(tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="session")
def qwen2_vl_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random-weight Qwen2-VL (one image token is 28x28 pixels)."""
    from tests.checkpoints import tiny_qwen2_vl

    return tiny_qwen2_vl(tmp_path_factory.mktemp("qwen2_vl"))


@pytest.fixture(scope="session")
def smolvlm_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random-weight SmolVLM2 (an image is 3 or 5 tiles of 9 tokens)."""
    from tests.checkpoints import tiny_smolvlm

    return tiny_smolvlm(tmp_path_factory.mktemp("smolvlm"))


@pytest.fixture(scope="session")
def idefics3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random-weight Idefics3 (an image is 3 or 5 tiles of 4 tokens)."""
    from tests.checkpoints import tiny_idefics3

    return tiny_idefics3(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="session")
def internvl_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random-weight InternVL (an image is 4 or 5 tiles of 9 tokens)."""
    from tests.checkpoints import tiny_internvl

    return tiny_internvl(tmp_path_factory.mktemp("internvl"))


@pytest.fixture(scope="session")
def gemma3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random-weight Gemma 3 (an image is 36 tokens that see each other)."""
    from tests.checkpoints import tiny_gemma3

    return tiny_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="session")
def gemma3_text_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random-weight text-only Gemma 3."""
    from tests.checkpoints import tiny_gemma3_text

    return tiny_gemma3_text(tmp_path_factory.mktemp("gemma3_text"))


@pytest.fixture(scope="session")
def llama_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random-weight text-only Llama."""
    from tests.checkpoints import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def qwen3_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random-weight text-only Qwen3."""
    from tests.checkpoints import tiny_qwen3

    return tiny_qwen3(tmp_path_factory.mktemp("qwen3"))
