"""`benchmarks/soak.py`, short: the real appliance under faults loses nothing that it does not count."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.timeout(1800)
def test_an_appliance_under_faults(tmp_path: Path) -> None:
    """Workers and Redis killed, cameras and the receiver gone: see `problems` for what must hold."""
    options = ["--seconds", "20", "--every", "2", "--cameras", "8", "--keep", str(tmp_path)]
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert result.stdout, result.stderr
    report = json.loads(result.stdout)
    assert report["problems"] == [], json.dumps(report, indent=2)
    assert result.returncode == 0
    assert sum(report["faults"].values()) >= 3
