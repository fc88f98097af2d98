"""Camera addresses: taken apart so that no password is lost to FFmpeg, and none is ever shown.

Cameras have passwords with ``@ / ? # :`` in them, and people write them down as they are. What may be shown
of an address is its scheme, host and port: paths and queries hold stream keys and tokens.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import SplitResult, quote, unquote, urlsplit

from vision.errors import SourceUnsupported

STREAM_SCHEMES = ("rtsp", "rtsps", "http", "https", "rtmp", "rtmps")
"""Schemes of live streams that are read over a network."""

_PLAIN_SCHEMES = frozenset({"file", "synthetic", "v4l2"})
_BEGIN = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CUT = re.compile(r"[^\s@/]*(?:/?…)(?=[\s:;,.)'\"\]]|$)")
_ENDS_HOST = re.compile(r"[\s/?#),;.'\"<>\]]|:\s|:?$")
_MAX_KNOWN = 1000
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(:(?P<port>\d{1,5}))?")
_CERTAIN_HOST = re.compile(r"\[.*\]|localhost|[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")


@dataclass(frozen=True, slots=True)
class StreamUrl:
    """An address in parts.

    Attributes:
        scheme: lower case, one of `STREAM_SCHEMES`.
        user: the user's name in clear, None where the address has none.
        password: in clear, None where the address has none.
        host: a name or number, IPv6 in brackets.
        port: None for the scheme's own.
        rest: path and query as given, with the ``/`` before.
    """

    scheme: str
    user: str | None
    password: str | None
    host: str
    port: int | None
    rest: str

    def __repr__(self) -> str:
        return f"StreamUrl({self.shown!r})"

    @property
    def shown(self) -> str:
        """What may be shown of it: ``rtsp://host:port/…``."""
        return f"{self.scheme}://{self._netloc}/…"

    @property
    def full(self) -> str:
        """The address with user and password, percent-encoded as FFmpeg wants them. Secret."""
        if self.user is None:
            return f"{self.scheme}://{self._netloc}{self.rest}"
        secret = "" if self.password is None else f":{quote(self.password, safe='')}"
        return f"{self.scheme}://{quote(self.user, safe='')}{secret}@{self._netloc}{self.rest}"

    @property
    def _netloc(self) -> str:
        return self.host if self.port is None else f"{self.host}:{self.port}"


def is_stream(uri: str) -> bool:
    """Whether `uri` has the scheme of a live stream."""
    scheme, has_scheme, _ = uri.partition("://")
    return bool(has_scheme) and scheme.lower() in STREAM_SCHEMES


def parse_stream_url(uri: str) -> StreamUrl:
    """Take an address apart, one with special characters in its password too.

    Raises:
        SourceUnsupported: another scheme, no host, a bad port, or a password that makes it ambiguous. The
            message shows nothing of user, password and path.
    """
    scheme, _, after = uri.partition("://")
    scheme = scheme.lower()
    if scheme not in STREAM_SCHEMES:
        raise SourceUnsupported(f"{scheme}:// is not the address of a stream; {_names()} are")
    login, place = _split_login(scheme, after)
    found = _HOST.match(place)
    rest = place[found.end() :] if found else ""
    if not found or (rest and rest[0] not in "/?#") or int(found["port"] or 1) not in range(1, 65536):
        raise SourceUnsupported(f"a {scheme}:// address has no usable host and port; write {scheme}://HOST/…")
    user, has_password, password = login.partition(":") if login is not None else (None, "", "")
    return StreamUrl(
        scheme,
        None if user is None else unquote(user),
        unquote(password) if has_password else None,
        found["host"],
        int(found["port"]) if found["port"] else None,
        rest if rest.startswith("/") else f"/{rest}",
    )


def split_uri(uri: str) -> SplitResult:
    """The parts of an address that is no stream's.

    Raises:
        SourceUnsupported: a host in brackets that are not closed, or hold no number; shows the scheme alone.
    """
    try:
        return urlsplit(uri)
    except ValueError as error:
        scheme = uri.partition("://")[0]
        raise SourceUnsupported(f"a {scheme}:// address that cannot be taken apart: {error}") from None


def shown_address(uri: str) -> str:
    """What may be shown of one address, whole as it is known: of a stream's ``scheme://host:port/…``."""
    scheme, has_scheme, _ = uri.partition("://")
    if not has_scheme or scheme.lower() in _PLAIN_SCHEMES:
        return uri
    try:
        return parse_stream_url(uri).shown
    except SourceUnsupported:
        return f"{scheme}://…" if _BEGIN.fullmatch(f"{scheme}://") else "…"


def know_address(uri: str) -> None:
    """Remember an address, so that `redact` finds it in any text whatever its password holds.

    The newest thousand are remembered, by the whole process.
    """
    for form in _written_forms(uri):
        _known[form] = shown_address(uri)
        _known.move_to_end(form)
    while len(_known) > _MAX_KNOWN:
        _known.popitem(last=False)


def redact(text: str) -> str:
    """The text with every address in it cut to ``scheme://host:port/…``; those of files stay.

    Known addresses (`know_address`) are found as they were written, escaped or percent-encoded too. Where an
    unknown one ends is guessed: behind the last ``@`` of its line, and nothing of what may be a login stays.
    """
    if "://" not in text:
        return text
    # why: taken at once, as another thread may come to know addresses, and forget the oldest
    for form, shown in sorted(_known.items(), key=lambda known: -len(known[0])):
        text = text.replace(form, shown)
    pieces, at = [], 0
    while begin := _BEGIN.search(text, at):
        pieces.append(text[at : begin.start()])
        shown, at = _guessed(text, begin)
        pieces.append(shown)
    return "".join(pieces) + text[at:]


# why: whoever in this process prints a text cannot know which addresses are in it.
_known: OrderedDict[str, str] = OrderedDict()


def _written_forms(uri: str) -> Iterator[str]:
    """An address as texts have it; nothing for one that hides nothing, as it may be the begin of others."""
    if len(uri) <= len(shown_address(uri)):
        return
    yield uri
    yield repr(uri)[1:-1]
    yield json.dumps(uri)[1:-1]
    yield json.dumps(uri, ensure_ascii=False)[1:-1]
    if is_stream(uri):
        try:
            yield parse_stream_url(uri).full
        except SourceUnsupported:
            return


def _guessed(text: str, begin: re.Match[str]) -> tuple[str, int]:
    """What may be shown of the address that begins there, and where the text goes on behind it."""
    scheme, start = begin[1], begin.end()
    if scheme.lower() in _PLAIN_SCHEMES:
        return begin[0], start
    if cut := _CUT.match(text, start):
        return begin[0] + cut[0], cut.end()
    # why: an @ may belong to the password or to the path; the host after the last one tells least.
    place = text.rfind("@", start, _login_end(text, start)) + 1 or start
    found = _HOST.match(text, place)
    is_plain = found is not None and _ENDS_HOST.match(text, found.end())
    shown = f"{begin[0]}{found[0]}/…" if found and is_plain else f"{begin[0]}…"
    return shown, _address_end(text, begin.start(), found.end() if found and is_plain else place)


def _login_end(text: str, start: int) -> int:
    """How far the login of an address may go: to the next address or the line's end, if it can end there."""
    host = _HOST.match(text, start)
    is_whole = host is not None and _ENDS_HOST.match(text, host.end())
    line_end = text.find("\n", start) if is_whole else -1
    end = len(text) if line_end < 0 else line_end
    for other in _BEGIN.finditer(text, start, end):
        is_apart = text[other.start() - 1].isspace() or text[other.start() - 1] in "'\"<(["
        if is_apart and (is_whole or "@" in text[start : other.start()]):
            return other.start()
    return end


def _address_end(text: str, begin: int, place: int) -> int:
    """Where an address ends whose host ends at `place`: at a blank, or at the quote that it stands in."""
    quote_mark = text[begin - 1] if begin and text[begin - 1] in "'\"" else ""
    line_end = text.find("\n", place)
    closing = text.find(quote_mark, place, None if line_end < 0 else line_end) if quote_mark else -1
    if closing >= 0:
        return closing
    blank = re.compile(r"\s|$").search(text, place)
    return blank.start() if blank else len(text)


def _split_login(scheme: str, after: str) -> tuple[str | None, str]:
    """`user:password` and what follows; by the standard where that is certain, else by the last `@`."""
    authority = re.split(r"[/?#]", after, maxsplit=1)[0]
    standard, last = authority.rfind("@"), after.rfind("@")
    if last < 0:
        return None, after
    if standard == last or (standard >= 0 and _is_certain(after[standard + 1 :])):
        return after[:standard], after[standard + 1 :]
    if standard < 0 and _HOST.fullmatch(authority):
        # why: `host:554/a@b` has no login, but `user:554/a@host` has one; a host that is none decides.
        return (after[:last], after[last + 1 :]) if not _is_certain(after) else (None, after)
    if _is_certain(after[last + 1 :]) and not re.search(r"\?[^@]*=[^@]*@", after):
        return after[:last], after[last + 1 :]
    raise SourceUnsupported(
        f"the {scheme}:// address can be read in two ways: in user and password write "
        "@ as %40, / as %2F, ? as %3F, # as %23 and : as %3A"
    )


def _is_certain(place: str) -> bool:
    found = _HOST.match(place)
    return bool(found and _CERTAIN_HOST.fullmatch(found["host"]))


def _names() -> str:
    return ", ".join(f"{scheme}://" for scheme in STREAM_SCHEMES)
