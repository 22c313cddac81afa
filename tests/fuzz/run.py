"""Runs cases of a fuzzer: in batches with seeds of their own, measured in time and memory."""

from __future__ import annotations

import faulthandler
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

BATCH = 1000
HUNG_SECONDS = 120.0
"""A batch that takes longer is ended, with the stack of every thread."""

SLOWEST_SECONDS = 5.0
"""The longest that one case may take, on a machine that does other things too."""

GROWTH_BYTES = 24 << 20
"""How much larger the process may be at the end than after its first batches."""

WARM_SHARE = 0.1


class Broken(AssertionError):
    """A case did what no case may do: what, with everything that is needed to repeat it."""


@dataclass
class Outcome:
    """What came of the cases of a fuzzer.

    Attributes:
        name: the fuzzer's.
        cases: how many there were.
        seconds: how long they took.
        slowest: the seconds of the slowest.
        growth: how many bytes the process has grown by since the first batches.
        counts: how many cases ended how.
    """

    name: str
    cases: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    growth: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """Returns the outcome for people to read."""
        each = self.seconds / max(self.cases, 1) * 1e6
        head = (
            f"{self.name}: {self.cases:,} cases in {self.seconds:.0f} s ({each:,.0f} us each, the "
            f"slowest {self.slowest * 1e3:.0f} ms), memory {self.growth / (1 << 20):+.1f} MiB"
        )
        return [head, *(f"  {count:>10,}  {name}" for name, count in self.counts.most_common())]


def run_cases(
    name: str,
    case: Callable[[random.Random], str],
    count: int,
    seed: int,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Runs as many cases, and checks the time of each and the memory of all.

    Args:
        name: of the fuzzer.
        case: makes a case from random numbers and runs it; returns how it ended, in words.
        count: how many.
        seed: a batch's numbers follow from it and the batch's number.
        say: shows progress.

    Raises:
        Broken: a case did what it may not do, took too long, or memory has grown.
    """
    outcome, process, warm = Outcome(name), psutil.Process(), 0
    began = shown = time.monotonic()
    watched = not faulthandler.is_enabled()
    while outcome.cases < count:
        batch = f"{seed}/{name}/{outcome.cases // BATCH}"
        if watched:
            faulthandler.dump_traceback_later(HUNG_SECONDS, exit=True, file=sys.__stderr__)
        _run_batch(batch, case, min(BATCH, count - outcome.cases), outcome)
        if watched:
            faulthandler.cancel_dump_traceback_later()
        if not warm and outcome.cases >= WARM_SHARE * count:
            gc.collect()
            warm = process.memory_info().rss
        if (now := time.monotonic()) > shown + 30.0:
            shown = now
            say(f"{name}: {outcome.cases:,} of {count:,} after {now - began:.0f} s")
    gc.collect()
    outcome.seconds = time.monotonic() - began
    outcome.growth = process.memory_info().rss - warm
    if outcome.growth > GROWTH_BYTES:
        raise Broken(f"{name}, seed {seed}: memory has grown by {outcome.growth:,} bytes")
    return outcome


def _run_batch(
    batch: str, case: Callable[[random.Random], str], count: int, outcome: Outcome
) -> None:
    draw = random.Random(batch)
    for number in range(count):
        began = time.perf_counter()
        try:
            ended = case(draw)
        except Exception as error:
            raise Broken(f"case {number} of batch {batch}: {error!r}") from error
        took = time.perf_counter() - began
        if took > SLOWEST_SECONDS:
            raise Broken(f"case {number} of batch {batch} took {took:.1f} s: {ended}")
        outcome.slowest = max(outcome.slowest, took)
        outcome.counts[ended] += 1
        outcome.cases += 1
