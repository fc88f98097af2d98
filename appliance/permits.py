"""What cameras allow of their pictures, as the queue knows it; jobs that are allowed no more are dropped."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256

from appliance.camera_settings import CameraSettings
from appliance.viewing import privacy_masks
from queues.errors import QueueError
from queues.producer import JobProducer

logger = logging.getLogger(__name__)

PAUSED = "paused"
REMOVED = "removed"
TELL_AGAIN_S = 2.0

Cameras = Mapping[str, CameraSettings]


def permit_of(camera: CameraSettings | None) -> str:
    """The permit of a camera's jobs: another one where other parts are masked, or it is paused or gone."""
    if camera is None:
        return REMOVED
    if not camera.enabled:
        return PAUSED
    masks = privacy_masks(camera)
    return sha256(repr((masks, camera.rotate)).encode()).hexdigest()[:16] if masks else ""


def changed_permits(old: Cameras, new: Cameras) -> Iterator[tuple[str, str]]:
    """The names and permits of cameras that have another one in `new` than in `old`."""
    for name in dict.fromkeys([*old, *new]):
        permit = permit_of(new.get(name))
        if name not in old or permit != permit_of(old[name]):
            yield name, permit


class Permits:
    """Tells the queue of permits; what it could not be told is told later.

    What hides something is told again and again: a server that came back empty has forgotten it, and what
    was taken before is still in somebody's hand.
    """

    def __init__(
        self, producer: JobProducer, cameras: Cameras, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._producer = producer
        self._clock = clock
        self._again_at = clock() + TELL_AGAIN_S
        self._due = {name: permit_of(camera) for name, camera in cameras.items()}
        self._hiding = _hiding(cameras)

    def change(self, old: Cameras, new: Cameras) -> None:
        """The cameras are others now."""
        self._due |= dict(changed_permits(old, new))
        self._hiding = _hiding(new)
        self.tell()

    def tell(self) -> None:
        """Tell what is due; never raises for an outage."""
        while self._due:
            name, permit = next(iter(self._due.items()))
            if not self._is_told(name, permit):
                return
            del self._due[name]
        if self._clock() >= self._again_at:
            self._again_at = self._clock() + TELL_AGAIN_S
            for name, permit in self._hiding.items():
                if not self._is_told(name, permit, is_again=True):
                    return

    def _is_told(self, name: str, permit: str, *, is_again: bool = False) -> bool:
        try:
            self._producer.permit(name, permit, is_again=is_again)
        except QueueError as error:
            logger.debug("camera=%s its permit was not told: %s", name, error)
            return False
        return True


def _hiding(cameras: Cameras) -> dict[str, str]:
    return {name: permit for name, camera in cameras.items() if (permit := permit_of(camera))}
