"""The order in which places compute the segments of a batch, and the messages between them.

All tasks make the same plan: one order of all events of all places, in which each event comes after
those that it depends on. Every task handles its own events in that order; a message is sent without
waiting, and received at the latest when the event that needs it is handled. So no plan deadlocks:
of all events that are not yet handled, the first one never waits for another of them.

The order is 1F1B (Narayanan et al., PipeDream, SOSP 2019), here for any acyclic graph: with D
depths, the forward of depth d and micro-batch m has the time d + 2m on a virtual clock, its
backward 2D - 1 - d + 2m: so at most D - d micro-batches are between the two. The early segment of a
depth and micro-batch is before the late ones forward, and after them backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trireme.graph.execute.cut import Cut, Segment, Value

BATCH = -1  # stands for the number of a micro-batch where something belongs to the whole batch


@dataclass(frozen=True, slots=True)
class Message:
    """A value, or its gradient, on its way from one place to another one."""

    name: str  # of the value
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
    place: int
    segment: int  # the position of the segment in the cut; -1 for `give` and `take`
    microbatch: int  # the number of the micro-batch; `BATCH` for `give` and `take`
    receives: tuple[Message, ...] = ()  # what it needs
    sends: tuple[Message, ...] = ()  # what it sends when it is done
    releases: tuple[str, ...] = ()  # the values of its micro-batch that no later one reads there


_Messages: TypeAlias = tuple[tuple[Message, ...], tuple[Message, ...], tuple[str, ...]]
"""What an event receives, sends and releases."""


def plan(cut: Cut, trained: Sequence[bool]) -> tuple[Event, ...]:
    """Returns all events of a batch, in order; a micro-batch that is not `trained` only forward."""
    planner = _Planner(cut, trained)
    kept = [value for value in cut.values.values() if value.attribute]
    gives, takes = defaultdict[int, list[Message]](list), defaultdict[int, list[Message]](list)
    for value in kept if trained else ():
        gives[value.place] += _messages(value, BATCH, back=False)
        if any(trained) and value.differentiable:
            takes[value.place] += _messages(value, BATCH, back=True)
    return (
        *(Event("give", at, -1, BATCH, sends=tuple(gives[at])) for at in sorted(gives)),
        *planner.events(),
        *(Event("take", at, -1, BATCH, receives=tuple(takes[at])) for at in sorted(takes)),
    )


class _Planner:
    def __init__(self, cut: Cut, trained: Sequence[bool]) -> None:
        self._cut = cut
        self._trained = trained
        self._order = _ordered(cut, trained)
        # Of each value at each place, by micro-batch: the events that read or make it.
        self._first: dict[tuple[str, int, int], int] = {}
        self._last_forward: dict[tuple[str, int, int], int] = {}
        self._last_backward: dict[tuple[str, int, int], int] = {}
        for number, (backward, index, microbatch) in enumerate(self._order):
            segment = cut.segments[index]
            for name in (*segment.receives, *segment.outputs):
                key = name, segment.place, self._microbatch(name, microbatch)
                if backward:
                    self._last_backward[key] = number
                else:
                    self._first.setdefault(key, number)
                    self._last_forward[key] = number

    def events(self) -> Iterator[Event]:
        for number, (backward, index, microbatch) in enumerate(self._order):
            kind = self._backward if backward else self._forward
            messages = kind(number, self._cut.segments[index], microbatch)
            place = self._cut.segments[index].place
            yield Event("backward" if backward else "forward", place, index, microbatch, *messages)

    def _forward(self, number: int, segment: Segment, microbatch: int) -> _Messages:
        place, values = segment.place, self._cut.values
        receives, sends, releases = list[Message](), list[Message](), list[str]()
        for name in segment.receives:
            source, when = values[name].place, self._microbatch(name, microbatch)
            if source != place and self._first[name, place, when] == number:
                receives.append(Message(name, source, place, when, back=False))
        for name in segment.outputs:
            sends += _messages(values[name], microbatch, back=False)
        for name in (*segment.receives, *segment.outputs):
            value = values[name]
            if value.attribute or self._last_forward[name, place, microbatch] != number:
                continue
            unread = name in segment.outputs  # at this place: this is also its first event
            if unread or not value.differentiable or not self._trained[microbatch]:
                releases.append(name)
        return tuple(receives), tuple(sends), tuple(releases)

    def _backward(self, number: int, segment: Segment, microbatch: int) -> _Messages:
        place, values = segment.place, self._cut.values
        receives, sends, releases = list[Message](), list[Message](), list[str]()
        for name in segment.outputs:
            if values[name].differentiable:
                receives += _messages(values[name], microbatch, back=True)
                key = name, place, microbatch
                if self._last_forward[key] != self._first[key]:
                    releases.append(name)
        for name in segment.receives:
            value, when = values[name], self._microbatch(name, microbatch)
            last = self._last_backward[name, place, when] == number
            if value.differentiable and value.place != place and last:
                sends.append(Message(name, place, value.place, when, back=True))
                if not value.attribute:
                    releases.append(name)
        return tuple(receives), tuple(sends), tuple(releases)

    def _microbatch(self, name: str, microbatch: int) -> int:
        return BATCH if self._cut.values[name].attribute else microbatch


def _messages(value: Value, microbatch: int, *, back: bool) -> Iterator[Message]:
    for place in value.readers:
        sender, receiver = (place, value.place) if back else (value.place, place)
        yield Message(value.name, sender, receiver, microbatch, back)


def _ordered(cut: Cut, trained: Sequence[bool]) -> list[tuple[bool, int, int]]:
    """Returns (whether backward, position of the segment, number of the micro-batch) in order."""
    depths = 1 + max(each.depth for each in cut.segments)
    keyed: list[tuple[tuple[int, ...], tuple[bool, int, int]]] = []
    for index, segment in enumerate(cut.segments):
        for number, backward in enumerate(trained):
            depth, part = segment.depth, segment.part
            time = depth + 2 * number
            keyed.append(((time, 0, depth, number, part, index), (False, index, number)))
            if backward:
                time = 2 * depths - 1 - depth + 2 * number
                keyed.append(((time, 1, -depth, number, -part, -index), (True, index, number)))
    return [event for _, event in sorted(keyed)]
