"""The rows of sparse tables in messages: updates, and keys whose rows are wanted.

Keys are little-endian int64, and rows lie one after the other, in the dtype of the table. They are
in the message, or lie in memory that a worker of the same host lends: see `trireme.ps.row_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt

from trireme.errors import FrameError
from trireme.wire.message import Index, Number


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A place in the memory that a worker lends for rows."""

    offset: Number  # where it begins, in bytes
    nbytes: Number  # its length in bytes


Data = bytes | Place
"""Keys or rows: themselves, or where they lie."""

RowCodec: TypeAlias = Literal["none", "fp16", "bf16", "int8"]
"""How the rows of an update are packed: see `trireme.tables.job.packed_rows`."""


class RowUpdates(msgspec.Struct, frozen=True, array_like=True):
    """Updates of some rows of one table."""

    table: Index  # the position of the table among those that the workers have shown
    keys: Data  # the keys, each of them once
    rows: Data  # an update for each key
    # the learning rate from now on, where the table goes by the program's; None where it has its
    # own
    lr: float | None = None
    codec: RowCodec = "none"  # how the rows are packed: see `trireme.tables.job.packed_rows`


class RowKeys(msgspec.Struct, frozen=True, array_like=True):
    """Keys of one table whose rows are wanted."""

    table: Index  # the position of the table
    keys: Data  # the keys
    answer: Place | None = None  # where to write the rows; None for into the answer


class RowKeysInto(RowKeys, frozen=True, array_like=True):
    """Keys whose rows are written to memory at hand; never in a message."""

    out: memoryview = memoryview(b"")  # where the rows go, of their size


def owned(updates: Sequence[RowUpdates]) -> tuple[RowUpdates, ...]:
    """Returns copies of updates that may lie in lent memory, to which their worker writes again."""
    return tuple(
        msgspec.structs.replace(
            each, keys=bytes(data_of(each.keys)), rows=bytes(data_of(each.rows))
        )
        for each in updates
    )


def raw(array: npt.NDArray[Any]) -> bytes:
    """Returns the bytes of a contiguous array for a message: a view, without a copy.

    The array must stay as it is until the message is answered.
    """
    return cast("bytes", np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def data_of(data: Data) -> bytes:
    """Returns the bytes of keys or rows that are at hand."""
    if isinstance(data, Place):
        raise FrameError("a message names rows in memory that was not lent over its connection")
    return data
