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
from itertools import pairwise

from msgspec.structs import replace

from trireme.cluster.view import ShardEntry

Hosts = Mapping[int, str]  # the name of the host of each server, by the server's index

Shards = tuple[ShardEntry, ...]  # shards that together are all slots, in their order


def first_division(hosts: Hosts, slots: int, replicas: int) -> Shards:
    """Divides the slots equally: one shard for each server, which is its primary."""
    primaries = [
        ShardEntry(start, stop, server)
        for (start, stop), server in zip(_parts(slots, len(hosts)), sorted(hosts), strict=True)
    ]
    return _with_backups(primaries, (), hosts, replicas)


def surviving(shards: Shards, live: Collection[int]) -> Shards | None:
    """Returns the shards on live servers, backups as primaries; None if one has no copy left."""
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


def is_whole(shards: Shards, servers: int, replicas: int) -> bool:
    """Returns whether every shard has its copies and none is being filled."""
    filled = not any(shard.joining for shard in shards)
    return filled and not any(missing_copies(shards, servers, replicas))


def missing_copies(shards: Shards, servers: int, replicas: int) -> tuple[int, ...]:
    """Returns how many copies each shard lacks; those that are being filled are lacking."""
    wanted = min(replicas, servers)
    return tuple(max(0, wanted - len(shard.copies)) for shard in shards)


def balanced(shards: Shards, hosts: Hosts, replicas: int) -> Shards:
    """Returns the wanted placement: equal parts, one for each server, copies on different hosts.

    It moves few slots, and is stable. Servers of `hosts` may hold nothing yet, and servers that
    hold copies may be missing there, because they are to leave.
    """
    primaries = _primaries(shards, hosts)
    copies, apart = min(replicas, len(hosts)), len(set(hosts.values()))
    stays = primaries == [replace(shard, backups=(), joining=()) for shard in shards] and all(
        len(shard.copies) == copies
        and all(server in hosts for server in shard.copies)
        and len({hosts[server] for server in shard.copies}) == min(copies, apart)
        for shard in shards
    )
    return shards if stays else _with_backups(primaries, shards, hosts, replicas)


def step_towards(shards: Shards, wanted: Shards) -> Shards:
    """Returns the next shards on the way to a wanted placement, first those that fill copies."""
    filling = tuple(piece for shard in shards for piece in _pieces(shard, wanted))
    if any(piece.joining for piece in filling):
        return filling
    now, then = (
        [replace(each, backups=tuple(sorted(each.backups)), joining=()) for each in some]
        for some in (shards, wanted)
    )
    return () if now == then else wanted


def _parts(slots: int, parts: int) -> list[tuple[int, int]]:
    return list(pairwise(part * slots // parts for part in range(parts + 1))) if parts else []


def _primaries(shards: Shards, servers: Collection[int]) -> list[ShardEntry]:
    """Gives each server an equal part: the one of which it is primary most already."""
    overlaps = sorted(
        (-sum(_overlap(shard, *part) for shard in shards if shard.primary == server), part, server)
        for part in _parts(shards[-1].stop, len(servers))
        for server in servers
    )
    owners: dict[tuple[int, int], int] = {}
    for _, part, server in overlaps:
        if part not in owners and server not in owners.values():
            owners[part] = server
    return [ShardEntry(*part, owners[part]) for part in sorted(owners)]


def _overlap(shard: ShardEntry, start: int, stop: int) -> int:
    return max(0, min(shard.stop, stop) - max(shard.start, start))


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


def _with_backups(
    primaries: Sequence[ShardEntry], shards: Shards, hosts: Hosts, replicas: int
) -> Shards:
    """Returns the shards with backups.

    Servers on other hosts come first; then those that hold the shard already, as long as none gets
    much more than its part; then those with the least; then the next on the ring.
    """
    ring, load = _ring(hosts), Counter[int]()
    fair = (replicas - 1) * (shards[-1].stop if shards else 0) / max(1, len(hosts))
    placed = []
    for shard in primaries:
        size, copies = shard.stop - shard.start, [shard.primary]
        holders = _holders(shard, shards)
        while len(copies) < min(replicas, len(hosts)):
            ranks = [
                (
                    any(hosts[server] == hosts[copy] for copy in copies),
                    server not in holders or load[server] + size / 2 > fair,
                    load[server],
                    (ring.index(server) - ring.index(shard.primary)) % len(ring),
                    server,
                )
                for server in ring
                if server not in copies
            ]
            chosen = min(ranks)[-1]
            load[chosen] += size
            copies.append(chosen)
        placed.append(replace(shard, backups=tuple(copies[1:])))
    return tuple(placed)


def _holders(wanted: ShardEntry, shards: Shards) -> set[int]:
    overlap = [set(shard.copies) for shard in shards if _overlap(shard, wanted.start, wanted.stop)]
    return set[int].intersection(*overlap) if overlap else set()


def _ring(hosts: Hosts) -> list[int]:
    """Returns the servers, one of each host in turn, so that neighbours are on different hosts."""
    by_host: dict[str, list[int]] = {}
    for server in sorted(hosts):
        by_host.setdefault(hosts[server], []).append(server)
    turns = max(map(len, by_host.values()), default=0)
    return [held[turn] for turn in range(turns) for held in by_host.values() if turn < len(held)]
