"""Live streams by PyAV: RTSP, HTTP (MJPEG, HLS, anything else), RTMP and webcams.

Every wait has a deadline, damage is counted and passed over, and no message shows more of an address than
scheme, host and port. FFmpeg's own log lines stay off, as PyAV has them, for they show whole addresses.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import av
import av.error
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from vision.errors import SourceUnreadable, SourceUnsupported
from vision.live_clock import FrameGate, LiveClock
from vision.options import StreamConfig
from vision.stream_addresses import StreamAddress
from vision.stream_errors import source_error
from vision.types import Frame
from vision.video_file import upright

MAX_READ_ERRORS = 50
_JPEG_END = b"\xff\xd9"
_PADDING = b"\0\r\n \t-"
_AGAIN_S = 0.01


class LiveStream:
    """A camera that sends; a `FrameSource` that loses what is damaged, late or not asked for.

    Args:
        address: where it is, and how FFmpeg reads it.
        camera: the name that its frames carry.
        config: deadlines and rates.

    Iterating opens the stream and raises, at the end of a stream too:

    Raises:
        SourceAuthFailed: user or password are refused.
        SourceNotFound: the host knows no such stream, or there is no such device.
        SourceUnsupported: what is sent has no video, or one that cannot be decoded.
        SourceUnreadable: not reached, silent, or broken off.
    """

    is_live = True
    is_video = True
    num_frames = None

    def __init__(self, address: StreamAddress, camera: str, config: StreamConfig) -> None:
        self.name = camera
        self.fps: float | None = None
        self.num_damaged = 0
        self.num_late = 0
        self._address = address
        self._config = config
        self._closed = threading.Event()

    @property
    def losses(self) -> Mapping[str, int]:
        """Pictures of the current iteration that were damaged, or late."""
        return {"damaged": self.num_damaged, "late": self.num_late}

    def __iter__(self) -> Iterator[Frame]:
        self.num_damaged = self.num_late = 0
        with self._explained("opening"):
            container = self._open()
        with container, self._explained("reading"):
            stream = self._video_stream(container)
            yield from self._frames(container, stream)
        if not self._closed.is_set():
            raise SourceUnreadable(f"{self._address.shown}: the stream ended")

    def close(self) -> None:
        """End a running iteration at its next packet; one that waits for a packet ends at its deadline."""
        self._closed.set()

    def _open(self) -> InputContainer:
        config, address = self._config, self._address
        return av.open(
            address.file,
            format=address.format,
            options=address.options,
            timeout=(config.open_s, config.silence_s),
            metadata_errors="replace",
        )

    def _video_stream(self, container: InputContainer) -> VideoStream:
        if not container.streams.video:
            raise SourceUnsupported(f"{self._address.shown} sends no video")
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise SourceUnsupported(f"{self._address.shown}: no decoder for its video; use H.264 or H.265")
        # why: one thread a camera; frame threads would also hold back a picture each.
        stream.codec_context.thread_count = 1
        rate = stream.average_rate or stream.guessed_rate
        self.fps = float(rate) if rate else None
        return stream

    def _frames(self, container: InputContainer, stream: VideoStream) -> Iterator[Frame]:
        is_page = container.format.name == "mpjpeg"
        clock = LiveClock(is_paced=self._address.comes_in_bursts and not is_page)
        gate = FrameGate(self._config.max_fps)
        for index, picture in enumerate(self._pictures(container, stream)):
            # why: the parts of an MJPEG page have no times; FFmpeg counts 25 a second.
            stamp_s = None if is_page else picture.time
            moment = clock.place(stamp_s, time.monotonic())
            if moment.is_late:
                self.num_late += 1
            elif gate.passes(moment.time_s):
                if moment.wait_s and self._closed.wait(moment.wait_s):
                    return
                image = upright(picture, stream, self._address.shown)
                yield Frame(self.name, index, moment.time_s, time.time(), image)

    def _pictures(self, container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
        limit_s = self._config.first_frame_s
        waiting_since = time.monotonic()
        for packet in self._packets(container):
            pictures = self._decode(packet) if packet is not None and packet.stream is stream else []
            yield from pictures
            now = time.monotonic()
            if pictures:
                waiting_since, limit_s = now, self._config.silence_s
            elif now - waiting_since > limit_s:
                raise SourceUnreadable(f"{self._address.shown}: no picture for {limit_s:g} s")

    def _packets(self, container: InputContainer) -> Iterator["Packet[Any] | None"]:
        """All packets, of sound too, so that a camera that sends nothing else is noticed; None: not yet."""
        num_errors = 0
        while not self._closed.is_set():
            try:
                for packet in container.demux():
                    if self._closed.is_set():
                        return
                    num_errors = 0
                    yield packet
                return
            except av.error.BlockingIOError:
                self._closed.wait(_AGAIN_S)
                yield None
            except av.error.InvalidDataError:
                self.num_damaged += 1
                num_errors += 1
                if num_errors > MAX_READ_ERRORS:
                    raise SourceUnreadable(f"{self._address.shown}: nothing but damage comes") from None

    def _decode(self, packet: "Packet[VideoStream]") -> list[VideoFrame]:
        # why: an empty packet would tell the decoder that the stream is at its end.
        if not packet.size or (packet.stream.codec_context.name == "mjpeg" and not _is_whole_jpeg(packet)):
            self.num_damaged += packet.pts is not None
            return []
        try:
            pictures = packet.decode()
        except av.error.InvalidDataError:
            # why: the decoder takes up again at the next packet that it understands
            self.num_damaged += 1
            return []
        whole = [picture for picture in pictures if not picture.is_corrupt]
        self.num_damaged += len(pictures) - len(whole)
        return whole

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except av.error.FFmpegError as error:
            # why: `from None`, for the original error's text has the whole address in it.
            limit_s = self._config.open_s if doing == "opening" else self._config.silence_s
            raise source_error(error, self._address, doing, limit_s) from None


def _is_whole_jpeg(packet: "Packet[Any]") -> bool:
    # why: some cameras fill each picture up to a size of their own, with any number of bytes.
    return bytes(memoryview(packet)).rstrip(_PADDING).endswith(_JPEG_END)
