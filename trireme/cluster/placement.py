"""Where the copies of each slot lie: which servers hold which shards, as primary or as backup.

Pure functions from servers and shards to shards. The membership calls them; see
docs/decisions/0037-replication.md for what primaries and backups do.
"""

from __future__ import annotations

from collections.abc import Mapping

from trireme.cluster.view import ShardEntry

Hosts = Mapping[int, str]
"""The name of the host of each live server, by the server's index."""


def first_division(hosts: Hosts, slots: int, replicas: int) -> tuple[ShardEntry, ...]:
    """Divides the slots equally: one shard for each server, which is its primary.

    Args:
        hosts: the live servers.
        slots: how many slots there are; at least one for each server.
        replicas: how many servers shall hold each shard. There are fewer where the servers are few.

    Returns:
        The shards, in the order of their slots; none without servers.
    """
    servers = sorted(hosts)
    bounds = (
        [number * slots // len(servers) for number in range(len(servers) + 1)] if servers else []
    )
    return tuple(
        ShardEntry(start, stop, primary, _backups(hosts, primary, replicas - 1))
        for primary, start, stop in zip(servers, bounds, bounds[1:], strict=False)
    )


def _backups(hosts: Hosts, primary: int, count: int) -> tuple[int, ...]:
    """Returns the servers that follow a primary on the ring, those on hosts of their own first."""
    ring = _ring(hosts)
    at = ring.index(primary)
    followers = ring[at + 1 :] + ring[:at]
    used, chosen = {hosts[primary]}, list[int]()
    for server in followers:
        if len(chosen) < count and hosts[server] not in used:
            used.add(hosts[server])
            chosen.append(server)
    chosen += [server for server in followers if server not in chosen][: count - len(chosen)]
    return tuple(chosen)


def _ring(hosts: Hosts) -> list[int]:
    """Returns the servers, one of each host in turn, so that neighbours are on different hosts."""
    by_host: dict[str, list[int]] = {}
    for server in sorted(hosts):
        by_host.setdefault(hosts[server], []).append(server)
    turns = max(map(len, by_host.values()))
    return [held[turn] for turn in range(turns) for held in by_host.values() if turn < len(held)]
