"""ultralytics as a library: no downloads, nothing on standard output, no code out of weight files."""

import logging
import os
from functools import cache
from typing import Any

_ENVIRONMENT = {"YOLO_OFFLINE": "true", "YOLO_AUTOINSTALL": "false", "YOLO_VERBOSE": "false"}


def _give_pillow_back() -> None:
    """Undo ultralytics' replacement of ``PIL.Image.open``.

    why: bytes that are no picture make it install a package from the internet, for the whole process.
    """
    from PIL import Image
    from ultralytics.utils import patches

    Image.open = getattr(patches, "_image_open", Image.open)


@cache
def import_ultralytics() -> Any:
    """Import ultralytics late (it brings torch, seconds) and return the module.

    Environment variables that are set already win, but nothing is ever installed. Its log goes to the
    ``ultralytics`` logger without a handler of its own, and ``.pt`` files are read with ``weights_only``
    against its list of known classes.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ultralytics
    from ultralytics.nn import tasks
    from ultralytics.utils import checks

    # why: a model must not change what is installed, whatever the environment allows to others
    checks.AUTOINSTALL = False
    # why: the switch in the environment is read at import, which may have happened before
    tasks.SAFE_LOAD = True
    _give_pillow_back()
    log = logging.getLogger("ultralytics")
    # why: its handler writes to standard output, where `replay` writes its results
    for handler in list(log.handlers):
        log.removeHandler(handler)
    log.propagate = True
    log.setLevel(logging.WARNING)
    return ultralytics
