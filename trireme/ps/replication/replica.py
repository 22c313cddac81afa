"""One replica of a shard: the primary, a backup, or one that joins. Without I/O.

The primary gives every event to its log before it gives it to the shard; see `log`. A backup gives
the same events, in the same order, to a shard of the same class, which is a deterministic state
machine: it comes to the same state bit by bit. What the backup's shard has to say is dropped. When
a view makes a backup the primary, its shard is the one that everybody has heard of. Source:
Schneider, Implementing Fault-Tolerant Services Using the State Machine Approach (ACM Computing
Surveys 22(4), 1990).

Events return iterators of outputs: the driver carries out each before it takes the next, so that
other replicas and shards hear of an event before this one computes what follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from trireme.cluster.messages import CaughtUp, CopyLost, LinkLost, ReadyToSwitch, ViewChanged
from trireme.cluster.view import ShardEntry, View
from trireme.errors import ConfigurationError, FrameError, Rejected
from trireme.ps.flat import as_bytes
from trireme.ps.messages import (
    Collect,
    FencedVerdict,
    FromServer,
    PullExtra,
    Push,
    PushReply,
    Refused,
    RejectedVerdict,
    Status,
)
from trireme.ps.replication.dispatcher import AuthenticatedLink, Dispatcher
from trireme.ps.replication.log import EVENTS, Lent, ReplicationLog, Tell
from trireme.ps.replication.messages import Fill, FillExtra, FollowPrimary, Replicate, Replicated
from trireme.ps.shard.instructions import Instruction, Reply
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.quiet_state import Quiet, QuietState
from trireme.ps.shard.shard import NOTICE_SECONDS, Shard
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.snapshot_messages import TensorSpec
from trireme.wire.message import Message

_READS = (Status, Collect)  # requests that change nothing, and need not be entries

NOBODY = Participant(0, 0)  # the sender of entries that no task has sent

_STATE = msgspec.msgpack.Decoder(QuietState)  # made at import: threads that make one at once crash

_L = TypeVar("_L", bound=AuthenticatedLink)
Output = Instruction | Tell[_L]  # what a replica asks its driver for


class Replica(Generic[_L]):
    """One replica of a shard.

    Args:
        make: makes an empty shard, with the dispatcher that routes the messages to it.

    Attributes:
        position: of the last entry that it has applied.
    """

    def __init__(
        self,
        server: int,
        number: int,
        generation: int,
        make: Callable[[int], Dispatcher[_L]],
        patience: float = math.inf,
    ) -> None:
        self.number = number
        self.generation = generation
        self.dispatcher: Dispatcher[_L] = make(number)
        self.shard: Shard = self.dispatcher.shard
        self.primary = True  # whether this is the primary
        # the number of the view in which it has begun; 0 while it has no state to begin with
        self.began = 0
        self.source: _L | None = None  # the connection to the primary, at another replica
        # the log of the primary; None at another replica
        self.log: ReplicationLog[_L] | None = ReplicationLog(0, patience=patience)
        self._make = make
        self._server = server
        self._patience = patience
        self._noticed = 0.0
        self._position = 0  # while it is not the primary
        self._since: list[tuple[int, int]] = []  # (position, view): see `Replicate`
        # The state it has begun with, for joining replicas, and the slots whose extra values that
        # lacks.
        self._first: tuple[Fill, Sequence[memoryview], int] | None = None
        self._view = View(0, (), ())

    @property
    def position(self) -> int:
        return self._position if self.log is None else self.log.position

    @property
    def lacks(self) -> int:
        """How many of the shard's last slots it has no extra values of."""
        extension = self.shard.state.extension
        return 0 if extension is None else extension.lacks

    def _note_since(self, position: int, since: int) -> None:
        if not self._since or self._since[-1][1] != since:
            self._since.append((position, since))

    def _since_at(self, position: int) -> int:
        """Returns the view since which the primary of an entry is it; 0 for none."""
        return next((since for first, since in reversed(self._since) if first <= position), 0)

    @property
    def slots(self) -> tuple[int, int] | None:
        """The slots of the shard; None before its first view."""
        if not self._view.shards or self._view.generation != self.generation:
            return None
        entry = self._view.shards[self.number]
        return entry.start, entry.stop

    # -- how it begins ---------------------------------------------------------------------------

    def begin(self, now: float, view: View, quiet: Quiet | None) -> list[Instruction]:
        """Begins with the state of the generation before; None where no values were loaded.

        Args:
            quiet: the state, whose tensors do not change any more.
        """
        self.take_role(view)
        self.began = view.number
        instructions = self._first_instructions(now, view, quiet)
        if self.log is None:
            return []
        if not self.log.active:
            return instructions
        extra = self.shard.state.extension
        lacks = 0 if extra is None else extra.slots[1] - extra.slots[0]
        self._first = *_filling(view, quiet), lacks
        return self.log.hold(instructions)

    def _first_instructions(self, now: float, view: View, quiet: Quiet | None) -> list[Instruction]:
        shard = self.shard
        out = shard.view(now, view) if quiet is None else shard.resume(now, view, quiet)
        while shard.due:
            out += shard.go_on()
        return out

    def fill(self, now: float, message: Fill, tensors: Tensors) -> None:
        """Takes the state with which the generation has begun."""
        if self.primary:
            raise FrameError("a primary is not filled")
        self._forget_all()
        quiet = None
        if message.state:
            try:
                state = _STATE.decode(message.state)
            except (msgspec.DecodeError, ConfigurationError) as error:
                raise FrameError(f"a shard's state is malformed: {error}") from error
            quiet = Quiet(state, tensors, None)
        self._first_instructions(now, message.view, quiet)
        self.began = message.view.number

    def fill_extra(self, message: FillExtra, tensors: Tensors) -> None:
        """Takes extra values, as they are after the entries that have come."""
        extension = self.shard.state.extension
        if self.primary or extension is None:
            raise FrameError(f"extra values of shard {self.number} came where none were due")
        try:
            extension.fill(message.slots, tensors)
        except Rejected as error:
            raise FrameError(
                f"extra values of shard {self.number} cannot be taken over: {error}"
            ) from error

    # -- views -----------------------------------------------------------------------------------

    def view(self, now: float, view: View) -> Iterator[Output[_L]]:
        """Takes a view of the same generation; a backup may become the primary."""
        yield from self.take_role(view)
        if self.log is not None and self.began:
            self.log.own()
            yield from self._happen(now, NOBODY, None, ViewChanged(view), None)

    def take_role(self, view: View) -> list[Instruction]:
        """Becomes what a view says; without a state it waits for that of the primary."""
        # The division may not be known yet: then each server has one shard.
        entry = view.shards[self.number] if view.shards else ShardEntry(0, 1, self.number)
        self._view = view
        self.primary = entry.primary == self._server
        if not self.primary:
            self._position, self.log = self.position, None
            return []
        if self.log is None:
            if self.lacks:  # as where it has not begun: nobody else has the rest
                self._forget_all()
            self.log = ReplicationLog(self._position, view.number, self._patience)
            self.source = None
            self.shard.state.shows_extra = True
        elif not self.log.position:
            self.log.since = view.number
        out = self.log.members(entry.backups, entry.joining)
        if not entry.backups and not entry.joining:
            self._first = None
        return out

    def _forget_all(self) -> None:
        self.began = self._position = 0
        self._since.clear()
        self.dispatcher = self._make(self.number)
        self.shard = self.dispatcher.shard

    # -- at the primary --------------------------------------------------------------------------

    def request(
        self,
        now: float,
        link: _L,
        route: object,
        message: Message,
        what: Any = None,
        raw: Sequence[memoryview] = (),
        lent: Lent | None = None,
    ) -> Iterator[Output[_L]]:
        """Takes an admitted message.

        Args:
            lent: where that lies, if it is in memory that a worker lends.
        """
        who, log = self.dispatcher.sender(link, message), self.log
        if isinstance(message, _READS):
            return iter(self.shard.request(now, route, who, message, what))
        if not isinstance(message, FromServer) and (reason := self._away()) is not None:
            return iter((Reply(route, _fenced(message, reason, self._view.number)),))
        if isinstance(message, PullExtra):  # it changes nothing, and shows what may yet be lost
            found = self.shard.request(now, route, who, message)
            return iter(found if log is None else log.hold(found))
        if (
            isinstance(message, Push)
            and (reason := self.shard.state.overfull(who.worker, message)) is not None
        ):
            step = self.shard.state.step
            return iter((Reply(route, PushReply(RejectedVerdict(reason), step, 0, False)),))
        return self._happen(now, who, route, message, what, raw, lent)

    def heard(self, now: float, shard: int, message: FromServer) -> Iterator[Output[_L]]:
        """Takes a message of another shard whose primary is at this server too."""
        if self.log is not None:
            yield from self._happen(now, Participant(shard, 0), None, message, None)

    def _away(self) -> str | None:
        """Returns why workers cannot be served now; None where they can."""
        if self.log is None:
            return f"ps:{self._server} is not the primary of shard {self.number}"
        return "the shards are divided anew" if self.shard.stopped else None

    def _happen(
        self,
        now: float,
        who: Participant,
        route: object,
        message: Message,
        what: Any,
        raw: Sequence[memoryview] = (),
        lent: Lent | None = None,
    ) -> Iterator[Output[_L]]:
        log, counters = self.log, self.shard.state.counters
        assert log is not None
        if log.active:
            yield from log.append(now, who, message, raw, lent)
            self._note_since(log.position, log.since)
        failed = counters["failed"]
        instructions = self.shard.request(now, route, who, message, what)
        while True:
            if counters["failed"] != failed:  # perhaps by values that such a replica lacks
                log.drop_unfilled()
            yield from log.hold(instructions) if log.active else instructions
            if not self.shard.due:
                return
            log.keep_values()  # they change again, within this event
            instructions = self.shard.go_on()

    def tick(self, now: float, taken: Callable[[_L], int] = lambda _: 0) -> Iterator[Output[_L]]:
        """Passes the time; for `taken` see `ReplicationLog.look`."""
        if self.log is None:
            return
        yield from self.log.look(now, taken)
        yield from self.shard.tick(now)
        if now - self._noticed >= NOTICE_SECONDS:
            self._noticed = now
            yield from self.log.waits(now)

    def reports(self) -> list[Message]:
        """Returns what the coordinator should know; it is told again until its view shows it."""
        log, generation, number = self.log, self.generation, self.number
        if log is None:
            return []
        out: list[Message] = [CaughtUp(generation, number, *each) for each in log.caught_up]
        out += [CopyLost(generation, number, *each) for each in sorted(log.useless)]
        out += [
            LinkLost(generation, number, server, entry.incarnation)
            for server in sorted(log.overdue)
            if (entry := self._view.server(server)) is not None
        ]
        if self.shard.stopped and log.settled:
            out.append(ReadyToSwitch(self._view.number, generation, number))
        return out

    def follow(self, link: _L, message: FollowPrimary) -> list[Output[_L]] | None:
        """Begins to send entries to another replica; returns None where that cannot be.

        A replica that has not begun with the same state as this one, or has heard entries that this
        one has not, is filled first.
        """
        if (log := self.log) is None:
            return None
        server, out = link.identity.index, list[Output[_L]]()
        position, lacks = message.position, message.lacks
        last = position and self._since_at(position)  # else it has heard another primary
        filled = message.began != self.began or position > log.position or message.since != last
        followed = None
        if not filled or self._first is not None:
            if filled and self._first is not None:
                fill, payload, lacks = self._first
                out.append(Tell(link, fill, payload))
                position = 0
            followed = log.follow(
                link, server, message.incarnation, position, filled=filled, lacks=lacks
            )
        if followed is None and server in log.backups | log.joining:
            # It lacks entries that only the primary before had, or that are forgotten.
            log.useless.add((server, message.incarnation))
        self._forget_first()
        return None if followed is None else [*out, *followed, *self._more_extra(link)]

    def confirmed(self, link: _L, message: Replicated) -> Iterator[Output[_L]]:
        if self.log is not None:
            yield from self.log.confirm(link, message.position, message.lacks)
            self._forget_first()
            yield from self._more_extra(link)

    def _more_extra(self, link: _L) -> Iterator[Tell[_L]]:
        """Yields the next extra values for a replica that lacks some, one piece at a time.

        All entries that were sent to it are applied here by now: pieces go out between events.
        """
        extra = self.shard.state.extension
        if self.log is None or extra is None or not (lacks := self.log.wants_extra(link)):
            return
        slots, tensors = extra.piece(lacks)
        self.log.extra_sent(link, extra.slots[1] - slots[1])
        specs, payload = _payload_of(tensors)
        yield Tell(link, FillExtra(slots, specs), payload)

    def _forget_first(self) -> None:
        """Forgets the state with which the generation began, once all other replicas have it."""
        if self.log is not None and self.log.complete:
            self._first = None

    def borrows(self, link: _L, memories: Sequence[int]) -> None:
        if self.log is not None:
            self.log.borrows(link, memories)

    def dismiss(self, view: View) -> list[Reply]:
        """Returns answers to all that is not answered, as the shards of another view take over."""
        return self.shard.dismiss(view.number) if self.primary else []

    def closed(self, link: _L) -> None:
        self.dispatcher.closed(link)
        if self.log is not None:
            self.log.lost(link)
        if self.source is link:
            self.source = None

    # -- at the other replicas -------------------------------------------------------------------

    def replicate(
        self, message: Replicate, event: Message, route: object, what: Any
    ) -> Iterator[Instruction]:
        """Applies an entry; yields the outputs of the shard, which a backup drops.

        Its dispatcher remembers the last `Send` to each shard all the same.
        """
        if self.primary or not self.began or message.position != self._position + 1:
            raise FrameError(
                f"entry {message.position} of shard {self.number} came where "
                f"{self._position + 1} was due"
            )
        self._position += 1
        self._note_since(message.position, message.since)
        self.shard.state.shows_extra = False  # nobody hears what a backup answers
        who = Participant(message.index, message.incarnation)
        yield from self.shard.request(message.now, route, who, event, what)
        while self.shard.due:
            yield from self.shard.go_on()

    def follows(self, incarnation: int) -> FollowPrimary:
        """Returns the message by which this replica asks its primary for entries."""
        since = self._since_at(self._position)
        return FollowPrimary(
            self.number, self.generation, self._position, self.began, incarnation, since, self.lacks
        )


def decoded(message: Replicate) -> Message:
    """Returns the message of an entry."""
    return EVENTS.decode(message.event_kind, message.event)


def _filling(view: View, quiet: Quiet | None) -> tuple[Fill, Sequence[memoryview]]:
    if quiet is None:
        return Fill(view, b"", ()), ()
    specs, payload = _payload_of(quiet.tensors)
    return Fill(view, msgspec.msgpack.encode(quiet.state), specs), payload


def _payload_of(tensors: Tensors) -> tuple[tuple[TensorSpec, ...], list[memoryview]]:
    specs = tuple(spec for spec, _ in tensors)
    return specs, [as_bytes(tensor) for _, tensor in tensors if tensor.numel()]


def _fenced(message: Message, reason: str, view: int) -> Message:
    if isinstance(message, Push):
        return PushReply(FencedVerdict(view, reason), 0, 0, False)
    return Refused("fenced", reason, view)
