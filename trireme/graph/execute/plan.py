"""The order in which places compute the segments of a batch, and the messages between them.

All tasks make the same plan. It is one order of all events of all places, in which each event comes
after those that it depends on. Every task handles its own events in that order; a message is sent
without waiting and received at the latest when the event that needs it is handled. So no plan
deadlocks, whatever the placement: of all events that are not yet handled, the first one never waits
for another of them.

Two schedules. `gpipe` (Huang et al., GPipe, NeurIPS 2019): forward of all micro-batches, then
backward, in the reverse order. `1f1b` (Narayanan et al., PipeDream, SOSP 2019), here for any
acyclic graph: with D depths, the forward of depth d and micro-batch m has the time d + 2m on a
virtual clock, its backward 2D - 1 - d + 2m: so at most D - d micro-batches are between the two.

In both, the early segment of a depth and micro-batch is before the late ones forward, and after
them backward: a value leaves as soon as it and what it needs is computed, and a late segment does
not wait for the gradients of what the early one has sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from trireme.graph.execute.cut import Cut, Value

Schedule = Literal["gpipe", "1f1b"]

BATCH = -1
"""Stands for the number of a micro-batch where something belongs to the whole batch."""


@dataclass(frozen=True, slots=True)
class Message:
    """A value, or its gradient, on its way from one place to another one."""

    name: str  # the name of the value
    sender: int  # the place that sends
    receiver: int  # the place that receives
    microbatch: int  # the number of the micro-batch; `BATCH` for a parameter or buffer
    back: bool  # whether it is the gradient


@dataclass(frozen=True, slots=True)
class Event:
    """What one place does at a time."""

    # `give`: sends parameters and buffers; `forward` and `backward` of a segment; `take`: receives
    # the gradients of parameters that other places read
    kind: Literal["give", "forward", "backward", "take"]
    place: int  # the place
    segment: int  # the position of the segment in the cut; -1 for `give` and `take`
    microbatch: int  # the number of the micro-batch; `BATCH` for `give` and `take`
    receives: tuple[Message, ...] = ()  # what it needs
    sends: tuple[Message, ...] = ()  # what it sends when it is done
    # the names of the values of its place and micro-batch that no later event reads
    releases: tuple[str, ...] = ()


def plan(
    cut: Cut, trained: Sequence[bool], schedule: Schedule, same: Sequence[int] | None = None
) -> tuple[Event, ...]:
    """Returns all events of a batch, in the agreed order."""
    return _Planner(cut, trained, schedule, same or range(cut.places)).events()


class _Planner:
    def __init__(
        self, cut: Cut, trained: Sequence[bool], schedule: Schedule, same: Sequence[int]
    ) -> None:
        self._cut = cut
        self._trained = trained
        self._same = same
        self._order = list(_ordered(cut, trained, schedule))
        # Of each value at each place, by micro-batch: the events that read or make it.
        self._first: dict[tuple[str, int, int], int] = {}
        self._last_forward: dict[tuple[str, int, int], int] = {}
        self._last_backward: dict[tuple[str, int, int], int] = {}
        for number, (backward, index, microbatch) in enumerate(self._order):
            segment = cut.segments[index]
            place = same[segment.place]
            for name in (*segment.receives, *segment.outputs):
                key = name, place, self._microbatch(cut.values[name], microbatch)
                if backward:
                    self._last_backward[key] = number
                else:
                    self._first.setdefault(key, number)
                    self._last_forward[key] = number

    def events(self) -> tuple[Event, ...]:
        """Returns the events."""
        found = [
            self._backward(number, index, microbatch)
            if backward
            else self._forward(number, index, microbatch)
            for number, (backward, index, microbatch) in enumerate(self._order)
        ]
        kept = [value for value in self._cut.values.values() if value.attribute]
        gives, takes = defaultdict[int, list[Message]](list), defaultdict[int, list[Message]](list)
        for value in kept if self._order else ():
            place = self._same[value.place]
            gives[place] += self._messages(value, BATCH, back=False)
            if any(self._trained) and value.differentiable:
                takes[place] += self._messages(value, BATCH, back=True)
        return (
            *(Event("give", at, -1, BATCH, sends=tuple(gives[at])) for at in sorted(gives)),
            *found,
            *(Event("take", at, -1, BATCH, receives=tuple(takes[at])) for at in sorted(takes)),
        )

    def _forward(self, number: int, index: int, microbatch: int) -> Event:
        segment = self._cut.segments[index]
        place = self._same[segment.place]
        receives, sends, releases = list[Message](), list[Message](), list[str]()
        for name in segment.receives:
            value = self._cut.values[name]
            when, source = self._microbatch(value, microbatch), self._same[value.place]
            if source != place and self._first[name, place, when] == number:
                receives.append(Message(name, source, place, when, back=False))
        for name in segment.outputs:
            sends += self._messages(self._cut.values[name], microbatch, back=False)
        for name in (*segment.receives, *segment.outputs):
            value = self._cut.values[name]
            if value.attribute or self._last_forward[name, place, microbatch] != number:
                continue
            unread = name in segment.outputs  # at this place: this is also its first event
            if unread or not value.differentiable or not self._trained[microbatch]:
                releases.append(name)
        return Event(
            "forward", place, index, microbatch, tuple(receives), tuple(sends), tuple(releases)
        )

    def _backward(self, number: int, index: int, microbatch: int) -> Event:
        segment = self._cut.segments[index]
        place = self._same[segment.place]
        receives, sends, releases = list[Message](), list[Message](), list[str]()
        for name in segment.outputs:
            value = self._cut.values[name]
            if value.differentiable:
                receives += self._messages(value, microbatch, back=True)
                if (
                    self._last_forward[name, place, microbatch]
                    != self._first[name, place, microbatch]
                ):
                    releases.append(name)
        for name in segment.receives:
            value = self._cut.values[name]
            when, source = self._microbatch(value, microbatch), self._same[value.place]
            last = self._last_backward[name, place, when] == number
            if value.differentiable and source != place and last:
                sends.append(Message(name, place, source, when, back=True))
                if not value.attribute:
                    releases.append(name)
        return Event(
            "backward", place, index, microbatch, tuple(receives), tuple(sends), tuple(releases)
        )

    def _messages(self, value: Value, microbatch: int, *, back: bool) -> Iterable[Message]:
        source = self._same[value.place]
        for place in sorted({self._same[each] for each in value.readers} - {source}):
            sender, receiver = (place, source) if back else (source, place)
            yield Message(value.name, sender, receiver, microbatch, back)

    @staticmethod
    def _microbatch(value: Value, microbatch: int) -> int:
        return BATCH if value.attribute else microbatch


def _ordered(
    cut: Cut, trained: Sequence[bool], schedule: Schedule
) -> Iterable[tuple[bool, int, int]]:
    """Returns (whether backward, position of the segment, number of the micro-batch) in order."""
    depths = 1 + max(each.depth for each in cut.segments)
    keyed: list[tuple[tuple[int, ...], tuple[bool, int, int]]] = []
    for index, segment in enumerate(cut.segments):
        for number, backward in enumerate(trained):
            depth, part = segment.depth, segment.part
            if schedule == "gpipe":
                forward_key = (0, depth + number, depth, number, part, index)
                backward_key = (1, -depth - number, -depth, -number, -part, -index)
            else:
                forward_key = (depth + 2 * number, 0, depth, number, part, index)
                time = 2 * depths - 1 - depth + 2 * number
                backward_key = (time, 1, -depth, number, -part, -index)
            keyed.append((forward_key, (False, index, number)))
            if backward:
                keyed.append((backward_key, (True, index, number)))
    return [event for _, event in sorted(keyed)]
