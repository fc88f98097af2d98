"""The server of the API's tests, measured."""

from tests.appliance.api.conftest import server, servers

__all__ = ["server", "servers"]
