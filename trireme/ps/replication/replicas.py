"""All replicas of one server, and what its connections are for. Without I/O.

A view names the shards and the servers that hold replicas of them. A view of a new generation
divides the slots into other shards: each server makes its new replicas from the old ones, which
have stopped at one decision. A view of a new life follows the loss of all copies of a shard: every
server begins anew, without values, and the workers load a checkpoint.

The first message of a connection says its purpose: to ask a shard (`ConnectToShard`), to speak with
shard 0 as the primary of another (`ConnectToLeader`), to follow a primary (`FollowPrimary`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

import msgspec

from trireme.cluster.messages import LinkLost
from trireme.cluster.view import ServerEntry, ShardEntry, View
from trireme.ps.messages import FromServer
from trireme.ps.replication.dispatcher import AuthenticatedLink, Dispatcher
from trireme.ps.replication.log import ReplicationLog
from trireme.ps.replication.messages import ConnectToLeader, ConnectToShard, FollowPrimary, Pulse
from trireme.ps.replication.replica import Output, Replica
from trireme.ps.replication.stall_clock import StallClock
from trireme.ps.shard.quiet_state import export, united
from trireme.ps.shard.shard import Shard
from trireme.wire.message import Message

_L = TypeVar("_L", bound=AuthenticatedLink)


class Peer(msgspec.Struct, frozen=True):
    """A connection that this server makes to another one."""

    shard: int  # of which shard of this server it is
    follows: bool  # the primary of the same shard; else it is primary, and speaks with shard 0
    server: int  # the index of the server to connect to


class Replicas(Generic[_L]):
    """All replicas of one server.

    Args:
        make: makes an empty shard with its dispatcher, by its number.
        patience: after so many seconds without progress another server's copy of a shard is
            reported, or the primary of shard 0, of which nothing is heard.
    """

    def __init__(
        self,
        server: int,
        make: Callable[[int], Dispatcher[_L]] = lambda number: Dispatcher(Shard(number)),
        patience: float = math.inf,
    ) -> None:
        self.view = View(0, (), ())  # the newest view
        self.incarnation = 0  # of this server
        self._server = server
        self._make = make
        self._patience = patience
        self._made_here: dict[_L, Peer] = {}
        # By shard: how many signs of life of shard 0 have come, and for how long none.
        self._pulses = Counter[int]()
        self._pulseless = StallClock[tuple[int, ServerEntry]](patience)
        # The number of the newest connection, by server, kind of opener and shard: a process makes
        # another one for the same purpose only when it has given up the one before.
        self._newest: dict[tuple[int, int, int], int] = {}
        # The replicas, by shard. Before the first view all that they are asked is refused.
        self.by_shard: dict[int, Replica[_L]] = {server: Replica(server, server, 1, make, patience)}

    # -- views -----------------------------------------------------------------------------------

    def take(self, now: float, view: View) -> Iterator[tuple[Replica[_L], Output[_L]]]:
        """Takes the coordinator's newest view; yields outputs with their replicas."""
        before = self.view
        if view.number <= before.number:
            return
        self.view = view
        if (view.life, view.generation) == (before.life, before.generation) and before.number:
            for replica in [*self.by_shard.values()]:
                for output in replica.view(now, view):
                    yield replica, output
            for number in self.by_shard.keys() - self._held().keys():
                del self.by_shard[number]
        else:
            yield from self._begin(now, view, continues=view.life == before.life)

    def _begin(
        self, now: float, view: View, *, continues: bool
    ) -> Iterator[tuple[Replica[_L], Output[_L]]]:
        """Begins a generation: with the states of the one before, or without values."""
        old, self.by_shard = self.by_shard, {}
        for replica in old.values():
            for reply in replica.dismiss(view):
                yield replica, reply
        for number, entry in self._held().items():
            replica = Replica(self._server, number, view.generation, self._make, self._patience)
            self.by_shard[number] = replica
            sources: list[Replica[_L]] | None = []
            if view.generation > 1 and continues:
                sources = _sources(old, view, entry.start, entry.stop)
            if self._server in entry.joining or sources is None:  # it may have missed the beginning
                replica.take_role(view)  # and waits for the state
                continue
            quiets = [export(source.shard.state) for source in sources]
            # Where some have no values yet, nobody has trained: the chief loads them again.
            known = [quiet for quiet in quiets if quiet is not None]
            whole = united(known) if known and len(known) == len(quiets) else None
            for output in replica.begin(now, view, whole):
                yield replica, output

    def _entries(self, view: View) -> Mapping[int, ShardEntry]:
        if view.shards:
            return dict(enumerate(view.shards))
        return {self._server: ShardEntry(0, 1, self._server)}

    def _held(self) -> Mapping[int, ShardEntry]:
        entries = self._entries(self.view).items()
        return {n: e for n, e in entries if self._server in (*e.copies, *e.joining)}

    # -- connections -----------------------------------------------------------------------------

    def closed(self, link: _L) -> None:
        self._made_here.pop(link, None)

    def _is_superseded(self, link: _L, message: ConnectToLeader | FollowPrimary) -> bool:
        key = link.identity.index, message.kind, message.shard
        self._newest[key] = max(link.number, self._newest.get(key, 0))
        return link.number < self._newest[key]

    def _primary_of(self, message: ConnectToShard | FollowPrimary) -> Replica[_L] | None:
        replica = self.local(message.shard)
        known = replica is not None and replica.generation == message.generation
        return replica if known else None

    def addressed(self, link: _L, message: ConnectToShard) -> Replica[_L] | None:
        """Returns the replica that a task asks; None where this server cannot answer."""
        if not self.view.number:  # another process of this server's name may have had a replica
            return None
        return self._primary_of(message)

    def spoken(
        self, link: _L, message: ConnectToLeader
    ) -> tuple[Replica[_L], list[FromServer]] | None:
        """Takes another primary's connection to shard 0; returns its replica, and what to send."""
        replica, entry = self.local(0), self._entries(self.view).get(message.shard)
        if replica is None or replica.generation != message.generation:
            return None
        speaks = message.shard and self._is_primary(link.identity.index, message.shard, entry)
        if not speaks or self._is_superseded(link, message):
            return None
        return replica, [*replica.dispatcher.speaks(link, message.shard), Pulse()]

    def _is_primary(self, server: int, shard: int, entry: ShardEntry | None) -> bool:
        if not self.view.shards:
            return server == shard
        return entry is not None and entry.primary == server

    def followed(
        self, link: _L, message: FollowPrimary
    ) -> tuple[Replica[_L], list[Output[_L]]] | None:
        """Takes the connection of a replica to its primary; None where that is not so."""
        replica, entry = self._primary_of(message), self.view.server(link.identity.index)
        if replica is None or entry is None or entry.incarnation != message.incarnation:
            return None
        outputs = None if self._is_superseded(link, message) else replica.follow(link, message)
        return None if outputs is None else (replica, outputs)

    def peers(self) -> list[Peer]:
        """Returns the connections that this server should have to others."""
        entries, out = self._entries(self.view), list[Peer]()
        for number, replica in self.by_shard.items():
            if not replica.primary:
                out.append(Peer(number, True, entries[number].primary))
            elif number and self._leader not in (None, self._server):
                assert self._leader is not None
                out.append(Peer(number, False, self._leader))
        return out

    @property
    def _spoken_to(self) -> list[tuple[int, ServerEntry]]:
        """The shards here that speak with shard 0 elsewhere, and the server of its primary."""
        speak = {each.shard: each.server for each in self.peers() if not each.follows}
        return [(shard, entry) for shard, to in speak.items() if (entry := self.view.server(to))]

    @property
    def _leader(self) -> int | None:
        if self.view.shards:
            return self.view.shards[0].primary
        return 0 if self.view.number else None

    def connected(self, link: _L, peer: Peer) -> tuple[Replica[_L], list[Message]] | None:
        """Takes a connection that this server has made; returns its replica, and what to send."""
        replica = self.by_shard.get(peer.shard)
        if replica is None or peer not in self.peers():
            return None
        self._made_here[link] = peer
        if peer.follows:
            replica.source = link
            return replica, [replica.follows(self.incarnation)]
        words = replica.dispatcher.speaks(link, 0)
        return replica, [ConnectToLeader(replica.number, replica.generation), *words]

    def speakers(self) -> list[_L]:
        """Returns the connections to the primaries of other shards, if that of shard 0 is here."""
        leader = self.local(0)
        return [] if leader is None else [*leader.dispatcher.speakers.values()]

    def pulse(self, link: _L) -> bool:
        """Takes a sign of life of shard 0; returns False where the connection is to another."""
        peer = self._made_here.get(link)
        if peer is None or peer.follows:
            return False
        self._pulses[peer.shard] += 1
        return True

    def look(self, now: float) -> None:
        """Passes the time: notes for how long nothing has been heard of shard 0."""
        self._pulseless.look(now, {each: self._pulses[each[0]] for each in self._spoken_to})

    def reports(self) -> list[Message]:
        """Returns what the coordinator should know; it is told again until its view shows it."""
        out = [each for replica in self.by_shard.values() for each in replica.reports()]
        for shard, entry in self._spoken_to:
            if (shard, entry) in self._pulseless.overdue:
                out.append(LinkLost(self.view.generation, shard, entry.index, entry.incarnation))
        return out

    def logs(self) -> list[ReplicationLog[_L]]:
        """Returns the logs of the shards that this server is primary of."""
        return [each.log for each in self.by_shard.values() if each.log is not None]

    def local(self, shard: int) -> Replica[_L] | None:
        replica = self.by_shard.get(shard)
        return replica if replica is not None and replica.primary else None

    def missed(self) -> Iterator[tuple[int, int, FromServer]]:
        """Yields (speaking shard, hearing shard, last message) where both primaries are here.

        A primary that has just been promoted here may not have heard them.
        """
        leader = self.local(0)
        if leader is None:
            return
        for number, replica in self.by_shard.items():
            if number and replica.primary:
                for word in replica.dispatcher.last_sent(0):
                    yield number, 0, word
                for word in leader.dispatcher.last_sent(number):
                    yield 0, number, word


def _sources(
    old: Mapping[int, Replica[_L]], view: View, start: int, stop: int
) -> list[Replica[_L]] | None:
    """Returns the old replicas with the slots [start, stop), in order; None if some are missing."""
    found = []
    at = start
    for _, replica in sorted(old.items()):
        slots = replica.slots
        if slots is None or replica.generation + 1 != view.generation or not replica.began:
            continue
        if not replica.shard.stopped or replica.lacks:
            continue
        if slots[0] <= at < slots[1]:
            found.append(replica)
            at = slots[1]
        if at >= stop:
            return found
    return None
