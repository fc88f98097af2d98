import socketserver
import threading
from collections.abc import Iterator

import pytest

from queues import EmbeddedServer, JobConsumer, JobProducer, ServerError, ServerTooOld
from queues.connection import check_server
from tests.queues.helpers import FAST, raw_client


class OldServer(socketserver.StreamRequestHandler):
    """Speaks just enough of the protocol to say that it is Redis 6.2."""

    info = b"# Server\r\nredis_version:6.2.14\r\nmaxmemory_policy:noeviction\r\n"

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(size + 2)[:-2].upper())
            answer = b"+OK\r\n"
            if words[0] == b"INFO":
                answer = b"$%d\r\n%s\r\n" % (len(self.info), self.info)
            self.wfile.write(answer)


@pytest.fixture
def old_server() -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), OldServer) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"redis://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


async def test_an_old_server_is_refused_by_its_version(old_server: str) -> None:
    """Q9: at the start, in words that name what is there and what is needed."""
    with pytest.raises(ServerTooOld, match=r"is Redis 6\.2\.14; the queue needs Redis 7\.0"):
        JobProducer(old_server, FAST)
    with pytest.raises(ServerTooOld, match=r"6\.2\.14"):
        async with JobConsumer(old_server, FAST):
            pass


@pytest.mark.parametrize("info", [{}, {"redis_version": "unknown"}, {"redis_version": "5.0.7"}])
def test_versions_that_are_refused(info: dict[str, str]) -> None:
    """Q9"""
    with pytest.raises(ServerTooOld):
        check_server(info, "redis://host")


@pytest.mark.parametrize(
    "info", [{"redis_version": "7.0.15"}, {"redis_version": "8.2.1"}, {"redis_version": "10.0"}]
)
def test_versions_that_will_do(info: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    """Q9"""
    check_server(info, "redis://host")
    check_server({"valkey_version": "9.1.2", "redis_version": "7.2.4"}, "redis://host")
    assert not caplog.records


def test_a_policy_that_evicts_jobs_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    check_server({"redis_version": "7.4.0", "maxmemory_policy": "allkeys-lru"}, "redis://host")
    assert "allkeys-lru" in caplog.text


def test_a_wrong_password_is_not_an_outage(server: EmbeddedServer) -> None:
    with raw_client(server) as client:
        client.config_set("requirepass", "right")
    with pytest.raises(ServerError, match="refuses the user name or password") as caught:
        JobProducer(f"{server.url}?password=wrong", FAST)
    assert "?" not in str(caught.value)
