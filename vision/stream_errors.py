"""What FFmpeg's errors mean for a live stream; its own texts hold the whole address and are not used."""

import errno

import av.error

from vision.errors import (
    SourceAuthFailed,
    SourceError,
    SourceNotFound,
    SourceUnreadable,
    SourceUnsupported,
)
from vision.stream_addresses import StreamAddress

_REFUSED = (av.error.HTTPUnauthorizedError, av.error.HTTPForbiddenError, av.error.PermissionError)
_MISSING = (av.error.HTTPNotFoundError, av.error.FileNotFoundError)
_TOO_LATE = (av.error.ExitError, av.error.TimeoutError)
_UNKNOWN = (
    av.error.LookupError,
    av.error.InvalidDataError,
    av.error.PatchWelcomeError,
    av.error.ArgumentError,
)


def source_error(
    error: av.error.FFmpegError, address: StreamAddress, doing: str, limit_s: float
) -> SourceError:
    """Return what went wrong while `doing` ("opening" or "reading"), with `limit_s` seconds to do it."""
    cases: list[tuple[type[Exception] | tuple[type[Exception], ...], type[SourceError], str]] = [
        (_REFUSED, SourceAuthFailed, "refuses access: check user and password"),
        (_MISSING, SourceNotFound, "has no such stream: check the path"),
        (_TOO_LATE, SourceUnreadable, f"gave no answer for {limit_s:g} s while {doing}"),
    ]
    if address.format == "rtsp":
        # why: FFmpeg calls it invalid data when a host gives no answer to RTSP.
        cases += [(av.error.InvalidDataError, SourceUnreadable, f"gave no proper answer while {doing}")]
    if doing == "opening":
        cases += [(_UNKNOWN, SourceUnsupported, f"sends no video that is understood: {error.strerror}")]
    if error.errno == errno.EIO:
        cases += [(Exception, SourceUnreadable, "is not reached: check host and network")]
    for classes, kind, text in cases:
        if isinstance(error, classes):
            return kind(f"{address.shown} {text}")
    return SourceUnreadable(f"{address.shown} failed while {doing}: {error.strerror}")
