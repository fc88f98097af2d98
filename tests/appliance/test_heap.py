"""Threads that come and go leave no memory of their own behind, and an end is quick."""

import subprocess
import sys

import pytest

COUNT = """
import ctypes, sys, threading
{limit}
gate = threading.Barrier(9)
def work():
    kept = [bytearray(50_000) for _ in range(20)]
    gate.wait()
for _ in range(8):
    threading.Thread(target=work).start()
gate.wait()
lines = open("/proc/self/maps").read().splitlines()
spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines if len(line.split()) == 5]
print(sum(start % 2**26 == 0 for start, _ in spans))
"""
LIMIT = "from appliance.heap import limit_arenas; limit_arenas()"


def num_arenas(limit: str) -> int:
    """Those beside the main one: their heaps begin at multiples of 64 MB."""
    command = [sys.executable, "-c", COUNT.format(limit=limit)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator only")
def test_threads_share_arenas() -> None:
    assert num_arenas(LIMIT) <= 1
    assert num_arenas("") >= 3


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
