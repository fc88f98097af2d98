"""Ports for servers that tests start, kill and start again at the same place."""

import secrets
import socket
from contextlib import suppress
from pathlib import Path

_GIVEN_BY_THE_KERNEL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port on loopback that is free, and stays so: it is none of those that the kernel gives to others.

    why: such a port may be another's by the time that it is listened on, and who connects to it again and
    again, while nobody listens, at last gets it for an end of its own and speaks to itself.
    """
    is_told = _GIVEN_BY_THE_KERNEL.exists()
    first = int(_GIVEN_BY_THE_KERNEL.read_text().split()[0]) if is_told else 32_768
    while True:
        port = secrets.choice(range(10_000, first)) if first > 12_000 else 0
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
