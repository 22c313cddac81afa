"""Checks that broken links and stuck loops are noticed in time, whatever else happens.

It looks from outside: at the network's cuts, at processes and at the coordinator's state, and
shares no code with those who notice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Protocol

from tests.simulation.dealing import Violation
from tests.simulation.launcher import Home, Launcher
from tests.simulation.server import Server
from trireme.cluster.state import Policy

_LOOK_SECONDS = 0.1
_PATIENCES = 3.0
_SLACK_SECONDS = 3.0  # for what is slow on its way
_MOST_TRIES = 5
_TO_KNOW = 2.0  # patiences after which a server knows that its loop stands still

Pair = tuple[Server, Server]


class Place(Home, Protocol):
    """What is checked."""

    launcher: Launcher
    policy: Policy


class NoticeChecker:
    """Checks one job, while it runs.

    Args:
        place: the job.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._since: dict[Hashable, float] = {}  # what should be noticed, and is not
        self._stuck: dict[
            Server, tuple[float, int]
        ] = {}  # since when, and its incarnation soon after
        self._needed: set[Pair] = set()
        self._tries: Counter[Pair] = Counter()  # how often a copy was placed that a cut pair needs

    def begin(self) -> None:
        """Looks from time to time, until the job is over."""
        if self._place.coordinator.done or self._place.coordinator.state.over is not None:
            return
        self._look()
        self._place.loop.after(_LOOK_SECONDS, self.begin)

    def _look(self) -> None:
        now = self._place.loop.now
        self._count_tries()
        self._check_who_is_admitted()
        there = set(self._unnoticed())
        self._since = {what: self._since.get(what, now) for what in there}
        limit = _PATIENCES * self._place.policy.heartbeat_timeout + _SLACK_SECONDS
        for what, since in self._since.items():
            if now - since > limit:
                raise Violation(f"for {now - since:.1f} s nobody has noticed that {what}")

    def _unnoticed(self) -> Iterator[Hashable]:
        """Yields what the coordinator should soon have noticed."""
        if not self._place.coordinator.process.alive:
            return
        for server in self._place.launcher.servers.values():
            if server.stuck and self._is_heard(server):
                yield f"{server.name}, pid {server.pid}, is stuck"
        for one, other in self._needed:
            if all(self._is_well(server) for server in (one, other)):
                yield f"{one.name} and {other.name} do not hear each other"

    def _needed_and_cut(self) -> Iterator[Pair]:
        """Yields servers that do not hear each other, and of which a shard can do without one.

        One has the primary; the other a copy, or the primary of shard 0.
        """
        servers = {server.name: server for server in self._place.launcher.servers.values()}
        for names, until in self._place.network.parted.items():
            if self._place.loop.now < until and servers.keys() >= set(names):
                one, other = (servers[name] for name in names)
                shards = self._place.coordinator.view.shards
                for shard in shards:
                    others = {*shard.backups, *shard.joining}
                    if shard.backups:
                        others.add(shards[0].primary)
                    if {one.index, other.index} in [{shard.primary, each} for each in others]:
                        yield one, other
                        break

    def _is_well(self, server: Server) -> bool:
        """Whether a server does what it should by the newest view, and the coordinator hears it."""
        number = self._place.coordinator.view.number
        goes_on = not server.process.stopped and server.handler.replicas.view.number == number
        return goes_on and self._is_heard(server)

    def _is_heard(self, server: Server) -> bool:
        """Whether the coordinator counts on this very process, and hears it."""
        state = self._place.coordinator.state
        task = state.tasks.get(server.name)
        if task is None:  # it has not joined, or the job is smaller now
            return False
        silence = self._place.loop.now - task.heard
        counts = task.state == "live" and task.pid == server.pid and state.view is not None
        return counts and silence < state.policy.heartbeat_timeout / 2

    def _check_who_is_admitted(self) -> None:
        """A server does not come back before its loop goes on, once it can know of that."""
        now, tasks = self._place.loop.now, self._place.coordinator.state.tasks
        stuck = [server for server in self._place.launcher.servers.values() if server.stuck]
        patience = _TO_KNOW * self._place.policy.heartbeat_timeout
        found: dict[Server, tuple[float, int]] = {}
        for server in stuck:
            since, before = self._stuck.get(server, (now, 0))
            known = now - since > patience
            found[server] = since, before if known else server.member.state.incarnation
            task = tasks.get(server.name)
            if task is None or not known or (task.state, task.pid) != ("live", server.pid):
                continue
            if task.incarnation > before > 0:
                raise Violation(f"{server.name} was admitted again though it is stuck")
        self._stuck = found

    def _count_tries(self) -> None:
        """A link that has cost a copy serves none for a while, which grows.

        A server that is deaf besides is lost for its silence, and comes back without that.
        """
        needed, network = set(self._needed_and_cut()), self._place.network
        for pair in needed - self._needed:
            self._tries[pair] += not any(network.is_deaf(server.name) for server in pair)
            if self._tries[pair] > _MOST_TRIES:
                raise Violation(f"copies are placed again and again over the link of {pair}")
        self._needed = needed
