"""Which benchmarks there are, and how a run of them goes."""

from __future__ import annotations

import importlib
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.context import Context
from benchmarks.machine import describe, load
from benchmarks.peers import PEERS
from benchmarks.results import Result


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        letter: in the list of issue and documentation.
        name: of its result.
        module: which has `run(context)`.
        seconds: how long its rounds may take; with peers, half as much again.
        trains: whether its contenders train, and are started `Context.starts` times.
        named_only: whether it is run only where it is named: it takes long, or needs peers.
    """

    letter: str
    name: str
    module: str
    seconds: float
    trains: bool = False
    named_only: bool = False

    def run(self, context: Context) -> Result:
        """Runs it."""
        function: Callable[[Context], Result] = importlib.import_module(self.module).run
        return function(context)


BENCHMARKS = (
    Benchmark("a", "replica", "benchmarks.bench_replica", 60, trains=True),
    Benchmark("b", "push_pull", "benchmarks.bench_push_pull", 40),
    Benchmark("c", "scaling", "benchmarks.bench_scaling", 50),
    Benchmark("d", "stragglers", "benchmarks.bench_stragglers", 60),
    Benchmark("e", "codecs", "benchmarks.bench_codecs", 20),
    Benchmark("f", "networks", "benchmarks.bench_networks", 80, trains=True),
    Benchmark("g", "gpu", "benchmarks.bench_gpu", 40, trains=True),
    Benchmark("i", "summaries", "benchmarks.bench_summaries", 32, trains=True),
    Benchmark("j", "tls", "benchmarks.bench_tls", 20),
    Benchmark("k", "replication", "benchmarks.bench_replication", 60, trains=True),
    Benchmark("l", "replicated_exchange", "benchmarks.bench_replicated_exchange", 20),
    Benchmark("m", "graph_placement", "benchmarks.bench_graph_placement", 60, trains=True),
    Benchmark("n", "graph_prediction", "benchmarks.bench_graph_prediction", 25, trains=True),
    Benchmark("o", "graph_pipeline", "benchmarks.bench_graph_pipeline", 45, trains=True),
    Benchmark("p", "start", "benchmarks.bench_start", 58),
    Benchmark("q", "architectures", "benchmarks.bench_architectures", 200, True, named_only=True),
    Benchmark("r", "tables", "benchmarks.bench_tables", 80, named_only=True),
    Benchmark("s", "topics", "benchmarks.bench_topics", 400, named_only=True),
    Benchmark("t", "corruption", "benchmarks.bench_corruption", 60, True, named_only=True),
)
"""All of them, in order."""


def chosen(words: Sequence[str]) -> list[Benchmark]:
    """Returns the benchmarks of these letters or names; where none is given, all but some.

    Raises:
        ValueError: there is no such benchmark.
    """
    known = {word: b for b in BENCHMARKS for word in (b.letter, b.name)}
    unknown = [word for word in words if word not in known]
    if unknown:
        listed = ", ".join(f"{b.letter} ({b.name})" for b in BENCHMARKS)
        raise ValueError(f"there is no benchmark {unknown[0]!r}: there are {listed}")
    wanted = {known[word].letter for word in words}
    return [b for b in BENCHMARKS if b.letter in wanted or not (words or b.named_only)]


def run(benchmarks: Sequence[Benchmark], context: Context, results: Path) -> bool:
    """Runs benchmarks one after the other and writes their results.

    Args:
        benchmarks: which.
        context: what all of them are given; each gets its own seconds and scratch directory.
        results: where their files go.

    Returns:
        Whether all of Trireme's own contenders could be measured.
    """
    machine = describe()
    machine["peers"] = {name: context.peers.version(name) or "missing" for name in PEERS}
    begun, sound = time.monotonic(), True
    for benchmark in benchmarks:
        sound &= _run_one(benchmark, context, results, machine)
    context.say(f"{len(benchmarks)} benchmarks in {time.monotonic() - begun:.0f} s: {results}")
    return sound


def _run_one(
    benchmark: Benchmark, context: Context, results: Path, machine: dict[str, Any]
) -> bool:
    say, begun, before = context.say, time.monotonic(), load()
    say(f"({benchmark.letter}) {benchmark.name} ...")
    seconds = benchmark.seconds * (1.5 if not context.peers.missing() else 1.0)
    with tempfile.TemporaryDirectory(prefix="trireme-bench-") as scratch:
        result = _guarded(benchmark, replace(context, seconds=seconds, scratch=Path(scratch)))
    taken = time.monotonic() - begun
    here = {**machine, "load": f"{before} before, {load()} after", "seconds": f"{taken:.0f}"}
    say(report.summary(result))
    for path in report.write(result, here, results):
        say(f"  wrote {path}")
    say(f"  {taken:.0f} s\n")
    return not result.failed


def _guarded(benchmark: Benchmark, context: Context) -> Result:
    """Runs a benchmark; what it raises is its result, and the others go on."""
    try:
        return benchmark.run(context)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        return Result(benchmark.name, benchmark.name, "", True, failed=[reason])
