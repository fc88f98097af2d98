"""An end is quick."""

import subprocess
import sys

import pytest

GARBAGE = """
{begin}
class Ring:
    def __init__(self):
        self.itself = self
    def __del__(self):
        print("looked for")
kept = Ring()
"""


@pytest.mark.parametrize(
    ("begin", "said"), [("", "looked for"), ("from appliance.heap import leave_garbage; leave_garbage()", "")]
)
def test_nobody_looks_for_garbage_at_the_end(begin: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GARBAGE.format(begin=begin)], capture_output=True, text=True, check=True
    )

    assert (done.stdout.strip(), done.stderr) == (said, "")
