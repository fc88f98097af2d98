"""The server that carries the app."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import FastAPI

from appliance.api.connections import Patience, PatientProtocol, allow_files
from appliance.settings import ServerSettings

_SHUTDOWN_TIMEOUT_S = 5


class ApiServer(uvicorn.Server):
    """Uvicorn for an app of `create_app`; `await server.serve()` runs until `should_exit` is set.

    Peers that are too slow are left (`patience`). At shutdown event streams end at once, chats get five
    seconds. Signals are the business of the program around it.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings, patience: Patience | None = None) -> None:
        patience = patience or Patience()
        patience = replace(patience, max_connections=min(patience.max_connections, allow_files()))
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=cast("Any", partial(PatientProtocol, patience=patience)),
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=cast("Any", patience.idle_s),
                timeout_graceful_shutdown=_SHUTDOWN_TIMEOUT_S,
            )
        )
        self._app = app

    @property
    def url(self) -> str:
        """Where the server listens, once `started`; with port 0 it is known only then."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Called by `serve`; leaves the program's handlers where they are."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by `serve` at its end."""
        self._app.state.services.stop()
        await super().shutdown(sockets)
