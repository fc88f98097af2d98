"""Log lines of the appliance's programs; addresses in them, in tracebacks too, are cut to scheme and host."""

import logging
import time
from collections.abc import Callable

from appliance.progress import SHOWN
from vision.urls import redact


class RedactingFormatter(logging.Formatter):
    """Another formatter whose lines show no more of an address than may be shown."""

    def format(self, record: logging.LogRecord) -> str:
        """The whole record as text, its traceback included."""
        if record.levelno == logging.INFO and record.name in SHOWN:
            return redact(f"appliance: {record.getMessage()}")
        return redact(super().format(record))


class Complaints:
    """Log lines of what goes on for long: the same one only every so often.

    Args:
        logger: Where they go.
        every_s: Seconds between two about the same thing.
        clock: Seconds, rising.
        level: Of all of them.
    """

    def __init__(
        self,
        logger: logging.Logger,
        every_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        level: int = logging.WARNING,
    ) -> None:
        self._logger, self._every_s, self._clock, self._level = logger, every_s, clock, level
        self._due_s: dict[str, float] = {}

    def tell(self, about: str, text: str, *arguments: object) -> None:
        """Log it, unless something was lately `about` the same."""
        now_s = self._clock()
        if now_s >= self._due_s.get(about, now_s):
            self._due_s[about] = now_s + self._every_s
            self._logger.log(self._level, text, *arguments)


def set_up_logging(level: int) -> None:
    """Log lines on standard error, from `level` on, and all of a start's progress.

    Does nothing where logging is set up already.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    for name in SHOWN:
        logging.getLogger(name).setLevel(min(level, logging.INFO))
