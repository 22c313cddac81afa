"""How examples are numbered, and where epochs end."""

from __future__ import annotations

from enum import IntEnum

MOST_SPANS = 4096
"""The largest number of spans in one lease; a loader requests 256."""

MOST_DEALT = 1 << 60
"""The largest position: beyond it, numbers would not fit into messages."""

MOST_POSITIONS = 1 << 32
"""The largest number of positions in a span."""

_MOST_PARTS = 1 << 31


def size_of_parts(parts: int) -> int:
    """Returns the number of positions of a part of a stream, of which an epoch has `parts`.

    Only the first ones have examples. Another number of parts gives another size, so that it is
    noticed.
    """
    return MOST_POSITIONS - parts


def parts_of(size: int) -> int:
    """Returns how many parts of a given size make an epoch: 1 but for streams."""
    parts = MOST_POSITIONS - size
    return parts if 0 < parts < _MOST_PARTS else 1


class EpochEnd(IntEnum):
    """What becomes of the batch that crosses the end of an epoch.

    Attributes:
        CROSS: it takes the rest from the next epoch, so that every batch is full.
        SHORT: it is cut. With interleaving, the round in which an epoch ends is cut: together the
            members hold the rest, and a member for which nothing is left is dealt an empty span.
        DROP: what does not make a batch of each member (without interleaving: one batch) is left
            out, and counts as finished.
    """

    CROSS = 0
    SHORT = 1
    DROP = 2
