"""What FFmpeg is told for each kind of live stream."""

import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from vision.errors import SourceNotFound, SourceUnsupported
from vision.options import StreamConfig
from vision.urls import StreamUrl, is_stream, parse_stream_url, split_uri

_WEBCAM_OPTIONS = {"input_format": "input_format", "size": "video_size", "fps": "framerate"}
_NETWORK = "tcp,udp,rtp,tls,crypto,data"
# why: FFmpeg watches a stream for seconds to guess its rate, and nobody sees the pictures meanwhile.
_QUICK_START = {"fpsprobesize": "0", "analyzeduration": "2000000"}


@dataclass(frozen=True, slots=True)
class StreamAddress:
    """One live stream as FFmpeg opens it.

    Attributes:
        file: address or device. Secret.
        shown: what may be shown of it.
        format: FFmpeg's name of the format, None to find out.
        options: for FFmpeg.
        comes_in_bursts: pictures may come faster than their time, as segments of HLS do.
    """

    file: str = field(repr=False)
    shown: str
    format: str | None
    options: dict[str, str]
    comes_in_bursts: bool = False


def stream_address(uri: str, config: StreamConfig) -> StreamAddress | None:
    """Return how the live stream `uri` is opened; None when it is none.

    Known are ``rtsp(s)://``, ``http(s)://``, ``rtmp(s)://`` and webcams: ``/dev/video0`` or
    ``v4l2:///dev/video0?input_format=mjpeg&size=1280x720&fps=15``.

    Raises:
        SourceNotFound: no such device.
        SourceUnsupported: an address that cannot be used, or a device that is no camera.
    """
    if uri.startswith(("v4l2://", "/dev/video")):
        return _webcam(uri)
    if not is_stream(uri):
        return None
    url = parse_stream_url(uri)
    return _BUILDERS[url.scheme.rstrip("s")](url, config)


def _rtsp(url: StreamUrl, config: StreamConfig) -> StreamAddress:
    options = _QUICK_START | {
        "rtsp_transport": config.transport,
        # why: sound would only cost bandwidth.
        "allowed_media_types": "video",
        "timeout": _microseconds(max(config.open_s, config.silence_s)),
        "protocol_whitelist": f"rtsp,{_NETWORK}",
    }
    return StreamAddress(url.full, url.shown, "rtsp", options)


def _http(url: StreamUrl, config: StreamConfig) -> StreamAddress:
    options = _QUICK_START | {
        "rw_timeout": _microseconds(max(config.open_s, config.silence_s)),
        # why: a playlist must not lead to files of this machine.
        "protocol_whitelist": f"http,https,httpproxy,{_NETWORK}",
    }
    return StreamAddress(url.full, url.shown, None, options, comes_in_bursts=True)


def _rtmp(url: StreamUrl, config: StreamConfig) -> StreamAddress:
    options = _QUICK_START | {
        "rtmp_live": "live",
        "rw_timeout": _microseconds(max(config.open_s, config.silence_s)),
        "protocol_whitelist": f"rtmp,rtmps,{_NETWORK}",
    }
    return StreamAddress(url.full, url.shown, "flv", options)


def _webcam(uri: str) -> StreamAddress:
    parts = split_uri(uri)
    device = Path(unquote(parts.path))
    chosen = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(chosen) - set(_WEBCAM_OPTIONS)):
        raise SourceUnsupported(
            f"{device}: unknown option {unknown[0]!r}; known are {', '.join(_WEBCAM_OPTIONS)}"
        )
    if not device.exists():
        raise SourceNotFound(f"there is no device {device}: is the camera plugged in?")
    if not stat.S_ISCHR(device.stat().st_mode):
        raise SourceUnsupported(f"{device} is no camera; give a device such as /dev/video0")
    # why: without it a camera that hangs holds its thread for ever, out of reach of every deadline.
    options = {"fflags": "nonblock"} | {_WEBCAM_OPTIONS[key]: value for key, value in chosen.items()}
    return StreamAddress(str(device), str(device), "v4l2", options)


def _microseconds(seconds: float) -> str:
    return str(round(seconds * 1e6))


_BUILDERS: dict[str, Callable[[StreamUrl, StreamConfig], StreamAddress]] = {
    "rtsp": _rtsp,
    "http": _http,
    "rtmp": _rtmp,
}
