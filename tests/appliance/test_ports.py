"""The listening socket: taken early, refused clearly, and quick with small pieces."""

import asyncio
import socket

import pytest

from appliance.ports import listen
from appliance.settings import ServerSettings, SettingsError


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_tokens_do_not_wait_for_acknowledgements(host):
    """Nagle's algorithm is off on every accepted connection: it held the first tokens back for 40 ms."""
    accepted: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer.get_extra_info("socket"))
        await reader.read()
        writer.close()

    with listen(ServerSettings(host=host, port=0)) as listener:
        server = await asyncio.start_server(answer, sock=listener)
        _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
        option = (await accepted).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()

    assert option == 1


def test_a_port_in_use_and_a_host_that_is_not_ours():
    with listen(ServerSettings(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"127\.0\.0\.1:{port}: Address already in use"):
            listen(ServerSettings(port=port))
    with pytest.raises(SettingsError, match=r"cannot listen on 192\.0\.2\.1:0"):
        listen(ServerSettings(host="192.0.2.1", port=0))
