"""Names of files that are no UTF-8, in texts that have to be: a file's name may be any bytes."""

import re

_HALF = re.compile("[\ud800-\udfff]")
_BYTES = range(0xDC80, 0xDD00)


def readable(text: str) -> str:
    """`text` with each byte that is no UTF-8 (`os.fsdecode` keeps it as half a character) as ``\\xe9``."""
    return _HALF.sub(lambda half: _escaped(ord(half[0])), text)


def _escaped(code: int) -> str:
    return f"\\x{code - 0xDC00:02x}" if code in _BYTES else f"\\u{code:04x}"
