"""The address that the server listens on, taken before anything slow begins."""

import socket

from appliance.settings import ServerSettings, SettingsError


def listen(server: ServerSettings) -> socket.socket:
    """A listening socket, so that a port in use is known before a model is loaded; raises `SettingsError`."""
    host = server.host.strip("[]")
    # why: asyncio turns Nagle's algorithm off only where the protocol is named, else tokens wait for ACKs.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, server.port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"cannot listen on {server.host}:{server.port}: {error.strerror}: choose another --port or --host"
        ) from None
    return listener
