"""Tables with one bug each, all of which must be found: a module apart, for they are a plug-in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

from trireme.ps.messages import Attach
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.shard import Shard
from trireme.tables.job.shard_tables import ShardTables, arrays_in, tensors_of, within
from trireme.wire.message import Message


class _PullsOnce(ShardTables):
    def pull(self, wanted: Any) -> Any:
        self.kept = getattr(self, "kept", None) or super().pull(wanted)
        return self.kept


class _WithTables(Shard):
    """A shard whose tables are of another class."""

    kind: type[ShardTables] = ShardTables

    def attach(self, who: Participant, request: Attach, _: None = None) -> Message:
        out = super().attach(who, request)
        if (extension := self.state.extension) is not None:
            extension.__class__ = self.kind
            watch = vars(extension)["apply"].func  # the simulator's, around what was the method
            extension.apply = partial(watch, self.kind.apply.__get__(extension))
        return out


class AnswersWithOldRows(_WithTables):
    """Answers carry the rows of the first one."""

    kind = _PullsOnce


class _CopiesFirst(ShardTables):
    def apply(self, extra: Any, step: int) -> None:
        self.before = super().copy()
        super().apply(extra, step)

    def copy(self) -> Any:
        now = super().copy()
        return getattr(self, "before", now)


class CopiesRowsLater(_WithTables):
    """A copy has the rows of the update before."""

    kind = _CopiesFirst


def waits_with_updates_until_it_is_filled() -> AbstractContextManager[Any]:
    """A replica that is filled leaves out updates, also of rows that it has."""
    apply = ShardTables.apply

    def waits(self: Any, updates: Any, step: int) -> None:
        apply(self, () if self.lacks else updates, step)

    return patch.object(ShardTables, "apply", waits)


def updates_rows_that_come_later() -> AbstractContextManager[Any]:
    """A replica that is filled takes rows as they were before the entries that it has."""
    piece = ShardTables.piece
    first: dict[int, Any] = {}

    def early(self: Any, lacks: int) -> Any:
        slots = range(*self.slots)
        if lacks == len(slots):
            first[id(self)] = self._tensors(slots)
        (start, end), _ = piece(self, lacks)
        kept = [
            entry
            for name, arrays in arrays_in(first[id(self)])
            for entry in tensors_of(name, within(arrays, (start, end)))
        ]
        return (start, end), kept

    return patch.object(ShardTables, "piece", early)
