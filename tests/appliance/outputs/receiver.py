"""A receiver of webhooks on loopback, whose answers a test decides."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from tests.appliance.running import until


@dataclass
class Post:
    path: str
    headers: Mapping[str, str]
    body: bytes
    at: float

    @property
    def data(self) -> dict[str, Any]:
        """The event that was told."""
        return dict(msgspec.json.decode(self.body)["data"])


@dataclass
class Receiver:
    """`answer` gives the status and the headers for a post; `posts` are all that came."""

    url: str = ""
    posts: list[Post] = field(default_factory=list)
    answer: Callable[[Post], tuple[int, dict[str, str]]] = lambda post: (200, {})

    @property
    def ids(self) -> list[str]:
        return [post.data["id"] for post in self.posts]

    def wait_for(self, number: int) -> list[Post]:
        """The posts, once there are so many."""
        until(lambda: len(self.posts) >= number)
        return self.posts


@contextmanager
def receiving(port: int = 0) -> Iterator[Receiver]:
    """A receiver that answers 200 until told otherwise."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            post = Post(self.path, {k.lower(): v for k, v in self.headers.items()}, body, time.time())
            receiver.posts.append(post)
            status, headers = receiver.answer(post)
            self.send_response(status)
            for name, value in ({"Content-Length": "0"} | headers).items():
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            self.do_POST()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        server.daemon_threads = True
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
