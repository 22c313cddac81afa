"""Where the copies of each slot lie: which servers hold which shards, as primary or as backup.

Pure functions from servers and shards to shards; docs/decisions/0037-replication.md tells what
primaries and backups do. Shards move in two steps, each a generation. In the first, servers *join*
the shards of which they are to hold copies: a shard is cut where only a part of it moves. When all
have caught up, the second takes the wanted bounds and primaries, and drops the copies that are not
wanted any more. So there are never fewer copies than before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

from msgspec.structs import replace

from trireme.cluster.view import ShardEntry

MAX_RUNS = 3
"""In how many runs of contiguous slots a server may own its part. A run is a message per step."""


class Run(NamedTuple):
    """Contiguous slots [start, stop) with one owner; None where nobody owns them yet."""

    start: int
    stop: int
    owner: int | None

    @property
    def length(self) -> int:
        return self.stop - self.start


def runs_of(owners: Sequence[int | None]) -> list[Run]:
    """Returns the runs of a division, in the order of their slots."""
    runs, start = [], 0
    for owner, slots in groupby(owners):
        stop = start + len(list(slots))
        runs.append(Run(start, stop, owner))
        start = stop
    return runs


def equal_bounds(slots: int, parts: int) -> list[int]:
    """Returns the slots at which equal parts begin, and the number of slots."""
    return [part * slots // parts for part in range(parts + 1)]


def divide(owners: Sequence[int], servers: Collection[int]) -> list[int]:
    """Returns the owner of each slot: equal parts of the servers, with few moves and runs.

    Servers with more than their part give slots up at the ends of their runs; those with less take
    them, next to their own where they can. If that leaves a server with more than `MAX_RUNS` runs,
    each server gets one run, and more slots move. A division that is so already stays.
    """
    load = Counter(owners)
    part, remainder = divmod(len(owners), len(servers))
    ordered = sorted(servers, key=lambda server: (-load[server], server))
    quotas = {server: part + (at < remainder) for at, server in enumerate(ordered)}
    held: list[int | None] = [owner if owner in quotas else None for owner in owners]
    for place, server in enumerate(dict.fromkeys(owners)):
        if server in quotas:  # neighbours in turn, so that what two of them give up adjoins
            _release(held, server, held.count(server) - quotas[server], at_end=place % 2 == 0)
    divided = _assign(held, quotas)
    if max(Counter(run.owner for run in runs_of(divided)).values()) > MAX_RUNS:
        return _one_run_each(owners, servers)
    return divided


def _release(held: list[int | None], server: int, surplus: int, *, at_end: bool) -> None:
    """Takes slots from a server: whole runs if they are short, else an end of a run."""
    while surplus > 0:
        own = [run for run in runs_of(held) if run.owner == server]
        run = min(own, key=lambda run: run.length)
        if run.length > surplus:
            run = own[-1] if at_end else own[0]
        length = min(surplus, run.length)
        start = run.stop - length if at_end else run.start
        held[start : start + length] = [None] * length
        surplus -= length


def _assign(held: list[int | None], quotas: dict[int, int]) -> list[int]:
    """Gives the free slots to the servers that lack some, their neighbours first."""
    lacks = Counter(quotas)
    lacks.subtract(owner for owner in held if owner is not None)
    slots = list(held)

    def rank(run: Run) -> tuple[bool, int, Run]:
        beside = *slots[max(0, run.start - 1) : run.start], *slots[run.stop : run.stop + 1]
        return run.owner not in beside, -run.length, run

    while free := [run for run in runs_of(slots) if run.owner is None]:
        taken = min((taking for run in free for taking in _takings(slots, run, lacks)), key=rank)
        slots[taken.start : taken.stop] = [taken.owner] * taken.length
        lacks[taken.owner or 0] -= taken.length
    return [owner for owner in slots if owner is not None]


def _takings(slots: list[int | None], free: Run, lacks: Counter[int]) -> list[Run]:
    """Returns what each server could take of a free run: at its end, where it is a neighbour."""
    takings = []
    for server, lack in lacks.items():
        length = min(lack, free.length)
        first = free.stop - length if slots[free.stop : free.stop + 1] == [server] else free.start
        if length > 0:
            takings.append(Run(first, first + length, server))
    return takings


def _one_run_each(owners: Sequence[int], servers: Collection[int]) -> list[int]:
    """Gives each server one run: the one in which it owns most already."""
    bounds = equal_bounds(len(owners), len(servers))
    parts = list(pairwise(bounds))
    overlaps = sorted(
        (-Counter(owners[start:stop])[server], start, stop, server)
        for start, stop in parts
        for server in servers
    )
    divided, placed = [0] * len(owners), set[int]()
    taken = set[int]()
    for _, start, stop, server in overlaps:
        if start not in taken and server not in placed:
            divided[start:stop] = [server] * (stop - start)
            taken.add(start)
            placed.add(server)
    return divided


Hosts = Mapping[int, str]
"""The name of the host of each server, by the server's index."""

Shards = tuple[ShardEntry, ...]
"""Shards that together are all slots, in their order."""

Apart = Collection[tuple[int, int]]
"""Pairs of servers, the lower index first, that do not reach each other."""


def first_division(hosts: Hosts, slots: int, replicas: int) -> Shards:
    """Divides the slots equally: one shard for each server, which is its primary."""
    if not hosts:
        return ()
    servers = sorted(hosts)
    bounds = pairwise(equal_bounds(slots, len(servers)))
    runs = [Run(*bound, server) for bound, server in zip(bounds, servers, strict=True)]
    return _with_backups(runs, (), hosts, replicas)


def surviving(shards: Shards, live: Collection[int]) -> Shards | None:
    """Returns the shards without the servers that are gone; None if one has no copy left.

    Backups become primaries. `live` are the servers that still hold what the view says.
    """
    rest = []
    for shard in shards:
        copies = [server for server in shard.copies if server in live]
        if not copies:
            return None
        # A backup that becomes the primary has no state with which to fill others.
        stays = copies[0] == shard.primary
        joining = tuple(server for server in shard.joining if stays and server in live)
        rest.append(replace(shard, primary=copies[0], backups=tuple(copies[1:]), joining=joining))
    return tuple(rest)


def caught_up(shards: Shards, number: int, server: int) -> Shards:
    """Returns the shards after a server's joining copy of one has become a backup."""
    shard = shards[number]
    joining = tuple(each for each in shard.joining if each != server)
    filled = replace(shard, backups=(*shard.backups, server), joining=joining)
    return (*shards[:number], filled, *shards[number + 1 :])


def emptied(shards: Shards, number: int, server: int) -> Shards:
    """Returns the shards without a server's copy of one. The last copy stays."""
    shard = shards[number]
    rest = surviving((shard,), {*shard.copies, *shard.joining} - {server}) or (shard,)
    return (*shards[:number], *rest, *shards[number + 1 :])


def parted(shards: Shards, one: int, other: int) -> Shards:
    """Returns the shards of which no copies of two servers need each other, as far as can be.

    Every primary needs the one of shard 0. So if one of the two is that, it takes over from the
    other what it has a copy of, and the other gives all roles up that need it.
    """
    leader = shards[0].primary
    if one == leader or other == leader:
        other = other if one == leader else one
        for number, shard in enumerate(shards):
            if leader in shard.backups and shard.primary == other:
                backups = (leader, *(each for each in shard.backups if each != leader))
                shards = (*shards[:number], replace(shard, backups=backups), *shards[number + 1 :])
            if other == shard.primary or leader == shard.primary:
                shards = emptied(shards, number, other)
            if other == shards[number].primary:  # it has the last copy
                shards = emptied(shards, number, leader)
        return shards
    for number, shard in enumerate(shards):
        if shard.primary in (one, other):
            shards = emptied(shards, number, other if shard.primary == one else one)
    return shards


def needs(shards: Shards, apart: Apart) -> bool:
    """Returns whether copies are to be filled by servers that do not reach them."""
    return any(
        pair_of(shard.primary, server) in apart for shard in shards for server in shard.joining
    )


def pair_of(one: int, other: int) -> tuple[int, int]:
    """Returns two servers as they are in `Apart`."""
    return min(one, other), max(one, other)


def is_whole(shards: Shards, servers: int, replicas: int) -> bool:
    """Returns whether every shard has its copies and none is being filled."""
    filled = not any(shard.joining for shard in shards)
    return filled and not any(missing_copies(shards, servers, replicas))


def missing_copies(shards: Shards, servers: int, replicas: int) -> tuple[int, ...]:
    """Returns how many copies each shard lacks; those that are being filled are lacking."""
    wanted = min(replicas, servers)
    return tuple(max(0, wanted - len(shard.copies)) for shard in shards)


def completed(shards: Shards, hosts: Hosts, replicas: int, apart: Apart = ()) -> Shards:
    """Returns the shards with the backups that are missing, and otherwise as they are."""
    choice = _Choice(shards, hosts, replicas, apart)
    for shard in shards:
        choice.add_load(shard, shard.backups)
    return tuple(
        replace(shard, backups=choice.copies(shard, [s for s in shard.copies if s in hosts])[1:])
        for shard in shards
    )


def balanced(shards: Shards, hosts: Hosts, replicas: int, apart: Apart = ()) -> Shards:
    """Returns the wanted placement: equal parts, few runs, copies on different hosts.

    It moves few slots, and is stable. Servers of `hosts` may hold nothing yet, and servers that
    hold copies may be missing there, because they are to leave.
    """
    owners = [shard.primary for shard in shards for _ in range(shard.start, shard.stop)]
    runs = runs_of(divide(owners, hosts.keys()))
    if _is_balanced(shards, runs, hosts, replicas):
        return shards
    return _with_backups(runs, shards, hosts, replicas, apart)


def step_towards(shards: Shards, wanted: Shards) -> Shards:
    """Returns the shards of the next generation on the way to a wanted placement.

    They have copies to be filled, if the wanted placement needs some; else they are the wanted
    ones. There are none if the shards are as wanted.
    """
    filling = tuple(piece for shard in shards for piece in _pieces(shard, wanted))
    if any(piece.joining for piece in filling):
        return filling
    now, then = (
        [replace(each, backups=tuple(sorted(each.backups)), joining=()) for each in some]
        for some in (shards, wanted)
    )
    return () if now == then else wanted


def _is_balanced(shards: Shards, runs: Sequence[Run], hosts: Hosts, replicas: int) -> bool:
    """Returns whether shards are these runs, each with its copies on as many hosts as can be."""
    count, apart = min(replicas, len(hosts)), len(set(hosts.values()))
    return [Run(shard.start, shard.stop, shard.primary) for shard in shards] == runs and all(
        len(shard.copies) == count
        and all(server in hosts for server in shard.copies)
        and len({hosts[server] for server in shard.copies}) == min(count, apart)
        for shard in shards
    )


def _pieces(shard: ShardEntry, wanted: Shards) -> Shards:
    """Cuts a shard where the servers that must join it differ."""
    pieces = list[ShardEntry]()
    for other in wanted:
        start, stop = max(shard.start, other.start), min(shard.stop, other.stop)
        if start >= stop:
            continue
        joining = tuple(server for server in other.copies if server not in shard.copies)
        if pieces and set(pieces[-1].joining) == set(joining):
            pieces[-1] = replace(pieces[-1], stop=stop)
        else:
            pieces.append(replace(shard, start=start, stop=stop, joining=joining))
    return tuple(pieces)


# Backups -----------------------------------------------------------------------------------------


def _with_backups(
    runs: Sequence[Run], shards: Shards, hosts: Hosts, replicas: int, apart: Apart = ()
) -> Shards:
    """Returns the shards that runs are, with backups."""
    choice, placed = _Choice(shards, hosts, replicas, apart), list[ShardEntry]()
    for run in runs:
        assert run.owner is not None
        shard = ShardEntry(run.start, run.stop, run.owner)
        shard = replace(shard, backups=choice.copies(shard, [run.owner])[1:])
        placed.append(shard)
    return tuple(placed)


class _Choice:
    """Chooses the backups of one shard after the other.

    Servers on other hosts come first; then those that hold the shard already, as long as none gets
    much more than its part; then those with the least; then the next on the ring. Never one that
    does not reach the primary.
    """

    def __init__(self, shards: Shards, hosts: Hosts, replicas: int, apart: Apart) -> None:
        self._shards = shards
        self._apart = apart
        self._hosts = hosts
        self._ring = _ring(hosts)
        self._count = min(replicas, len(hosts))
        slots = shards[-1].stop if shards else 0
        self._part = (replicas - 1) * slots / len(hosts)
        self._load = Counter[int]()

    def add_load(self, shard: ShardEntry, servers: Sequence[int]) -> None:
        for server in servers:
            self._load[server] += shard.stop - shard.start

    def copies(self, shard: ShardEntry, kept: Sequence[int]) -> tuple[int, ...]:
        """Returns the servers that shall hold a shard: those kept, and as many more."""
        copies, holders = list(kept), self._holders(shard)
        while len(copies) < self._count:
            others = [
                server
                for server in self._ring
                if server not in copies and pair_of(server, shard.primary) not in self._apart
            ]
            if not others:
                break
            used = {self._hosts[server] for server in copies}
            chosen = min(others, key=lambda server: self._rank(server, shard, used, holders))
            self.add_load(shard, [chosen])
            copies.append(chosen)
        return tuple(copies)

    def _rank(
        self, server: int, shard: ShardEntry, used: set[str], holders: set[int]
    ) -> tuple[bool, bool, int, int]:
        ring, load = self._ring, self._load[server]
        much = load + (shard.stop - shard.start) / 2 > self._part
        distance = (ring.index(server) - ring.index(shard.primary)) % len(ring)
        return self._hosts[server] in used, server not in holders or much, load, distance

    def _holders(self, wanted: ShardEntry) -> set[int]:
        """Returns the servers that hold all slots of a shard already."""
        overlap = [
            set(shard.copies)
            for shard in self._shards
            if shard.start < wanted.stop and wanted.start < shard.stop
        ]
        return set[int].intersection(*overlap) if overlap else set()


def _ring(hosts: Hosts) -> list[int]:
    """Returns the servers, one of each host in turn, so that neighbours are on different hosts."""
    by_host: dict[str, list[int]] = {}
    for server in sorted(hosts):
        by_host.setdefault(hosts[server], []).append(server)
    turns = max(map(len, by_host.values()))
    return [held[turn] for turn in range(turns) for held in by_host.values() if turn < len(held)]
