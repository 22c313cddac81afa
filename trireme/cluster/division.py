"""Divides the slots among servers: equal parts, with few moves and in few runs.

A division is a sequence with the owner of each slot. Pure functions on such sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

MAX_RUNS = 3
"""In how many runs of contiguous slots a server may own its part. A run is a message per step."""


class Run(NamedTuple):
    """Contiguous slots [start, stop) with one owner; None where nobody owns them yet."""

    start: int
    stop: int
    owner: int | None

    @property
    def length(self) -> int:
        """How many slots it has."""
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
    """Divides the slots equally among servers, and moves few of them.

    Servers with more than their part give slots up at the ends of their runs; those with less take
    them, next to their own where they can. If that leaves a server with more than `MAX_RUNS` runs,
    each server gets one run, and more slots move.

    Args:
        owners: the owner of each slot today, who need not be among the servers.
        servers: those that shall own them; at least one, and at most as many as there are slots.

    Returns:
        The new owner of each slot. A division that is equal, with few runs, is returned as it is.
    """
    quotas = _quotas(owners, servers)
    held: list[int | None] = [owner if owner in quotas else None for owner in owners]
    for server in dict.fromkeys(owners):
        if server in quotas:
            _release(held, server, held.count(server) - quotas[server])
    divided = _assign(held, quotas)
    if max(Counter(run.owner for run in runs_of(divided)).values()) > MAX_RUNS:
        return _anew(owners, servers)
    return divided


def _quotas(owners: Sequence[int], servers: Collection[int]) -> dict[int, int]:
    """Returns how many slots each server shall own. The remainder stays with those with most."""
    load = Counter(owners)
    part, remainder = divmod(len(owners), len(servers))
    ordered = sorted(servers, key=lambda server: (-load[server], server))
    return {server: part + (at < remainder) for at, server in enumerate(ordered)}


def _release(held: list[int | None], server: int, surplus: int) -> None:
    """Takes slots from a server: whole runs if they are short, else an end of a run."""
    while surplus > 0:
        own = [run for run in runs_of(held) if run.owner == server]
        short = [run for run in own if run.length <= surplus]
        if short and len(own) > 1:
            run = min(short, key=lambda run: run.length)
            first, last = run.start, run.stop
        else:
            first, last = min(
                (end for run in own for end in _ends(run, surplus)),
                key=lambda end: _attraction(held, *end),
            )
        held[first:last] = [None] * (last - first)
        surplus -= last - first


def _ends(run: Run, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns the slots at either end of a run."""
    length = min(length, run.length)
    return (run.stop - length, run.stop), (run.start, run.start + length)


def _attraction(held: list[int | None], first: int, last: int) -> int:
    """Ranks an end of a run: best where free slots adjoin, worst at the edge of all slots."""
    before = held[first - 1] if first > 0 else held[first]
    after = held[last] if last < len(held) else held[first]
    neighbours = {before, after} - {held[first]}
    if None in neighbours:
        return 0
    return 1 if neighbours else 2


def _assign(held: list[int | None], quotas: dict[int, int]) -> list[int]:
    """Gives the free slots to the servers that lack some, their neighbours first."""
    lacks = Counter(quotas)
    lacks.subtract(owner for owner in held if owner is not None)
    slots = list(held)
    while free := [run for run in runs_of(slots) if run.owner is None]:
        taken = min(
            (taking for run in free for taking in _takings(slots, run, lacks)),
            key=lambda run: (not _adjoins(slots, run), -run.length, run),
        )
        slots[taken.start : taken.stop] = [taken.owner] * taken.length
        lacks[taken.owner or 0] -= taken.length
    return [owner for owner in slots if owner is not None]


def _takings(slots: list[int | None], free: Run, lacks: Counter[int]) -> list[Run]:
    """Returns what each server could take of a free run: at its end, where it is a neighbour."""
    takings = []
    for server, lack in lacks.items():
        length = min(lack, free.length)
        if length > 0 and slots[free.stop : free.stop + 1] == [server]:
            takings.append(Run(free.stop - length, free.stop, server))
        elif length > 0:
            takings.append(Run(free.start, free.start + length, server))
    return takings


def _adjoins(slots: list[int | None], run: Run) -> bool:
    """Returns whether the owner of a run also owns a slot beside it."""
    before, after = slots[max(0, run.start - 1) : run.start], slots[run.stop : run.stop + 1]
    return run.owner in (*before, *after)


def _anew(owners: Sequence[int], servers: Collection[int]) -> list[int]:
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
