"""A detector in a process of its own: ``python -m tests.vlm_engine.detectors ADDRESS KIND`` asks for turns.

``loop`` takes turns for ever and prints a line for each; ``keep`` takes one and never gives it back.
"""

import sys
import time

from vlm_engine.gate_client import GateClient

PIECE_MS = (2.0, 2.0, 2.0)


def main(address: str, kind: str) -> None:
    gate = GateClient(address, "cpu", patience_s=20.0)
    while True:
        left = list(PIECE_MS)
        while left:
            count = gate.acquire(left)
            print(f"turn {count} ungated {gate.num_ungated}", flush=True)
            if kind == "keep":
                time.sleep(1000)
            time.sleep(sum(left[:count]) / 1e3)
            gate.release()
            left = left[count:]


if __name__ == "__main__":
    main(*sys.argv[1:])
