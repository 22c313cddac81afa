"""Lists of hosts in Slurm's notation, such as `node[01-03,7],login`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from trireme.errors import ConfigurationError

__all__ = ["expand"]

MOST = 100_000
"""The most hosts of a list. A longer list is a mistake, and would only take memory."""

_ENTRY = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PIECE = re.compile(r"([^\[\]]*)(?:\[([^\[\]]*)\])?")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(text: str) -> list[str]:
    """Returns the hosts that a list names, in its order; `01` keeps its zero.

    Raises:
        ConfigurationError: the text is not such a list.
    """
    hosts: list[str] = []
    position = 0
    while position < len(text) or not hosts:
        entry = _ENTRY.match(text, position)
        if entry is None:
            raise _no_list(text)
        for host in _hosts(text, entry[0]):
            hosts.append(host)
            if len(hosts) > MOST:
                raise _no_list(text)
        position = entry.end()
        if position < len(text):
            if text[position] != "," or position + 1 == len(text):
                raise _no_list(text)
            position += 1
    return hosts


def _hosts(text: str, entry: str) -> Iterator[str]:
    """Yields the hosts of one entry: every combination of the numbers in its brackets."""
    piece = _PIECE.match(entry)
    assert piece is not None
    rest = entry[piece.end() :]
    for number in _numbers(text, piece[2]):
        if not rest:
            yield piece[1] + number
            continue
        for tail in _hosts(text, rest):
            yield piece[1] + number + tail


def _numbers(text: str, inside: str | None) -> Iterator[str]:
    if inside is None:
        yield ""
        return
    for part in inside.split(","):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise _no_list(text)
        first, last = found[1], found[2] or found[1]
        if len(last) > 9 or int(last) < int(first):
            raise _no_list(text)
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _no_list(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"{text[:200]!r} is no list of hosts as Slurm writes it, such as node[01-03,7]"
    )
