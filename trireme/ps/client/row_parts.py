"""A worker's updates and wanted keys of sparse tables, divided among the shards that have them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trireme.errors import ConfigurationError
from trireme.ps.messages import PulledRows, PullRows, Push, PushReply
from trireme.ps.row_messages import RowKeys, RowUpdates
from trireme.ps.table_spec import TableSpec
from trireme.ps.tables import Parts, Rows, Space, table_support
from trireme.wire.message import Limits

_MOST_BYTES = Limits().metadata - (1 << 24)
"""How many bytes of rows a message may carry; the rest is for what else it says."""


class RowParts:
    """The parts of one worker's requests with rows, by shard.

    Args:
        space: where to put the keys and rows that a request sends to a shard; None for new memory.
    """

    def __init__(self, worker: int, space: Space | None = None) -> None:
        self._worker = worker
        self._where = () if space is None else (space,)
        self._tables: tuple[TableSpec, ...] = ()
        self._bounds: tuple[int, ...] = ()
        self._codec = "none"
        # Of the push under way: its sequence number, its parts, and its messages by shard.
        self._push: tuple[int, Parts, dict[int, Push]] | None = None

    def show(self, tables: Sequence[TableSpec], bounds: Sequence[int], codec: str) -> None:
        """Takes the tables, the codec of pushes, and the bounds of the shards: see `divide`."""
        self._tables, self._codec = tuple(tables), codec
        self.divide(bounds)

    def divide(self, bounds: Sequence[int]) -> None:
        """Takes other bounds of the shards: a push under way is divided anew.

        Args:
            bounds: the slots at which shards begin, and the number of slots.
        """
        self._bounds = tuple(bounds)
        self.forget()

    def forget(self) -> None:
        """Forgets the push under way: another one may get its number."""
        self._push = None

    def packed(self, updates: Sequence[RowUpdates]) -> tuple[RowUpdates, ...]:
        """Returns updates as they are sent: all shards get parts of the same bytes."""
        if not updates or self._codec == "none":
            return tuple(updates)
        return tuple(
            table_support().packed(each, self._tables[each.table], self._codec) for each in updates
        )

    def of_push(self, push: Push, shard: int) -> Push:
        """Returns a push with one shard's part of its updates and wanted keys.

        Raises:
            ConfigurationError: a part does not fit into one message.
        """
        if self._push is None or self._push[0] != push.sequence:
            self._push = push.sequence, self._divided(push.rows, push.wanted), {}
        _, parts, messages = self._push
        if shard not in messages:
            rows, wanted = parts.of_shard(shard, *self._where)
            messages[shard] = msgspec.structs.replace(push, rows=rows, wanted=wanted)
        return messages[shard]

    def brought(self, sequence: int, replies: Sequence[PushReply]) -> list[Rows]:
        """Returns the rows that a push has brought, one entry for each of its `wanted`.

        Args:
            replies: of all shards. Those that have divided the rows anew bring none.
        """
        if self._push is None or self._push[0] != sequence:
            return []
        _, parts, messages = self._push
        wanted = len(messages[0].wanted)
        if not wanted or any(len(reply.rows) != wanted for reply in replies):
            return []
        return parts.united([reply.rows for reply in replies])

    def of_pull(self, wanted: Sequence[RowKeys]) -> Pulling:
        """Returns the parts of a request for rows.

        Raises:
            ConfigurationError: a part does not fit into one message.
        """
        return Pulling(self._divided((), wanted), self._where)

    def _divided(self, rows: Sequence[RowUpdates], wanted: Sequence[RowKeys]) -> Parts:
        parts = table_support().parts(rows, wanted, self._tables, self._bounds)
        for shard in range(len(self._bounds) - 1):
            if (size := parts.nbytes(shard)) > _MOST_BYTES:
                raise ConfigurationError(
                    f"the rows of one step of worker:{self._worker} take {size >> 20} MiB at one "
                    f"server, and a message has room for {_MOST_BYTES >> 20}: use a smaller "
                    "batch, or more servers"
                )
        return parts


class Pulling:
    """A request for rows, by shard."""

    def __init__(self, parts: Parts, where: tuple[Space, ...]) -> None:
        self._parts = parts
        self._where = where

    def message(self, shard: int) -> PullRows:
        """Returns the message to a shard."""
        return PullRows(0, self._parts.of_shard(shard, *self._where)[1])

    def rows(self, answers: Sequence[PulledRows]) -> list[Rows]:
        """Returns the rows in the order of the keys, one array for each entry."""
        return self._parts.united([answer.rows for answer in answers])
