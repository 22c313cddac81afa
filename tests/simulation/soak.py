"""Runs simulated jobs for as long as it is let: `python -m tests.simulation.soak`.

It uses all cores, goes on where it has stopped, and ends with a summary on Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import msgspec
import torch

from tests.simulation import MODES, draw, simulate

_BLOCK = 2  # seeds of each mode that a process runs at once
_SAYS = 10.0  # seconds between two lines


class Place(msgspec.Struct):
    """How far it is.

    Attributes:
        seed: all before it have run, in every mode.
        schedules: how many there were.
        seconds: how long it took.
        failed: mode, seed, and what was wrong.
    """

    seed: int = 0
    schedules: int = 0
    seconds: float = 0.0
    failed: list[tuple[str, int, str]] = msgspec.field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.schedules} schedules, {len(MODES)} modes up to seed {self.seed}, in "
            f"{self.seconds:.0f} s: {len(self.failed) or 'none'} failed"
        )


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    options = _parse(arguments)
    place = _read(options.place)
    print(f"from seed {place.seed} on, with {options.processes} processes; Ctrl-C ends it")
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.processes, mp_context=context, initializer=_begin)
    with contextlib.suppress(KeyboardInterrupt):
        _run(pool, place, options)
    pool.shutdown(cancel_futures=True)
    _write(options.place, place)
    print(place)
    return 1 if place.failed else 0


def _run(pool: ProcessPoolExecutor, place: Place, options: argparse.Namespace) -> None:
    """Runs blocks of seeds in their order, some ahead of the first that is not over."""
    began, before, said = time.monotonic(), place.seconds, 0.0
    under_way = deque[Future[list[tuple[str, int, str]]]]()
    firsts = itertools.count(place.seed, _BLOCK)
    while place.schedules < options.schedules:
        while len(under_way) < 2 * options.processes:
            under_way.append(pool.submit(run_block, next(firsts)))
        failed = under_way.popleft().result()
        place.seed += _BLOCK
        place.schedules += _BLOCK * len(MODES)
        place.failed += failed
        place.seconds = before + time.monotonic() - began
        for mode, seed, what in failed:
            print(f"FAILED: {what}\nagain: python -m tests.simulation --seeds {seed} --mode {mode}")
        _write(options.place, place)
        if time.monotonic() > said + _SAYS:
            said = time.monotonic()
            print(place, flush=True)


def run_block(first: int) -> list[tuple[str, int, str]]:
    """Runs the seeds of a block in every mode; returns those that failed, and why."""
    failed = []
    for mode, seed in itertools.product(MODES, range(first, first + _BLOCK)):
        try:
            simulate(draw(mode, seed))
        except Exception as error:  # a bug may show as any
            failed.append((mode, seed, f"{type(error).__name__}: {error}"[:2000]))
        gc.collect()  # quickly: what there was before is frozen
    return failed


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    logging.disable(logging.WARNING)  # what servers warn of is what happens all the time
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    gc.freeze()
    gc.disable()


def _read(path: Path) -> Place:
    return msgspec.json.decode(path.read_bytes(), type=Place) if path.exists() else Place()


def _write(path: Path, place: Place) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(place))
    part.replace(path)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.soak", description=__doc__)
    parser.add_argument(
        "--place",
        type=Path,
        default=Path("build/soak.json"),
        help="the file that says how far it is",
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--schedules", type=float, default=float("inf"), help="ends after so many, of all runs"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
