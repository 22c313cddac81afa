"""A check: what was looked at, whether it is well, and what to do if it is not."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warning", "problem"]

GIB = 1 << 30
MIB = 1 << 20


class Check(msgspec.Struct, frozen=True):
    """The result of one check.

    Attributes:
        topic: what was looked at, in a word or two.
        level: `ok`; `warning` for what a job may run with; `problem` for what it fails with.
        finding: what was found.
        advice: what to do; empty if all is well, or if `finding` is an error that says it.
    """

    topic: str
    level: Level
    finding: str
    advice: str = ""


def bytes_as_text(count: float) -> str:
    """Returns a number of bytes such as `64 MiB`."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / MIB:.0f} MiB"
