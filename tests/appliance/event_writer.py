"""A process that writes events until it is killed, and says which ones the store has taken."""

from multiprocessing.connection import Connection
from pathlib import Path

from appliance.events import EventStore, Retention
from tests.appliance.descriptions import description

JPEG = b"\xff\xd8" + b"x" * 5_000


def write(path: Path, number: int, told: Connection) -> None:
    """Add the events `number`, `number + 1`, …, each after three that are there already.

    Every fifth is an error first and a description later. `told` gets the number once it was added.
    """
    store = EventStore(path, Retention(max_events=1_000_000))
    store.outbox.connect({"all": lambda kind, body: True, "errors": lambda kind, body: kind == "failed"})
    while True:
        for again in range(max(0, number - 3), number):
            store.add(description(f"{again}", text=f"Event {again}."), b"twice")
        if number % 5 == 0:
            store.add(description(f"{number}", text=None, error="the engine failed"))
        store.add(description(f"{number}", text=f"Event {number}."), JPEG)
        told.send_bytes(b"%d" % number)
        number += 1
