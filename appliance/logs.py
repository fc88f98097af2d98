"""Log lines of the appliance's programs; addresses in them, in tracebacks too, are cut to scheme and host."""

import logging

from appliance.progress import SHOWN
from vision.urls import redact


class RedactingFormatter(logging.Formatter):
    """Another formatter whose lines show no more of an address than may be shown."""

    def format(self, record: logging.LogRecord) -> str:
        """The whole record as text, its traceback included."""
        if record.levelno == logging.INFO and record.name in SHOWN:
            return redact(f"appliance: {record.getMessage()}")
        return redact(super().format(record))


def set_up_logging(level: int) -> None:
    """Log lines on standard error, from `level` on, and all of a start's progress.

    Does nothing where logging is set up already.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
    for name in SHOWN:
        logging.getLogger(name).setLevel(min(level, logging.INFO))
