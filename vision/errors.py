"""The errors of `vision`, one tree.

::

    VisionError
    ├── SourceError             a recording, folder or camera
    │   ├── SourceNotFound      nothing there
    │   ├── SourceAuthFailed    a camera that refuses the user or the password
    │   ├── SourceUnreadable    there, but damaged, empty, silent or not permitted
    │   └── SourceUnsupported   a kind of source, or an option of one, that is not known
    ├── DetectorError           a detection model
    │   ├── ModelNotFound       no file there (nothing is ever downloaded)
    │   ├── ModelUnsupported    a file that is no detection model, or whose runtime is not installed
    │   ├── ModelBroken         loads, but failed its self-test
    │   └── UnknownClass        a class name that the model does not have
    └── FrameRejected           an array that is no picture

Every message names the file, model or value and says what to do about it.
"""

from collections.abc import Iterable

from vision.readable import readable


class VisionError(Exception):
    """Any error of this package that a caller may want to catch.

    Its text can be written as UTF-8 whatever names of files are in it (see `vision.readable`).
    """

    def __init__(self, text: str = "") -> None:
        super().__init__(readable(text))


class SourceError(VisionError):
    """A source of frames cannot be used."""


class SourceNotFound(SourceError):
    """There is no file or folder at the given place, or a folder holds no pictures."""


class SourceAuthFailed(SourceError):
    """The camera refuses the user or the password, or gives none of its pictures without them."""


class SourceUnreadable(SourceError):
    """The source exists but no frame can be read from it."""


class SourceUnsupported(SourceError):
    """The scheme, option or content of the source is not one that is known."""


class DetectorError(VisionError):
    """A detection model cannot be used."""


class ModelNotFound(DetectorError):
    """There is no model at the given path."""


class ModelUnsupported(DetectorError):
    """The file is not a detection model, or its runtime is missing."""


class ModelBroken(DetectorError):
    """The model loads but what it computes is unusable (NaN, or objects in an empty picture)."""


class UnknownClass(DetectorError):
    """A class name was asked for that the model does not know.

    Attributes:
        unknown: the names that were asked for in vain.
        known: all names of the model.
    """

    def __init__(self, unknown: Iterable[str], known: Iterable[str], where: str) -> None:
        self.unknown = tuple(unknown)
        self.known = tuple(known)
        names = ", ".join(repr(name) for name in self.unknown)
        super().__init__(f"{where} has no class {names}. It knows: {', '.join(self.known)}.")


class FrameRejected(VisionError):
    """An array is not a picture: wrong rank, number of channels, or no pixels."""
