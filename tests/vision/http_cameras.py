"""Cameras over HTTP on loopback: an MJPEG page with damaged parts, HLS that grows, logins."""

import base64
import io
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import av

from tests.vision.rtsp_server import encoded

BOUNDARY = "frame"


class HttpCameras:
    """Serves `/mjpeg`, `/live.m3u8` with its segments, and `/page` which is no video.

    `parts` are the JPEGs of the MJPEG page, sent in turn at `fps`; `login` is wanted by Basic
    authentication.
    """

    def __init__(self, parts: list[bytes] | None = None, login: str | None = None, fps: float = 20.0) -> None:
        self.parts = encoded(codec="mjpeg") if parts is None else parts
        self.login = login
        self.fps = fps
        self.playlist: str | None = None
        self.started_at = time.monotonic()
        self.segments = [_segment(number) for number in range(3)]
        cameras = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                try:
                    cameras.answer(self)
                except OSError:
                    self.close_connection = True

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def __enter__(self) -> "HttpCameras":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def url(self, path: str, login: str = "") -> str:
        return f"http://{login + '@' if login else ''}127.0.0.1:{self._server.server_port}{path}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.split("?")[0]
        if self.login and request.headers.get("Authorization") != _basic(self.login):
            request.send_response(401)
            request.send_header("WWW-Authenticate", 'Basic realm="cam"')
            request.end_headers()
        elif path == "/mjpeg":
            self._send_page(request)
        elif path == "/live.m3u8":
            self._send(request, (self.playlist or self._playlist()).encode(), "application/vnd.apple.mpegurl")
        elif path.startswith("/segment"):
            number = int(path.removeprefix("/segment").removesuffix(".ts"))
            self._send(request, self.segments[number % len(self.segments)], "video/mp2t")
        elif path == "/page":
            self._send(request, b"<html>log in</html>" * 100, "text/html")
        else:
            request.send_error(404)

    def _send(self, request: BaseHTTPRequestHandler, body: bytes, kind: str) -> None:
        request.send_response(200)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    def _send_page(self, request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Type", f"multipart/x-mixed-replace; boundary={BOUNDARY}")
        request.end_headers()
        index = 0
        while True:
            part = self.parts[index % len(self.parts)]
            head = f"--{BOUNDARY}\r\nContent-Type: image/jpeg\r\nContent-Length: {len(part)}\r\n\r\n"
            request.wfile.write(head.encode() + part + b"\r\n")
            index += 1
            time.sleep(1 / self.fps)

    def _playlist(self) -> str:
        newest = int(time.monotonic() - self.started_at) + 2
        lines = ["#EXTM3U", "#EXT-X-VERSION:3", "#EXT-X-TARGETDURATION:1"]
        lines.append(f"#EXT-X-MEDIA-SEQUENCE:{max(0, newest - 2)}")
        for number in range(max(0, newest - 2), newest + 1):
            lines += ["#EXT-X-DISCONTINUITY", "#EXTINF:1.0,", f"segment{number}.ts"]
        return "\n".join([*lines, ""])


def _basic(login: str) -> str:
    return f"Basic {base64.b64encode(login.encode()).decode()}"


def _segment(number: int, fps: int = 10) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mpegts") as container:
        stream = container.add_stream(
            "libx264", rate=fps, options={"preset": "ultrafast", "tune": "zerolatency"}
        )
        stream.width, stream.height, stream.pix_fmt = 160, 96, "yuv420p"
        for index in range(fps):
            frame = av.VideoFrame(160, 96, "yuv420p")
            for plane in frame.planes:
                plane.update(bytes([60 + 40 * number]) * plane.buffer_size)
            frame.pts = number * fps + index
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return buffer.getvalue()
