"""Passwords and TLS against real servers: they let us in, and no secret is told anywhere (A2)."""

import contextlib
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from queues import (
    JobConsumer,
    JobProducer,
    QueueError,
    QueueUnavailable,
    ResultReader,
    ServerError,
    connect,
    connect_async,
)
from tests.queues.helpers import FAST, make_job
from tests.queues.servers import Server, TlsProxy, started, write_certificates

PASSWORD = "p@ss/word?with#every:thing%"


@pytest.fixture(params=["valkey", "redis"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def round_trip(url: str) -> None:
    """A job through the queue, and plain keys by both kinds of client."""
    name = uuid.uuid4().hex
    with JobProducer(url, FAST) as producer:
        assert producer.put(make_job(name))
    async with JobConsumer(url, FAST) as consumer, ResultReader(url, FAST) as reader:
        (delivery,) = await consumer.take(1, 10_000)
        await consumer.finish(delivery, b"text")
        assert (await reader.read("0-0", 10_000))[-1].job_id == name
    with connect(url, FAST) as client:
        client.set("frame", b"jpeg")
    async with connect_async(url, FAST) as client:
        assert await client.get("frame") == b"jpeg"


async def refusal(url: str) -> str:
    """What all of the clients say, and no one's password."""
    texts = []
    for opening in (JobConsumer(url, FAST), ResultReader(url, FAST)):
        with pytest.raises(QueueError) as caught:
            async with opening:
                pass
        texts.append(repr(caught.value))
    with pytest.raises(QueueError) as caught:
        JobProducer(url, FAST)
    return "\n".join([*texts, repr(caught.value)])


async def test_a_password_with_every_character(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    user = f"user john.doe on >{PASSWORD} allkeys allchannels +@all"
    server = Server(tmp_path, kind, [f'requirepass "{PASSWORD}"'])
    with started(server):
        with server.client(password=PASSWORD) as client:
            client.execute_command("ACL", "SETUSER", *user.split()[1:])
        base = f"127.0.0.1:{server.port}/0"
        await round_trip(f"redis://:{quote(PASSWORD, safe='')}@{base}")
        await round_trip(f"redis://john.doe:{quote(PASSWORD, safe='')}@{base}")
        said = await refusal(f"redis://john.doe:{quote('hush' + PASSWORD, safe='')}@{base}")
        said += await refusal(f"redis://{base}")
    assert f"redis://{base}" in said
    assert not [word for word in (PASSWORD, "hush", "doe", quote(PASSWORD)) if word in said + caplog.text]


@pytest.fixture
def certificates(tmp_path: Path) -> tuple[Path, Path, Path]:
    pytest.importorskip("cryptography")
    return write_certificates(tmp_path)


@pytest.fixture
def tls_port(tmp_path: Path, kind: str, certificates: tuple[Path, Path, Path]) -> Iterator[int]:
    """Where TLS is spoken: by Redis itself, in front of the bundled Valkey, which cannot, by a proxy."""
    ca, certificate, key = certificates
    server = Server(tmp_path, kind, [])
    if kind == "valkey":
        with started(server), contextlib.closing(TlsProxy(server.port, certificate, key)) as proxy:
            yield proxy.port
        return
    lines = [f"tls-port {server.port}", f"tls-cert-file {certificate}", f"tls-key-file {key}"]
    with (server.folder / "server.conf").open("a") as config:
        config.write("\n".join([*lines, f"tls-ca-cert-file {ca}", "tls-auth-clients yes", "port 0", ""]))
    with started(server):
        yield server.port


async def test_tls_by_a_ca_of_our_own(tls_port: int, certificates: tuple[Path, Path, Path]) -> None:
    url = f"rediss://127.0.0.1:{tls_port}/0"
    ca, certificate, key = certificates
    ours = f"ssl_certfile={certificate}&ssl_keyfile={key}"
    await round_trip(f"{url}?ssl_ca_certs={ca}&{ours}")
    assert "certificate verify failed" in await refusal(f"{url}?{ours}")
    assert "cannot be reached" in await refusal(f"rediss://localhost:{tls_port}/0?ssl_ca_certs={ca}&{ours}")
    with pytest.raises(QueueUnavailable):
        JobProducer(f"redis://127.0.0.1:{tls_port}/0", FAST)


def test_a_url_that_is_none() -> None:
    for make in (JobProducer, JobConsumer, ResultReader):
        with pytest.raises(ServerError, match="has to be redis://"):
            make("redis://:hush:hush", FAST)
