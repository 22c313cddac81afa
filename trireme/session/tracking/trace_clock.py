"""The offsets between the clocks of a trace's processes, from round trips between them."""

from __future__ import annotations

from collections.abc import Sequence

from trireme.clock import clock_name
from trireme.ps.results import ServerClock


def offset_of(trips: Sequence[ServerClock]) -> float:
    """Returns what to add to this process's monotonic clock for another process's, in seconds.

    Of several round trips the quickest counts; nothing where both read the same clock, or where
    there was no trip.
    """
    if not trips or trips[0].clock == clock_name():
        return 0.0
    best = min(trips, key=lambda trip: trip.heard - trip.asked)
    return best.now - (best.asked + best.heard) / 2


def offsets_of(servers: Sequence[Sequence[ServerClock]]) -> tuple[float, list[float]]:
    """Returns the offsets of this process's clock, and of each server's, to shard 0's clock."""
    if not servers:
        return 0.0, []
    own = offset_of(servers[0])
    common = servers[0][0].clock
    return own, [0.0 if t[0].clock == common else own - offset_of(t) for t in servers]
