"""What cameras show on the board: their newest frames for who is looking, else one now and then."""

import time
from collections.abc import Callable

from appliance.board import BoardWriter
from vision.annotate import encode_jpeg
from vision.pixels import shrink
from vision.types import Frame

# why: a JPEG costs as much as decoding the frame did. Who begins to look gets the newest frame at once.
FRAME_EVERY_S = 10.0
WATCHED_FRAME_EVERY_S = 0.2
FRAME_SIDE = 1280
FRAME_QUALITY = 85


class Showing:
    """Holds each camera's newest frame until it is shown; `watched` are the cameras that are looked at."""

    def __init__(self, board: BoardWriter, clock: Callable[[], float] = time.monotonic) -> None:
        self._board = board
        self._clock = clock
        self._newest: dict[str, Frame] = {}
        self._shown_at: dict[str, float] = {}
        self.watched: frozenset[str] = frozenset()

    def see(self, frame: Frame) -> None:
        """Take a camera's newest frame."""
        self._newest[frame.camera] = frame
        self.show(frame.camera)

    def show(self, camera: str) -> None:
        """Show the camera's newest frame, if it is not shown and its time has come."""
        now_s = self._clock()
        every_s = WATCHED_FRAME_EVERY_S if camera in self.watched else FRAME_EVERY_S
        if camera in self._newest and now_s - self._shown_at.get(camera, float("-inf")) >= every_s:
            self._shown_at[camera] = now_s
            image = shrink(self._newest.pop(camera).image, FRAME_SIDE)
            self._board.write_frame(camera, encode_jpeg(image, FRAME_QUALITY))

    def forget(self, camera: str) -> None:
        """Show no frame of the camera until its next one."""
        self._newest.pop(camera, None)
        self._shown_at.pop(camera, None)
        self._board.forget_frame(camera)
