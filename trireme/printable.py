"""Text of others as a terminal, a log or a page may show it: control characters are escaped.

The name in a stranger's handshake, and every string in a run directory, may hold escape sequences
that a terminal obeys, line ends that forge lines of a log, or marks that reverse what is read.
"""

from __future__ import annotations

import re

_CONTROL = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f"  # C0 without the tab, DEL, C1
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # line separators, marks of direction
    "\ud800-\udfff]"  # surrogates, which no stream can write
)


def printable(text: str, keep: str = "") -> str:
    r"""Returns a text with its control characters escaped, such as `\x1b` for ESC."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def counted(number: int, noun: str) -> str:
    """Returns a number of things in words, such as `1 server` or `2 servers`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def size(nbytes: float) -> str:
    """Returns a number of bytes with its unit, such as `1.5 MiB`."""
    from rich.filesize import pick_unit_and_suffix

    unit, name = pick_unit_and_suffix(int(nbytes), ["B", "KiB", "MiB", "GiB"], 1024)
    return f"{nbytes / unit:.{0 if unit == 1 else 1}f} {name}"


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
