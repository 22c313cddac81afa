"""Changes the program in small ways and sees whether its tests notice.

The files of `trireme/ps`, `trireme/cluster` and `trireme/wire` are changed, one line at a time, in
copies of the working tree. A mutant is caught when a test fails. Half of the sample is of the files
that decide what becomes of an update (the core), half of the others. Mutants that nothing
catches stand in tests/mutants/survivors.toml, each with its reason.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tests.mutants.operators import Mutant, sample
from tests.mutants.reach import measure
from tests.mutants.report import entry, share, table
from tests.mutants.survivors import read_survivors
from tests.mutants.tree import Tree
from tests.mutants.trial import Result, try_all

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ps", "cluster", "wire")
CORE = (
    *(f"trireme/ps/leader/{name}.py" for name in ("ending", "example_ledgers", "leader")),
    *(f"trireme/ps/client/{name}.py" for name in ("client", "lanes", "protocol", "server_links")),
    "trireme/ps/replication/dispatcher.py",
    *(
        f"trireme/ps/shard/{name}.py"
        for name in (
            "answers",
            "copies",
            "follower",
            "participants",
            "push_table",
            "rounds",
            "shard",
            "state",
            "updates",
        )
    ),
    *(f"trireme/cluster/{name}.py" for name in ("consequences", "decision", "membership", "state")),
)
LEAST = 0.9
"""Which part of the core's mutants must be caught."""

WARM = ("torch", "numpy", "msgspec", "safetensors.torch", "hypothesis.stateful", "psutil")
"""What the program imports and is slow to import: once, before the first process is forked."""


SIMULATOR = {"tests/simulation"}
"""Drives what decides in `trireme/ps` and `trireme/cluster`, from a folder of its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends what it has started
    began = time.monotonic()
    drawn = _drawn(asked)
    kinds = len({mutant.path for mutant in drawn})
    print(f"{len(drawn)} mutants of {kinds} files, seed {asked.seed}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as tests/conftest.py has it, before torch
    for name in WARM:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        first = Tree.copied(ROOT, Path(folder) / "0")
        folders = sorted({f"tests/{Path(mutant.path).parts[1]}" for mutant in drawn} | SIMULATOR)
        reach = measure(first, folders, asked.jobs, ROOT / "build" / "mutants" / "reach.json")
        print(
            f"{len(reach.seconds)} tests measured in {time.monotonic() - began:.0f} s"
            + "".join(f"\nfails unchanged: {test}" for test in reach.failed),
            flush=True,
        )
        trees = [first, *(first.again(Path(folder) / str(i)) for i in range(1, asked.jobs))]
        until = began + 60 * asked.minutes
        results = list(
            _told(try_all(_while(drawn, until), trees, reach, asked.seconds), began, asked.show)
        )
    return _report(results, len(drawn))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="draws the sample (default: 0)")
    parser.add_argument("--sample", type=int, default=400, help="how many (default: 400)")
    parser.add_argument(
        "--only", default="", help="files whose path has one of these words, parted by commas"
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="of tests for one mutant (default: 30)"
    )
    parser.add_argument(
        "--minutes", type=float, default=55.0, help="after which no other is begun (default: 55)"
    )
    parser.add_argument("--show", action="store_true", help="also what becomes of each")
    return parser.parse_args(arguments)


def _drawn(asked: argparse.Namespace) -> list[Mutant]:
    words = asked.only.split(",")
    paths = [
        str(file.relative_to(ROOT))
        for package in PACKAGES
        for file in sorted((ROOT / "trireme" / package).rglob("*.py"))
    ]
    paths = [path for path in paths if any(word in path for word in words)]
    core = [path for path in paths if path in CORE]
    others = [path for path in paths if path not in CORE]
    of_core = asked.sample if not others else (asked.sample + 1) // 2 if core else 0
    return [
        *sample(ROOT, core, of_core, asked.seed),
        *sample(ROOT, others, asked.sample - of_core, asked.seed),
    ]


def _while(mutants: Iterable[Mutant], until: float) -> Iterator[Mutant]:
    for mutant in mutants:
        if time.monotonic() > until:
            return
        yield mutant


def _told(results: Iterable[Result], began: float, show: bool) -> Iterator[Result]:
    """Passes results on, and says now and then how far it is; of each, what became of it."""
    for count, result in enumerate(results, 1):
        if show:
            mutant, word = result.mutant, "caught" if result.caught else "SURVIVED"
            print(f"{word} {mutant.path}:{mutant.line} {mutant.before} => {mutant.after}")
            print(f"    {result.by}, {result.seconds:.1f} s", flush=True)
        if count % 25 == 0:
            print(f"{count} tried after {time.monotonic() - began:.0f} s", flush=True)
        yield result


def _report(results: list[Result], drawn: int) -> int:
    known = read_survivors()
    left = [result for result in results if not result.caught]
    unknown = [result for result in left if result.mutant.key not in known]
    for result in unknown:
        print(f"\n{entry(result)}")
    for result in results:
        if result.caught and result.mutant.key in known:
            print(f"\ncaught now, take it out of survivors.toml: {result.mutant.key}")
    print(f"\n{table(results, known, CORE)}\n")
    core = [result for result in results if result.mutant.path in CORE]
    if len(results) < drawn:
        print(f"time was up: {drawn - len(results)} of {drawn} were not tried")
    print(
        f"{share(core, known):.1%} of the core's mutants caught (at least {LEAST:.0%}), "
        f"{share(results, known):.1%} of all; {len(unknown)} survivors that survivors.toml does "
        "not explain"
    )
    return 0 if share(core, known) >= LEAST and not unknown else 1


if __name__ == "__main__":
    sys.exit(main())
