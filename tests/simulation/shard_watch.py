"""Shards whose events are watched: of primaries and of backups alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol

from trireme.cluster.messages import ViewChanged
from trireme.cluster.view import View
from trireme.ps.layout import Layout
from trireme.ps.messages import Collect, FromServer, PullExtra, RejectedVerdict, Status, StopJob
from trireme.ps.shard.instructions import Instruction
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.quiet_state import Quiet
from trireme.ps.shard.shard import Shard
from trireme.ps.shard.state import ModelDescription
from trireme.ps.shard.values.parameters import Values
from trireme.ps.snapshot_messages import WriteValues
from trireme.wire.message import Message

_UNWATCHED = (Status, PullExtra, WriteValues)
"""Requests that change nothing, or that no schedule has."""


class Watch(Protocol):
    """Who watches one shard."""

    def viewed(self, view: View) -> None:
        """It is about to take a view."""

    def resumed(self, view: View) -> None:
        """It is about to begin where other shards have stopped."""

    def received(self, route: object, who: Participant | None, message: Message, what: Any) -> None:
        """A request is about to happen to it."""

    def apply_rows(self, apply: Callable[..., None], *said: Any) -> None:
        """Rows of tables are about to be updated, which `apply` does."""

    def counted(self, count: Callable[..., None], members: Sequence[tuple[int, int]]) -> None:
        """Other workers are about to count for the staleness bound, which `count` notes."""

    def refused(self, pushes: Sequence[tuple[int, int, int]]) -> None:
        """The shard has refused to apply pushes: (worker, incarnation, sequence)."""

    def grown(self, layout: Layout | None, values: Values | None) -> None:
        """An event is over, after which the shard has this layout."""

    def happened(self, step: int, instructions: Sequence[Instruction]) -> None:
        """An event is over: its step now, and what it asks for."""

    def stopped(self, view: int) -> None:
        """An event is over, and the shard has stopped to be divided anew, as a view announced."""


if TYPE_CHECKING:
    _Base = Shard
else:
    _Base = object


class Watched(_Base):
    """Tells of the events of the shard class behind it."""

    watch: Watch

    def view(self, now: float, view: View) -> list[Instruction]:
        if view.number > self.state.participants.view.number:
            self.watch.viewed(view)
        return self._told(super().view(now, view))

    def resume(self, now: float, view: View, quiet: Quiet) -> list[Instruction]:
        self.watch.resumed(view)
        return self._told(super().resume(now, view, quiet))

    def request(
        self, now: float, route: object, who: Participant, message: Message, payload: Any = None
    ) -> list[Instruction]:
        if isinstance(message, (*_UNWATCHED, FromServer, ViewChanged)):
            return super().request(now, route, who, message, payload)
        nobody = isinstance(message, StopJob | Collect)
        self.watch.received(route, None if nobody else who, message, payload)
        return self._told(super().request(now, route, who, message, payload))

    def heard(self, now: float, shard: int, message: FromServer) -> list[Instruction]:
        return self._told(super().heard(now, shard, message))

    def go_on(self) -> list[Instruction]:
        return self._told(super().go_on())

    def _create(self, shown: ModelDescription) -> None:
        super()._create(shown)
        table = self.state.table
        table.count = partial(self.watch.counted, table.count)  # type: ignore[method-assign]
        if (extra := self.state.extension) is not None:
            extra.apply = partial(self.watch.apply_rows, extra.apply)  # type: ignore[method-assign]

    def _told(self, out: list[Instruction]) -> list[Instruction]:
        self.watch.refused(
            [
                (worker, record.incarnation, sequence)
                for worker, record in self.state.table.records.items()
                for sequence, verdict in record.verdicts.items()
                if isinstance(verdict, RejectedVerdict)
            ]
        )
        self.watch.grown(self.state.layout, self.state.values)
        self.watch.happened(self.state.step, out)
        if self.stopped:
            self.watch.stopped(self.state.participants.view.number)
        return out


@cache
def watched(kind: type[Shard]) -> type[Shard]:
    """Returns a class of shards that are watched, and otherwise as the given ones."""
    return type(f"Watched{kind.__name__}", (Watched, kind), {})
