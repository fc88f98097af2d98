"""An RTSP camera on loopback, and what can be wrong with one: H.264 over TCP or UDP, digest login, faults."""

import hashlib
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction

import av
import numpy as np

from tests.ports import free_port

CLOCK = 90_000
MTU = 1200


def encoded(
    size: tuple[int, int] = (160, 96),
    num: int = 10,
    fps: int = 10,
    codec: str = "libx264",
    pictures: Sequence[np.ndarray] | None = None,
    mbit_per_s: float | None = None,
) -> list[bytes]:
    """`pictures` (BGR), by default `num` with a moving block; one packet each, the first a key frame.

    H.264 of `mbit_per_s` is as cameras send it (CABAC, deblocking), without a rate what is encoded soonest.
    """
    pictures = pictures or list(_moving_block(size, num))
    num, (height, width) = len(pictures), pictures[0].shape[:2]
    encoder = av.CodecContext.create(codec, "w")
    encoder.width, encoder.height = width, height
    encoder.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    encoder.time_base = Fraction(1, fps)
    if codec == "libx264":
        encoder.options = {
            "preset": "veryfast" if mbit_per_s else "ultrafast",
            "tune": "zerolatency",
            "x264-params": f"keyint={num}:bframes=0",
        }
        encoder.framerate, encoder.bit_rate = Fraction(fps), round(1e6 * (mbit_per_s or 0))
    packets = []
    for index, image in enumerate(pictures):
        frame = av.VideoFrame.from_ndarray(image, format="bgr24").reformat(format=encoder.pix_fmt)
        frame.pts = index
        packets += encoder.encode(frame)
    return [bytes(packet) for packet in packets + encoder.encode(None)]


def _moving_block(size: tuple[int, int], num: int) -> Iterator[np.ndarray]:
    for index in range(num):
        image = np.full((size[1], size[0], 3), 90, np.uint8)
        image[8:40, 4 + 6 * index : 36 + 6 * index] = (20, 60, 220)
        yield image


@dataclass
class Behaviour:
    """What the camera does; may be changed while it runs, and holds for what comes after.

    `silent_after`: None, or the request ("OPTIONS", "DESCRIBE", …) that gets no answer, or "PLAY:n" for n
    pictures and then nothing. `damage`: share of packets with wrong bytes, `loss`: of those that never come.
    `jump_s` is added to the times.
    """

    video: list[bytes] = field(default_factory=encoded)
    fps: float = 10.0
    login: tuple[str, str] | None = None
    path: str = "/cam"
    silent_after: str | None = None
    damage: float = 0.0
    loss: float = 0.0
    jump_s: float = 0.0


class RtspServer:
    """Serves until closed; `kill()` drops all connections and stops listening, `revive()` listens again."""

    def __init__(self, **behaviour: object) -> None:
        self.behaviour = Behaviour(**behaviour)  # type: ignore[arg-type]
        self.num_connections = 0
        self.transports: list[str] = []
        self._clients: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self.port = free_port()
        self.revive()

    def __enter__(self) -> "RtspServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def url(self, login: str = "", path: str = "/cam") -> str:
        return f"rtsp://{login + '@' if login else ''}127.0.0.1:{self.port}{path}"

    def revive(self) -> None:
        self._listener = listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def kill(self) -> None:
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        for client in list(self._clients):
            _hang_up(client)
        self._clients.clear()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            self.num_connections += 1
            self._clients.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, _Session(self, client) as session:
                session.run()
        except (OSError, EOFError):
            return
        finally:
            with suppress(ValueError):
                self._clients.remove(client)


class Deaf:
    """A port that gives no answer, as a host that is switched off: its line of connections is full."""

    def __init__(self, port: int = 0) -> None:
        self._listener = socket.create_server(("127.0.0.1", port), backlog=0)
        self.port = self._listener.getsockname()[1]
        self._waiting = [socket.socket() for _ in range(3)]
        for one in self._waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", self.port))

    def __enter__(self) -> "Deaf":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for one in (*self._waiting, self._listener):
            one.close()


def _hang_up(client: socket.socket) -> None:
    try:
        client.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


class _Session:
    def __init__(self, server: RtspServer, client: socket.socket) -> None:
        self._server = server
        self._client = client
        self._udp: tuple[socket.socket, tuple[str, int]] | None = None
        self._nonce = "0123456789abcdef"

    def __enter__(self) -> "_Session":
        return self

    def __exit__(self, *_: object) -> None:
        if self._udp:
            self._udp[0].close()

    def run(self) -> None:
        for method, url, headers in self._requests():
            behaviour = self._server.behaviour
            if behaviour.silent_after == method:
                self._client.recv(1)
            elif not self._is_allowed(method, headers):
                challenge = f'Digest realm="cam", nonce="{self._nonce}"'
                self._answer(headers, "401 Unauthorized", {"WWW-Authenticate": challenge})
            elif method == "DESCRIBE" and not url.split("?")[0].endswith(behaviour.path):
                self._answer(headers, "404 Not Found", {})
            elif method == "PLAY":
                self._answer(headers, "200 OK", {"Session": "7"})
                self._play()
                return
            else:
                getattr(self, f"_on_{method.lower()}")(headers)

    def _requests(self) -> Iterator[tuple[str, str, dict[str, str]]]:
        with self._client.makefile("rb") as lines:
            while first := lines.readline():
                method, url, _ = first.decode().split()
                headers = {}
                while (line := lines.readline().decode().strip()) != "":
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                yield method, url, headers | {"_method": method, "_url": url}

    def _is_allowed(self, method: str, headers: dict[str, str]) -> bool:
        login = self._server.behaviour.login
        if login is None or method == "OPTIONS":
            return True
        given = dict(re.findall(r'(\w+)="([^"]*)"', headers.get("authorization", "")))
        user, password = login
        realm = _md5(f"{user}:cam:{password}")
        wanted = _md5(f"{realm}:{self._nonce}:{_md5(method + ':' + given.get('uri', ''))}")
        return (given.get("username"), given.get("response")) == (user, wanted)

    def _answer(self, headers: dict[str, str], status: str, more: dict[str, str], body: str = "") -> None:
        head = {"CSeq": headers["cseq"], **more, "Content-Length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        self._client.sendall(f"RTSP/1.0 {status}\r\n{lines}\r\n{body}".encode())

    def _on_options(self, headers: dict[str, str]) -> None:
        self._answer(headers, "200 OK", {"Public": "OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN"})

    def _on_describe(self, headers: dict[str, str]) -> None:
        sdp = (
            "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=cam\r\nc=IN IP4 127.0.0.1\r\nt=0 0\r\n"
            "m=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\na=fmtp:96 packetization-mode=1\r\n"
            "a=control:trackID=0\r\n"
        )
        self._answer(headers, "200 OK", {"Content-Type": "application/sdp"}, sdp)

    def _on_setup(self, headers: dict[str, str]) -> None:
        asked = headers["transport"]
        self._server.transports.append("tcp" if "TCP" in asked else "udp")
        if ports := re.search(r"client_port=(\d+)-", asked):
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            udp.bind(("127.0.0.1", 0))
            port = udp.getsockname()[1]
            self._udp = udp, ("127.0.0.1", int(ports[1]))
            asked = f"{asked};server_port={port}-{port + 1}"
        self._answer(headers, "200 OK", {"Session": "7;timeout=60", "Transport": asked})

    def _on_teardown(self, headers: dict[str, str]) -> None:
        self._answer(headers, "200 OK", {})
        raise EOFError

    def _play(self) -> None:
        start, index, sequence = time.monotonic(), 0, 0
        chance = random.Random(7)
        while True:
            behaviour = self._server.behaviour
            if behaviour.silent_after == f"PLAY:{index}":
                self._client.setblocking(True)
                while self._client.recv(65536):
                    pass
                raise EOFError
            stamp = round((index / behaviour.fps + behaviour.jump_s) * CLOCK)
            picture = behaviour.video[index % len(behaviour.video)]
            for payload, is_last in _payloads(picture):
                damaged = payload
                if chance.random() < behaviour.damage:
                    damaged = payload[:2] + bytes(b ^ 0x5A for b in payload[2:])
                header = struct.pack(
                    "!BBHII", 0x80, 96 | is_last << 7, sequence & 0xFFFF, stamp & 0xFFFFFFFF, 1
                )
                if chance.random() >= behaviour.loss:
                    self._send(header + damaged)
                sequence += 1
            index += 1
            time.sleep(max(0.0, start + index / behaviour.fps - time.monotonic()))

    def _send(self, packet: bytes) -> None:
        if self._udp:
            # why: a client that is gone is seen on its control connection only.
            self._client.setblocking(False)
            try:
                if self._client.recv(4096) == b"":
                    raise EOFError
            except BlockingIOError:
                pass
            sender, address = self._udp
            sender.sendto(packet, address)
        else:
            self._client.sendall(struct.pack("!BBH", 0x24, 0, len(packet)) + packet)


def _payloads(picture: bytes) -> Iterator[tuple[bytes, bool]]:
    """RTP payloads of one H.264 picture (RFC 6184: single units and FU-A), and whether each is the last."""
    units = [unit for unit in re.split(rb"\x00\x00\x00?\x01", picture) if unit]
    for number, unit in enumerate(units):
        is_last = number == len(units) - 1
        if len(unit) <= MTU:
            yield unit, is_last
            continue
        pieces = [unit[at : at + MTU] for at in range(1, len(unit), MTU)]
        for place, piece in enumerate(pieces):
            flags = (place == 0) << 7 | (place == len(pieces) - 1) << 6 | unit[0] & 0x1F
            yield bytes([unit[0] & 0xE0 | 28, flags]) + piece, is_last and place == len(pieces) - 1


def _md5(text: str) -> str:
    return hashlib.md5(text.encode()).hexdigest()
