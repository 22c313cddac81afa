"""Simulates a training step of a placement; fast, as the search does it thousands of times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from trireme.graph.place.costs import Bools, Costs, Floats, Hardware, Ints

_DOUBT = 0.1
"""Which share of the duration of all transfers counts as a risk: what they take is less certain
than what computations take, so that nearly equal placements are told apart by them."""


class Score(NamedTuple):
    """How good a placement is: smaller is better."""

    excess: float  # the bytes above the limits, over all devices
    risk: float  # the duration of a step, and a part of that of all transfers
    seconds: float  # the duration of a step


class Transfers(NamedTuple):
    """Values that go to other devices, as arrays, by value and receiver."""

    makers: Ints  # the node that makes it
    # the node in the first segment of those that read it there: others never wait for it, and its
    # backward computation is the last, after which the gradient returns
    readers: Ints
    senders: Ints  # the number of a device
    receivers: Ints
    sizes: Floats  # bytes
    returns: Bools  # whether its gradient returns
    stored: Bools  # whether it is sent once, and not for each micro-batch


class Parts(NamedTuple):
    """A placement, and what follows from it alone."""

    placed: Ints  # the number of the device of each node
    depths: Ints  # the largest number of transfers of computed values on a path to each node
    late: Bools  # whether a node is in the late segment of its device and depth
    transfers: Transfers  # for one micro-batch


_Receive = tuple[int, float]  # the number of the transfer, and the processor's seconds
_Send = tuple[int, int, float, float]
"""The number of the transfer, the link, its seconds and the processor's."""


class _Segment(NamedTuple):
    """What a device does without waiting."""

    device: int
    seconds: float
    receives: Sequence[_Receive]
    sends: Sequence[_Send]


_Levels = list[list[_Segment]]
"""Segments by their depths, and of one depth in the order of execution."""


class Simulator:
    """Executes placements of one graph by the rules of `trireme.graph.place.prediction.predict`."""

    def __init__(self, costs: Costs, hardware: Hardware, micro_batches: int) -> None:
        self.costs = costs
        self.hardware = hardware
        self.micro_batches = micro_batches
        self.devices = len(hardware.devices)
        numbers = range(self.devices)
        self.links = [hardware.between(one, other) for one in numbers for other in numbers]
        self._rates: Floats = np.array([astuple(link) for link in self.links])
        limits = [device.memory_bytes for device in hardware.devices]
        self.limits = np.array([np.inf if each is None else each for each in limits])
        self.held: Floats = costs.resident + costs.activation  # whatever the placement
        self._nodes = np.arange(len(costs.forward))
        self._numbers = np.arange(self.devices)[:, None]
        # Of each reading.
        self._makers = costs.makers[costs.values]
        self._computed = ~costs.stored[costs.values]
        self._pairs: list[tuple[int, int]] = list(
            zip(self._makers.tolist(), costs.readers.tolist(), strict=True)
        )

    def parts(self, placed: Ints) -> Parts:
        """Returns the segments and the transfers of a placement."""
        costs, receivers = self.costs, placed[self.costs.readers]
        crosses = placed[self._makers] != receivers
        steps = crosses & self._computed
        depths = self._depths(steps)
        late = self._late(depths, steps)
        cross = np.flatnonzero(crosses)
        keys = costs.values[cross] * self.devices + receivers[cross]
        order = np.lexsort(((2 * depths + late)[costs.readers[cross]], keys))
        chosen = cross[order[np.unique(keys[order], return_index=True)[1]]]
        made = costs.values[chosen]
        makers = costs.makers[made]
        transfers = Transfers(
            makers,
            costs.readers[chosen],
            placed[makers],
            receivers[chosen],
            costs.sizes[made],
            costs.differentiable[made],
            costs.stored[made],
        )
        return Parts(placed, depths, late, transfers)

    def _depths(self, steps: Bools) -> Ints:
        if not steps.any():
            return np.zeros_like(self._nodes)
        depths = [0] * len(self._nodes)
        for (maker, reader), step in zip(self._pairs, steps.tolist(), strict=True):
            depth = depths[maker] + step
            if depth > depths[reader]:
                depths[reader] = depth
        return np.array(depths, dtype=np.intp)

    def _late(self, depths: Ints, steps: Bools) -> Bools:
        """Returns which nodes are late, from the last reader to the first."""
        late = np.ones(len(self._nodes), dtype=bool)
        if not steps.any():
            return late
        late[self._makers[steps]] = False
        flags: list[bool] = late.tolist()
        # Between nodes of one depth there are only transfers of what is stored.
        inside = (depths[self._makers] == depths[self.costs.readers]) & self._computed
        for number in np.flatnonzero(inside)[::-1].tolist():
            maker, reader = self._pairs[number]
            if not flags[reader]:
                flags[maker] = False
        return np.array(flags, dtype=bool)

    def peak_bytes(self, parts: Parts) -> Floats:
        """Returns the most that each device holds at a time."""
        placed, costs = parts.placed, self.costs
        # The backward computation of a depth follows as many forward computations.
        least = np.minimum(parts.depths.max(initial=0) + 1 - parts.depths, self.micro_batches)
        each = costs.resident + least * costs.activation
        held: Floats = np.bincount(placed, each, self.devices).astype(np.float64)
        held += np.where(placed == self._numbers, self.costs.working, 0.0).max(axis=1, initial=0.0)
        makers, readers, senders, receivers, sizes, returns, stored = parts.transfers
        held += np.bincount(receivers, np.where(stored, 1, least[readers]) * sizes, self.devices)
        held += np.bincount(
            senders, returns * np.where(stored, 1, least[makers]) * sizes, self.devices
        )
        return held

    def score(self, parts: Parts) -> Score:
        """Returns how good a placement is."""
        excess = self.peak_bytes(parts) - self.limits
        seconds = self.step_seconds(parts)
        _, _, senders, receivers, sizes, _, _ = parts.transfers
        sent, work = self._on_links(senders * self.devices + receivers, sizes)
        risk = seconds + _DOUBT * float((self.times(parts) * (sent + 2 * work)).sum())
        return Score(float(excess[excess > 0].sum()), risk, seconds)

    def times(self, parts: Parts) -> Ints:
        """Returns how often each transfer is made in a step, there and back."""
        ways: Ints = 1 + parts.transfers.returns.astype(np.intp)
        return ways * np.where(parts.transfers.stored, 1, self.micro_batches)

    def _on_links(self, links: Ints, sizes: Floats) -> tuple[Floats, Floats]:
        latency, bandwidth, work, work_byte = self._rates[links].T
        return latency + sizes / bandwidth, work + sizes * work_byte

    def busy_seconds(self, parts: Parts) -> Floats:
        """Returns how long each device computes in a step."""
        busy: Floats = self.micro_batches * sum(
            seconds.sum(axis=(0, 1)) for seconds in self._segment_seconds(parts)
        )
        return busy + self._updates(parts)

    def _updates(self, parts: Parts) -> Floats:
        return np.bincount(parts.placed, self.costs.update, self.devices).astype(np.float64)

    def step_seconds(self, parts: Parts) -> float:
        """Returns the duration of a step."""
        forward, backward, last = self._segments(parts)
        now = [0.0] * self.devices
        free = [0.0] * len(self.links)
        arrivals = [[0.0] * len(parts.transfers.sizes) for _ in range(self.micro_batches)]
        at = np.flatnonzero(parts.transfers.stored)
        _, _, senders, receivers, sizes, returned, _ = (each[at] for each in parts.transfers)
        rows = (each.tolist() for each in (at, senders, receivers, sizes, returned))
        stored = list(zip(*rows, strict=True))
        for number, sender, receiver, size, _ in stored:
            link = sender * self.devices + receiver
            begins = max(free[link], now[sender])
            free[link] = begins + self.links[link].seconds(size)
            now[sender] += self.links[link].work(size)
            now[receiver] += self.links[link].work(size)
            for arrived in arrivals:
                arrived[number] = free[link]
        final = self.micro_batches - 1
        for back, depth, micro_batch in _order(len(forward), self.micro_batches):
            segments = (last if micro_batch == final else backward) if back else forward
            arrived = arrivals[micro_batch]
            for device, seconds, receives, sends in segments[depth]:
                time = now[device]
                for _, work in receives:
                    time += work
                for number, _ in receives:
                    if arrived[number] > time:
                        time = arrived[number]
                time += seconds
                for number, link, duration, work in sends:
                    begins = free[link] if free[link] > time else time
                    arrived[number] = free[link] = begins + duration
                    time += work
                now[device] = time
        for number, sender, receiver, size, returns in stored:
            if returns:
                link = receiver * self.devices + sender
                time = now[sender] + self.links[link].work(size)
                now[sender] = max(time, arrivals[final][number])
        updates: list[float] = self._updates(parts).tolist()
        return max(time + update for time, update in zip(now, updates, strict=True))

    def _segment_seconds(self, parts: Parts) -> tuple[Floats, Floats]:
        """Returns what segments take, forward and backward, by depth, (early, late) and device."""
        placed, depths = parts.placed, parts.depths
        levels = int(depths.max(initial=0)) + 1
        keys = (2 * depths + parts.late) * self.devices + placed

        def total(seconds: Floats) -> Floats:
            sums = np.bincount(keys, seconds, 2 * levels * self.devices)
            return sums.reshape(levels, 2, self.devices).astype(np.float64)

        forward, backward = total(self.costs.forward), total(self.costs.backward)
        # What only has its place somewhere, as a parameter, is no segment.
        fixed = np.where(forward > 0, self.costs.segment_seconds, 0.0)
        return forward + fixed, backward + fixed

    def _segments(self, parts: Parts) -> tuple[_Levels, _Levels, _Levels]:
        """Returns the segments of each depth: forward, backward, and backward the last time."""
        forward, backward = self._segment_seconds(parts)
        makers, readers, senders, receivers, sizes, returns, stored = parts.transfers
        keys = 2 * parts.depths + parts.late
        here = (keys[makers] * self.devices + senders).tolist()
        away = (keys[readers] * self.devices + receivers).tolist()
        computed = ~stored

        ways = (
            (senders * self.devices + receivers, here, away),
            (receivers * self.devices + senders, away, here),
        )

        def levels(seconds: Floats, sent: Bools, received: Bools, *, back: bool) -> _Levels:
            """Returns the segments that do something; backward the late one of a depth first."""
            links, begin, end = ways[back]
            durations, work = self._on_links(links, sizes)
            sends: dict[int, list[_Send]] = {}
            receives: dict[int, list[_Receive]] = {}
            # What is stored takes no work here: see `step_seconds`.
            columns = (sent, received, links, durations, work, np.where(stored, 0.0, work))
            for number, (sends_it, receives_it, link, duration, own, other) in enumerate(
                zip(*(each.tolist() for each in columns), strict=True)
            ):
                if sends_it:
                    sends.setdefault(begin[number], []).append((number, link, duration, own))
                if receives_it:
                    receives.setdefault(end[number], []).append((number, other))
            found: _Levels = [[] for _ in seconds]
            each: list[float] = seconds.ravel().tolist()
            busy = {*np.flatnonzero(seconds).tolist(), *sends, *receives}
            for key in sorted(busy, reverse=back):
                depth, device = key // (2 * self.devices), key % self.devices
                found[depth].append(
                    _Segment(device, each[key], receives.get(key, ()), sends.get(key, ()))
                )
            return found

        there = levels(forward, computed, np.ones_like(stored), back=False)
        waited = returns & computed
        last = levels(backward, returns, waited, back=True)
        differs = self.micro_batches > 1 and bool((returns & stored).any())
        return there, levels(backward, waited, waited, back=True) if differs else last, last


@cache
def _order(depths: int, micro_batches: int) -> list[tuple[bool, int, int]]:
    """Returns (whether backward, depth, micro-batch) in the order of a step."""
    pairs = list(product(range(depths), range(micro_batches)))
    keyed = [(at + 2 * number, False, at, number) for at, number in pairs]
    keyed += [(2 * depths - 1 - at + 2 * number, True, -at, number) for at, number in pairs]
    return [(back, abs(at), number) for _, back, at, number in sorted(keyed)]
