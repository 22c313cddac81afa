"""The log of a shard's primary: its entries, the replicas that confirm them, and what is withheld.

While there is another copy, every event that changes the shard is an entry, and is sent to all
replicas as soon as their windows have room. What the primary has to say of it (answers, values,
messages to other shards) is withheld until every replica that counts has confirmed it. So nobody
ever sees what can be lost with the primary. The next entry does not wait for that: many may be
under way. Source: van Renesse and Schneider, Chain Replication (OSDI 2004), section 2, for the
promise; with a coordinator beside, as there.

A joining replica does not count at first: it catches up. Once it lacks at most `_CLOSE_BYTES`, or
the log keeps more than `BACKLOG_BYTES`, the primary waits for it too. When it has confirmed all
that was said before, it has caught up.

A replica that owes confirmations, or its connection, and makes no progress is `overdue` after a
while: the coordinator drops it in the next view. Confirmations are progress, and bytes that leave
while more are to be sent, as the state of a large shard takes long on a slow link.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec
import torch

from trireme.cluster.messages import ViewChanged
from trireme.ps.messages import PullReply, PushReply, Waiting
from trireme.ps.replication.messages import PS_MESSAGES, Replicate
from trireme.ps.replication.stall_clock import StallClock
from trireme.ps.shard.instructions import Instruction, Reply
from trireme.ps.shard.participants import Participant
from trireme.wire.message import Catalog, Message

WINDOW_BYTES = 1 << 27  # of entries under way to one replica, at most; or one entry

BACKLOG_BYTES = 1 << 30  # where a joining replica lacks as many bytes, the primary waits for it

_CONNECT_SECONDS = 1.0  # in which a joining replica has connected before it lacks so much
_CLOSE_BYTES = 1 << 24  # that are missing to a joining replica which is nearly there

EVENTS = Catalog((*PS_MESSAGES, ViewChanged))  # the messages that entries carry

_L = TypeVar("_L")


class Tell(msgspec.Struct, Generic[_L], frozen=True):
    """Send a message, and a payload after it, over the connection to another replica."""

    link: _L
    message: Message
    payload: Sequence[memoryview] = ()


class Lent(msgspec.Struct, frozen=True):
    """Where a payload lies in memory that a worker lends to servers of its host."""

    memory: int  # the memory's identity on this host
    places: tuple[tuple[int, int], ...]  # the (offset, length) of the payload there, in bytes


class _Entry(msgspec.Struct):
    message: Replicate
    payload: Sequence[memoryview]
    nbytes: int
    lent: Lent | None = None

    def own(self) -> None:
        """Copies the payload, as its memory will change before all replicas have it."""
        self.payload = [memoryview(bytes(view)) for view in self.payload]
        self.lent = None

    def to(self, receiver: _Receiver[_L], link: _L) -> Tell[_L]:
        """Returns how a replica is sent it, which may have mapped the memory of the payload."""
        lent = self.lent
        if lent is None or lent.memory not in receiver.memories:
            return Tell(link, self.message, self.payload)
        named = msgspec.structs.replace(self.message, memory=lent.memory, places=lent.places)
        return Tell(link, named)


class _Receiver(msgspec.Struct, Generic[_L]):
    """A replica that the primary sends entries to."""

    incarnation: int  # of its server
    link: _L | None  # the connection to it; None while there is none
    # the positions up to which entries were sent, and confirmed; -1 until the replica confirms the
    # state that it was filled with
    sent: int
    confirmed: int
    # of a joining replica: the position at which the primary began to wait for it
    waited_from: int | None = None
    lacks: int = 0  # how many of the shard's last slots it has no extra values of
    will_lack: int = 0  # the same once those have come that were sent to it last
    bytes: int = 0  # those that were sent and are not confirmed
    # the identities of the lent memory that its server has mapped
    memories: frozenset[int] = frozenset()

    @property
    def holds(self) -> int:
        """The position up to which it could take the primary's place; -1 where it never could."""
        return -1 if self.lacks else self.confirmed


class ReplicationLog(Generic[_L]):
    """The log of one primary.

    Args:
        position: of the last entry that this replica has applied.
        since: the number of the view since which it is the primary.
        patience: after so many seconds without progress another replica is overdue.

    Attributes:
        appended, appended_bytes: the entries that were appended here, and their bytes.
    """

    def __init__(self, position: int, since: int = 0, patience: float = math.inf) -> None:
        self.position = position  # of the last entry
        self.appended = self.appended_bytes = 0
        self.since = since  # as given; that of the entries to come
        # the servers whose replicas count, by the newest view
        self.backups: frozenset[int] = frozenset()
        self.joining: frozenset[int] = frozenset()  # the servers whose replicas catch up
        # joining replicas that count from now on: (server, incarnation)
        self.caught_up: list[tuple[int, int]] = []
        # replicas that this primary cannot bring up to date: (server, incarnation)
        self.useless: set[tuple[int, int]] = set()
        self._receivers: dict[int, _Receiver[_L]] = {}
        self._entries: deque[_Entry] = deque()  # up to `position`
        self._bytes = 0  # of the entries
        self._held: deque[tuple[int, list[Instruction]]] = deque()
        self._live = False  # whether answers that are held carry live values
        self._stalls = StallClock[int](patience)

    @property
    def overdue(self) -> frozenset[int]:
        """The servers whose replicas make no progress, or do not connect and lack too much."""
        if self._bytes <= BACKLOG_BYTES:
            return self._stalls.overdue
        linked = {s for s, each in self._receivers.items() if each.link is not None}
        late = self._stalls.after(_CONNECT_SECONDS) - linked
        return self._stalls.overdue | (self.joining & late)

    @property
    def active(self) -> bool:
        """Whether there are other replicas, so that events must be entries."""
        return bool(self.backups or self.joining or self._held)

    @property
    def complete(self) -> bool:
        """Whether no replica joins, and all others have a whole state."""
        receivers = self._receivers
        have = {server for server, each in receivers.items() if each.holds >= 0}
        return not self.joining and self.backups <= have

    @property
    def unconfirmed(self) -> int:
        """How many entries not every replica that counts has confirmed."""
        return self.position - max(self._confirmed, 0)

    @property
    def settled(self) -> bool:
        """Whether every replica that counts has confirmed all entries."""
        return self._confirmed >= self.position

    # -- the replicas ----------------------------------------------------------------------------

    def members(self, backups: Sequence[int], joining: Sequence[int]) -> list[Instruction]:
        """Takes the servers of a view that have replicas; returns what is withheld no longer."""
        promised = {server for server, _ in self.caught_up}
        self.backups, self.joining = frozenset(backups), frozenset(joining)
        self.caught_up = [each for each in self.caught_up if each[0] in self.joining]
        here = self.backups | self.joining
        self.useless = {each for each in self.useless if each[0] in here}
        self._receivers = {s: f for s, f in self._receivers.items() if s in here}
        for server in self.backups - promised:
            if server in self._receivers:
                self._receivers[server].waited_from = None
        return self._settle()

    def follow(
        self,
        link: _L,
        server: int,
        incarnation: int,
        position: int,
        *,
        filled: bool = False,
        lacks: int = 0,
    ) -> list[Instruction | Tell[_L]] | None:
        """Begins to send entries to a replica; returns None where its entries are not at hand.

        Args:
            filled: whether the generation's first state is sent to it before the entries. It has
                nothing until it confirms that.
            lacks: how many of the shard's last slots it has no extra values of.
        """
        first = self.position - len(self._entries)
        if server not in self.backups | self.joining or not first <= position <= self.position:
            return None
        before = self._receivers.get(server)
        waited = before.waited_from if before and before.incarnation == incarnation else None
        confirmed = -1 if filled else position
        receiver = _Receiver(incarnation, link, position, confirmed, waited, lacks, lacks)
        self._receivers[server] = receiver
        return [*self._pump(receiver), *self._settle()]

    def borrows(self, link: _L, memories: Sequence[int]) -> None:
        """Notes which lent memory the server of a replica has mapped."""
        if (receiver := self._of(link)) is not None:
            receiver.memories = frozenset(memories)

    def lost(self, link: _L) -> None:
        """Notes that a connection is gone: the replica connects again, or is lost."""
        if (receiver := self._of(link)) is not None:
            receiver.link = None

    def confirm(self, link: _L, position: int, lacks: int = 0) -> Iterator[Instruction | Tell[_L]]:
        """Takes a replica's confirmation; yields more entries for it, and what can go out."""
        receiver = self._of(link)
        if receiver is None or not receiver.confirmed <= position <= receiver.sent:
            return
        if lacks not in (receiver.lacks, receiver.will_lack):
            return
        receiver.lacks = lacks
        for place in range(max(receiver.confirmed, 0) + 1, position + 1):
            receiver.bytes -= self._at(place).nbytes
        receiver.confirmed = position
        yield from self._pump(receiver)
        yield from self._settle()

    def wants_extra(self, link: _L) -> int:
        """Returns how many of the last slots are to be sent over a connection; 0 for now.

        They are as after the last entry, so they are sent after it.
        """
        receiver = self._of(link)
        if receiver is None or receiver.confirmed < 0 or receiver.sent < self.position:
            return 0
        return receiver.lacks if receiver.will_lack == receiver.lacks else 0

    def extra_sent(self, link: _L, lacks: int) -> None:
        """Notes that extra values are sent, after which a replica lacks so many slots."""
        if (receiver := self._of(link)) is not None:
            receiver.will_lack = lacks

    def look(self, now: float, taken: Callable[[_L], int]) -> list[Instruction]:
        """Passes the time; returns what is withheld no longer.

        `taken` returns how many bytes a connection has taken, if it has to take more; else 0.
        """
        marks = dict[int, Hashable]()
        for server in self.backups | self.joining:
            receiver = self._receivers.get(server)
            if receiver is None:
                marks[server] = None
            elif receiver.link is None or receiver.holds < self.position:
                leaving = 0 if receiver.link is None else taken(receiver.link)
                # How long a first state takes nobody knows, once all of it has left. The connection
                # breaks if nobody is there, and heartbeats tell of a server that hangs.
                if receiver.link is None or leaving or receiver.confirmed >= 0:
                    marks[server] = receiver.confirmed, receiver.lacks, leaving
        self._stalls.look(now, marks)
        return self._settle()

    def waits(self, now: float) -> list[Reply]:
        """Returns notices for those whose answers are withheld: the replicas that lack entries."""
        lacking = sorted(s for s, position in self._counted().items() if position < self.position)
        names = tuple(f"ps:{server}" for server in lacking)
        out = []
        for position, instructions in self._held:
            known = position > self.position - len(self._entries)
            since = self._at(position).message.now if known else now
            notice = Waiting("a copy of the update", names, now - since)
            out += [Reply(each.route, notice) for each in instructions if isinstance(each, Reply)]
        return out

    # -- events ----------------------------------------------------------------------------------

    def append(
        self,
        now: float,
        who: Participant,
        message: Message,
        payload: Sequence[memoryview],
        lent: Lent | None = None,
    ) -> Iterator[Tell[_L]]:
        """Appends an event; yields what is sent to the replicas.

        Args:
            who: the task that the event is of; or the shard, as worker.
            lent: where the payload lies, if that is in lent memory. A replica that has mapped it
                reads it there: it has applied the event before the event is answered.
        """
        self.keep_values()
        self.position += 1
        event = Replicate(
            self.position,
            now,
            *who,
            event_kind=message.kind,
            event=EVENTS.encode(message),
            since=self.since,
        )
        entry = _Entry(event, payload, sum(view.nbytes for view in payload) + 64, lent)
        waited = {s for s, each in self._receivers.items() if each.waited_from is not None}
        if not self.joining <= waited:
            entry.own()  # its answer does not wait for those
        self._entries.append(entry)
        self._bytes += entry.nbytes
        self.appended += 1
        self.appended_bytes += entry.nbytes
        for receiver in self._receivers.values():
            yield from self._pump(receiver)

    def hold(self, instructions: list[Instruction]) -> list[Instruction]:
        """Returns what can be carried out now; withholds the rest until it is confirmed."""
        if not self._held and self.settled:
            return instructions
        at_once, later = list[Instruction](), list[Instruction]()
        for each in instructions:
            notice = isinstance(each, Reply) and isinstance(each.message, Waiting)
            (at_once if notice else later).append(each)
        if later:
            self._held.append((self.position, later))
            self._live = True
        return at_once

    def keep_values(self) -> None:
        """Copies the live values that withheld answers carry, before they change.

        `append` does so for the next event. Within an event call it where values change again.
        """
        if not self._live:
            return
        self._live = False
        copies: dict[int, Sequence[torch.Tensor]] = {}
        for _, instructions in self._held:
            for place, each in enumerate(instructions):
                if not isinstance(each, Reply) or isinstance(each.payload, _Kept):
                    continue
                if each.payload and isinstance(each.message, (PushReply, PullReply)):
                    if id(each.payload) not in copies:
                        copies[id(each.payload)] = _Kept(t.clone() for t in each.payload)
                    kept = copies[id(each.payload)]
                    instructions[place] = msgspec.structs.replace(each, payload=kept)

    def drop_unfilled(self) -> None:
        """Notes that replicas without all extra values cannot follow an entry: they begin again."""
        self.useless |= {
            (server, each.incarnation) for server, each in self._receivers.items() if each.lacks
        }

    def own(self) -> None:
        """Copies the payloads of all entries: the memory of a worker that is out will change."""
        for entry in self._entries:
            entry.own()

    # -- inside ----------------------------------------------------------------------------------

    def _of(self, link: _L) -> _Receiver[_L] | None:
        return next((each for each in self._receivers.values() if each.link is link), None)

    def _counted(self) -> dict[int, int]:
        """Returns the positions that the replicas that count have confirmed, by server."""
        counted = dict[int, int]()
        full = self._bytes > BACKLOG_BYTES
        for server in self.backups | self.joining:
            receiver = self._receivers.get(server)
            if server in self.backups:
                counted[server] = -1 if receiver is None else receiver.holds
            elif full or (receiver is not None and receiver.waited_from is not None):
                counted[server] = -1 if receiver is None else receiver.confirmed
        return counted

    @property
    def _confirmed(self) -> int:
        """The position up to which every replica that counts has confirmed."""
        return min(self._counted().values(), default=self.position)

    def _at(self, position: int) -> _Entry:
        return self._entries[position - self.position - 1]

    def _pump(self, receiver: _Receiver[_L]) -> list[Tell[_L]]:
        out: list[Tell[_L]] = []
        link = receiver.link
        while link is not None and receiver.sent < self.position and receiver.bytes <= WINDOW_BYTES:
            receiver.sent += 1
            entry = self._at(receiver.sent)
            receiver.bytes += entry.nbytes
            out.append(entry.to(receiver, link))
        return out

    def _settle(self) -> list[Instruction]:
        """Forgets entries that all have; returns what is withheld no longer."""
        for server in self.joining:
            self._look_after(server)
        everybody = [
            receiver.confirmed if (receiver := self._receivers.get(server)) else -1
            for server in self.backups | self.joining
        ]
        first = min(everybody, default=self.position) + 1  # that somebody lacks
        while self._entries and self._entries[0].message.position < first:
            self._bytes -= self._entries.popleft().nbytes
        out: list[Instruction] = []
        confirmed = self._confirmed
        while self._held and self._held[0][0] <= confirmed:
            out += self._held.popleft()[1]
        return out

    def _look_after(self, server: int) -> None:
        """Begins to wait for a joining replica that is nearly there, or notes that it is there."""
        receiver = self._receivers.get(server)
        if receiver is None or receiver.holds < 0:
            return
        if (server, receiver.incarnation) in self.caught_up:
            return
        near = receiver.sent == self.position and receiver.bytes <= _CLOSE_BYTES
        if receiver.waited_from is None and near:
            receiver.waited_from = self.position
        if receiver.waited_from is not None and receiver.confirmed >= receiver.waited_from:
            self.caught_up.append((server, receiver.incarnation))


class _Kept(tuple[torch.Tensor, ...]):
    __slots__ = ()
