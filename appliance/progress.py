"""What a start is doing: a line for each step, for whoever waits for it."""

import logging
import time

logger = logging.getLogger(__name__)

SHOWN = (__name__, "appliance.reloading", "vision.detector", "vision.exports", "vlm_engine.client")
"""Loggers whose news, of a start above all, are shown where other news are not."""


class Stopwatch:
    """Tells steps with the seconds that went by since it was made."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    @property
    def elapsed(self) -> str:
        """As people read it."""
        return f"{time.monotonic() - self._started_s:.1f} s"

    def tell(self, what: str) -> None:
        """Something is done: how long it took."""
        logger.info("%s after %s", what, self.elapsed)


def tell(what: str) -> None:
    """Something begins."""
    logger.info("%s …", what)
