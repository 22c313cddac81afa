"""Asynchronous pushes over several servers: staged at each, applied where every server has them.

A worker may die when its push has reached some servers and not others, and an update that was
applied cannot be taken back from an optimizer with momentum. So no server applies a push by itself,
unless it is the only one. Each of the others tells shard 0 which pushes it has staged. Shard 0
commits a push as soon as every server has staged it, and all servers apply what is committed, in
its order: the parts of the values are always of one sequence of updates. Shard 0 tells the others
before it applies a push itself, so that all do so at the same time.

When a worker is out of the job, shard 0 drops what it has not committed. What another server has
said that it has staged, it keeps until shard 0 has taken that view too: by then the push is
committed, or never will be. This is the two-phase commit of databases with shard 0 as its
coordinator. Source: Bernstein, Hadzilacos, Goodman, Concurrency Control and Recovery in Database
Systems (1987), section 7.4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

import msgspec

from trireme.cluster.view import View
from trireme.ps.server_messages import PushesCommitted, PushesStaged
from trireme.ps.shard.instructions import Send
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.push_table import Pending

Entry = tuple[int, int, int, bool]
"""A decision: worker, incarnation, sequence, and whether the push is applied; else it is stale."""


class _OtherServer(msgspec.Struct):
    """What shard 0 knows of another server.

    Attributes:
        staged: the newest push of each worker that it has staged: (incarnation, sequence).
        known: how many decisions it has received.
        sent: how many decisions were sent to it.
        view: the number of the view that was last sent to it.
    """

    staged: dict[int, tuple[int, int]]
    known: int = 0
    sent: int = 0
    view: int = -1


class CommitLeader:
    """Commits at shard 0, which decides.

    Args:
        servers: how many there are.
    """

    def __init__(self, servers: int) -> None:
        self._others = range(1, servers)
        self._told: dict[int, _OtherServer] = {}
        self._waiting: dict[Participant, Pending] = {}  # a worker has one push under way
        self._ready: deque[Pending] = deque()
        self._decided: tuple[Pending, bool] | None = None
        self._log: deque[Entry] = deque()  # the decisions that some server may not know
        self._first = 0  # the number of the first of them

    @property
    def staged(self) -> Sequence[Pending]:
        """The pushes that are staged here and not decided."""
        return [*self._ready, *self._waiting.values()]

    def hear(self, server: int, message: PushesStaged) -> None:
        """Takes what another server has staged. A late or repeated message changes nothing.

        Neither does a message of a server that the job does not have.
        """
        if server not in self._others:
            return
        told = self._told.setdefault(server, _OtherServer({}))
        told.known = max(told.known, min(message.known, self._first + len(self._log)))
        for worker, incarnation, sequence in message.pushes:
            newest = told.staged.get(worker, (0, 0))
            told.staged[worker] = max(newest, (incarnation, sequence))
            owner = Participant(worker, incarnation)
            pending = self._waiting.get(owner)
            if pending is not None and not self._lacking(pending):
                self._ready.append(self._waiting.pop(owner))

    def add(self, pending: Pending) -> None:
        """Stages a push."""
        if self._lacking(pending):
            self._waiting[pending.owner] = pending
        else:
            self._ready.append(pending)

    def drop(self, pending: Pending, view: int) -> None:
        """Drops the push of a worker that is out since a view."""
        if pending in self._ready:
            self._ready.remove(pending)
        else:
            self._waiting.pop(pending.owner, None)

    @property
    def ready(self) -> Pending | None:
        """The push to decide next, as every server has staged it."""
        return self._ready[0] if self._ready else None

    def decide(self, *, applied: bool) -> None:
        """Decides the push that is `ready`: it is applied, or it is stale."""
        pending = self._ready.popleft()
        self._log.append((*pending.owner, pending.push.sequence, applied))
        self._decided = pending, applied

    @property
    def decided(self) -> tuple[Pending, bool] | None:
        """The next decided push that is not carried out here, and whether it is applied."""
        return self._decided

    def done(self) -> None:
        """Notes that the decision about the push that is `decided` is carried out."""
        self._decided = None

    def tell(self, view: int) -> list[Send]:
        """Returns messages to other servers.

        Args:
            view: the number of the view that this server has taken.
        """
        end = self._first + len(self._log)
        out = []
        for server, told in self._told.items():  # a server that has staged nothing needs no message
            if told.sent < end or told.view < view:
                told.sent, told.view = end, view
                entries = tuple(islice(self._log, told.known - self._first, None))
                out.append(Send(server, PushesCommitted(told.known, entries, view)))
        if out:
            known = min(told.known for told in self._told.values())
            while self._log and self._first < known:  # every server knows these decisions
                self._log.popleft()
                self._first += 1
        return out

    def missing(self, pending: Pending, view: View) -> tuple[str, ...]:
        """Returns the tasks that a staged push waits for; the view knows where each shard is."""
        return tuple(map(view.primary_name, self._lacking(pending)))

    def _lacking(self, pending: Pending) -> list[int]:
        """Returns the servers that have not said that they have staged a push."""
        worker, mine = pending.owner.worker, (pending.owner.incarnation, pending.push.sequence)
        return [
            server
            for server in self._others
            if server not in self._told or self._told[server].staged.get(worker) != mine
        ]


class CommitFollower:
    """Commits at each other server: it reports the pushes that it has staged, and follows shard 0.

    Its methods are those of `CommitLeader`.
    """

    def __init__(self) -> None:
        self._staged: dict[Participant, Pending] = {}
        self._decided: deque[Entry] = deque()  # by shard 0, and not yet here
        self._known = 0  # how many decisions of shard 0 were heard of
        self._leader_view = 0
        self._out: dict[Participant, int] = {}  # whose worker is out, since which view
        self._news = False

    @property
    def staged(self) -> Sequence[Pending]:
        """The pushes that are staged here and not decided, in the order in which they came."""
        return list(self._staged.values())

    def hear(self, message: PushesCommitted) -> None:
        """Takes shard 0's decisions. A late or repeated message changes nothing."""
        new = message.pushes[max(self._known - message.first, 0) :]
        if message.first > self._known or not all(map(self._has, new)):
            return  # shard 0 decides in order, and only pushes that were reported to it
        self._decided.extend(new)
        self._known += len(new)
        self._leader_view = max(self._leader_view, message.view)
        for owner, view in [*self._out.items()]:
            self._forget(owner, view)

    def _has(self, entry: Entry) -> bool:
        worker, incarnation, sequence, _ = entry
        staged = self._staged.get(Participant(worker, incarnation))
        return staged is not None and staged.push.sequence == sequence

    def add(self, pending: Pending) -> None:
        self._staged[pending.owner] = pending
        self._news = True

    def drop(self, pending: Pending, view: int) -> None:
        """As `CommitLeader.drop`, unless shard 0 may commit the push."""
        owner = pending.owner
        self._out[owner] = view
        if not self._forget(owner, view):  # a copy: its worker may write to the memory again
            self._staged[owner] = pending.kept()

    def _forget(self, owner: Participant, view: int) -> bool:
        """Drops a push whose worker is out, if shard 0 will never commit it."""
        committed = any(entry[:2] == owner for entry in self._decided)
        if self._leader_view < view or committed:
            return False
        del self._out[owner]
        self._staged.pop(owner, None)
        return True

    @property
    def decided(self) -> tuple[Pending, bool] | None:
        if not self._decided:
            return None
        worker, incarnation, sequence, applied = self._decided[0]
        pending = self._staged[Participant(worker, incarnation)]
        assert pending.push.sequence == sequence, f"push {sequence} of worker:{worker} is not here"
        return pending, applied

    def done(self) -> None:
        owner = Participant(*self._decided.popleft()[:2])
        del self._staged[owner]
        self._out.pop(owner, None)

    def tell(self, view: int) -> Sequence[Send]:
        if not self._news:
            return ()
        self._news = False
        pushes = tuple((*who, pending.push.sequence) for who, pending in self._staged.items())
        return [Send(0, PushesStaged(self._known, pushes))]

    def missing(self, pending: Pending, view: View) -> tuple[str, ...]:
        return (view.primary_name(0),)
