"""Runs simulated jobs: `python -m tests.simulation --seeds 0:2000 --mode all`."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
from collections import Counter
from collections.abc import Sequence

import torch

from tests.simulation import MODES, Violation, draw, simulate

_SHOWN = ("pushes", "applied", "stale", "duplicate", "fenced", "crashed", "evictions", "cuts")


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    options = _parse(arguments)
    modes = list(MODES) if options.mode == "all" else [options.mode]
    failed = 0
    for place, mode in enumerate(modes):
        failed += not _run(mode, options.seeds[place :: len(modes)], options.trace)
    return 1 if failed else 0


def _run(mode: str, seeds: range, trace: int) -> bool:
    """Runs the seeds of one mode, and prints a line about them; returns whether all went well."""
    counts: Counter[str] = Counter()
    began = time.perf_counter()
    for seed in seeds:
        try:
            counts += simulate(draw(mode, seed))
        except Violation as violation:
            print(f"{mode:6s} FAILED: {violation}")
            _show(mode, seed, trace)
            return False
    seconds = time.perf_counter() - began
    told = ", ".join(f"{counts[name]} {name}" for name in _SHOWN)
    print(f"{mode:6s} {len(seeds)} schedules held in {seconds:.1f} s: {told}")
    return True


def _show(mode: str, seed: int, trace: int) -> None:
    """Prints a failing schedule and, from a second run of it, how it ended."""
    lines: list[str] = []
    schedule = draw(mode, seed)
    try:
        simulate(schedule, note=lines.append)
    except Violation:
        print(schedule)
        print("\n".join(lines[-trace:] if trace else []))
        print(f"again: python -m tests.simulation --seeds {seed} --mode {mode} --trace 200")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument(
        "--seeds",
        type=_seeds,
        default=range(2000),
        metavar="A:B",
        help="the seeds from A to B - 1, or one; with several modes each has its share of them",
    )
    parser.add_argument("--mode", choices=("all", *MODES), default="all")
    parser.add_argument(
        "--trace", type=int, default=40, help="how many lines of a failing job to print"
    )
    return parser.parse_args(arguments)


def _seeds(text: str) -> range:
    first, colon, end = text.partition(":")
    return range(int(first), int(end) if colon else int(first) + 1)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # what servers warn of is what happens all the time
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    gc.freeze()  # what is loaded only slows down the collection of what is simulated
    sys.exit(main(sys.argv[1:]))
