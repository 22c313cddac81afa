"""The command line of the suite: see `python -m benchmarks --help`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks.processes import THREADS

# Before numpy or torch is imported, here and in what is forked from here.
os.environ.update(THREADS)

from benchmarks.context import Context, real_data
from benchmarks.machine import ROOT
from benchmarks.peers import DIRECTORY, Peers
from benchmarks.suite import BENCHMARKS, chosen, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    listed = ", ".join(f"{b.letter} {b.name}" for b in BENCHMARKS)
    trains = ", ".join(b.letter for b in BENCHMARKS if b.trains)
    parser.add_argument("--only", default="", metavar="A,B", help=f"some of: {listed}")
    parser.add_argument("--quick", action="store_true", help="only show that everything runs")
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        metavar="N",
        help=f"start what trains ({trains}) N times; medians are over all rounds",
    )
    parser.add_argument("--no-peers", action="store_true", help="as if no peer were installed")
    parser.add_argument("--peers", type=Path, default=DIRECTORY, help="the peers' environments")
    parser.add_argument("--data", type=Path, default=real_data(), help="the real data, if any")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument(
        "--against", type=Path, metavar="PATH", help="the checkout of an older commit, for start"
    )
    given = parser.parse_args()
    try:
        benchmarks = chosen([word for word in given.only.split(",") if word])
    except ValueError as error:
        parser.error(str(error))
    if given.starts < 1:
        parser.error(f"--starts {given.starts}: it must be 1 or more")
    if given.starts > 1 and not any(b.trains for b in benchmarks):
        parser.error(f"--starts is for benchmarks that train, and none was chosen: {trains}")
    peers = Peers(Path(os.devnull) if given.no_peers else given.peers.resolve())
    for line in peers.missing():
        print(line)
    context = Context(
        seconds=0,
        starts=given.starts,
        quick=given.quick,
        peers=peers,
        data=given.data,
        scratch=Path(),
        say=lambda line: print(line, flush=True),
        against=given.against and given.against.resolve(),
    )
    return 0 if run(benchmarks, context, given.results.resolve()) else 1


if __name__ == "__main__":
    sys.exit(main())
