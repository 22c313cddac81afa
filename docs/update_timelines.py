"""Who computes and who waits under four strategies: a small simulation, for a figure of a guide.

Four workers, the last of which takes two and a half times as long for a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SPEEDS = (1.9, 2.1, 2.0, 5.0)
END = 20.0


@dataclass(frozen=True)
class Span:
    """A stretch of one worker's time.

    Attributes:
        worker: its index.
        start, end: when, in any unit.
        doing: what it does.
    """

    worker: int
    start: float
    end: float
    doing: Literal["computes", "waits", "late"]


def timelines() -> dict[str, list[Span]]:
    """Returns the spans of each strategy, by its title."""
    return {
        "async: nobody waits": bounded(None),
        "ssp, K = 2: at most 2 updates ahead of the slowest": bounded(2),
        "sync: a round takes all four": rounds(4),
        "sync --aggregate 3: a round takes the first three": rounds(3),
    }


def bounded(ahead: int | None) -> list[Span]:
    """Returns the spans of workers that may be so many updates ahead of the slowest."""
    spans: list[Span] = []
    ends = [[0.0] for _ in SPEEDS]  # when each worker's updates were made
    slowest = max(range(len(SPEEDS)), key=lambda worker: SPEEDS[worker])
    for worker in sorted(range(len(SPEEDS)), key=lambda worker: -SPEEDS[worker]):
        while ends[worker][-1] < END:
            now, done = ends[worker][-1], len(ends[worker]) - 1
            begin = now
            if ahead is not None and worker != slowest and done > ahead:
                needed = min(done - ahead, len(ends[slowest]) - 1)
                begin = max(now, ends[slowest][needed])
            if begin > now:
                spans.append(Span(worker, now, min(begin, END), "waits"))
            ends[worker].append(begin + SPEEDS[worker])
            if begin < END:
                spans.append(Span(worker, begin, min(begin + SPEEDS[worker], END), "computes"))
    return spans


def rounds(aggregate: int) -> list[Span]:
    """Returns the spans of rounds that close with the first so many updates."""
    spans: list[Span] = []
    begins = [0.0] * len(SPEEDS)
    while min(begins) < END:
        ready = [begin + speed for begin, speed in zip(begins, SPEEDS, strict=True)]
        close = sorted(ready)[aggregate - 1]
        for worker, end in enumerate(ready):
            spans += of_round(worker, begins[worker], end, close)
        begins = [max(close, end) for end in ready]
    return spans


def of_round(worker: int, begin: float, end: float, close: float) -> list[Span]:
    """Returns what one worker does in one round, within the time that is drawn."""
    if begin >= END:
        return []
    doing: Literal["computes", "late"] = "late" if end > close else "computes"
    found = [Span(worker, begin, min(end, END), doing)]
    if min(close, END) > end:
        found.append(Span(worker, end, min(close, END), "waits"))
    return found
