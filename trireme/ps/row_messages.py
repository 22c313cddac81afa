"""The rows of sparse tables in messages: updates, and keys whose rows are wanted.

Keys are little-endian int64, and rows lie one after the other, in the dtype of the table.
"""

from __future__ import annotations

import msgspec

from trireme.wire.message import Index


class RowUpdates(msgspec.Struct, frozen=True, array_like=True):
    """Updates of some rows of one table.

    Attributes:
        table: the position of the table among those that the workers have shown.
        keys: the keys, each of them once.
        rows: an update for each key.
        lr: the learning rate from now on, where the table goes by the program's; None where it has
            its own.
    """

    table: Index
    keys: bytes
    rows: bytes
    lr: float | None = None


class RowKeys(msgspec.Struct, frozen=True, array_like=True):
    """Keys of one table whose rows are wanted.

    Attributes:
        table: the position of the table.
        keys: the keys.
    """

    table: Index
    keys: bytes
