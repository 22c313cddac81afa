"""Where the time of a step goes, task by task: on a core, waiting for one, or waiting for others.

    python -m benchmarks.budget [--network mlp|lenet|cifar] [--seconds 5]

It reads what the kernel counts for every process of a job (Linux's `schedstat` and `stat`) while
the job trains, and prints it per step of one worker. Pages that had to be mapped anew are counted
too: they are what an allocator costs that gives memory back too soon.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import THREADS

os.environ.update(THREADS)

import psutil

from benchmarks.context import Context, real_data
from benchmarks.data import prepare
from benchmarks.peers import Peers
from benchmarks.replicas import Replicas, Setup, Slice, loops, running, trireme_job

SETUPS = [
    Setup("two loops", "limit", 2, loops()),
    Setup("two loops, fused optimizer", "limit", 2, loops(options=["--fused"])),
    Setup("Trireme async", "trireme", 2, trireme_job("async")),
    Setup("Trireme async, prefetch", "trireme", 2, trireme_job("async", options=["--prefetch"])),
    Setup("Trireme sync", "trireme", 2, trireme_job("sync")),
]


@dataclass(frozen=True)
class Usage:
    """What a process has used so far, all its threads together.

    Attributes:
        running: nanoseconds on a core.
        queued: nanoseconds ready to run, while others were on the cores.
        switches: how often it gave its core up, or had it taken away.
        faults: pages that were mapped without reading a disk.
    """

    running: int = 0
    queued: int = 0
    switches: int = 0
    faults: int = 0

    def since(self, before: Usage) -> Usage:
        """Returns what was used between two readings."""
        return Usage(
            self.running - before.running,
            self.queued - before.queued,
            self.switches - before.switches,
            self.faults - before.faults,
        )


def usage(process: psutil.Process) -> Usage:
    """Reads what a process has used."""
    running = queued = 0
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        on, waited, _ = (task / "schedstat").read_text().split()
        running, queued = running + int(on), queued + int(waited)
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    switches = process.num_ctx_switches()
    return Usage(running, queued, switches.voluntary + switches.involuntary, int(fields[7]))


def role(process: psutil.Process) -> str:
    """Returns which task a process is."""
    words = process.cmdline()
    if "--task" in words:
        return words[words.index("--task") + 1]
    if "--rank" in words:
        return f"loop:{words[words.index('--rank') + 1]}"
    return "template" if "trireme.fork.process" in words else "launcher"


def family(replicas: Replicas) -> Iterator[psutil.Process]:
    """Yields all processes of a contender."""
    for program in replicas.programs:
        process = psutil.Process(program.pid)
        yield process
        yield from process.children(recursive=True)


def measure(replicas: Replicas, seconds: float) -> tuple[dict[str, Usage], int, float]:
    """Lets a contender run; returns what each task used, the worker steps made, and the seconds."""
    processes = {role(process): process for process in family(replicas)}
    replicas.gate.open()
    try:
        time.sleep(1.0)
        before, began = _readings(processes), time.perf_counter()
        steps = _steps(replicas)
        time.sleep(seconds)
        after, took = _readings(processes), time.perf_counter() - began
        made = _steps(replicas) - steps
    finally:
        replicas.gate.close()
        replicas.gate.settle()
    return {name: after[name].since(before[name]) for name in after}, made, took


def _readings(processes: dict[str, psutil.Process]) -> dict[str, Usage]:
    return {name: usage(process) for name, process in processes.items()}


def _steps(replicas: Replicas) -> int:
    return sum(lane.steps for lane in replicas.gate.lanes())


def table(name: str, used: dict[str, Usage], made: int, took: float) -> Iterable[str]:
    """Yields the lines of one contender; times are microseconds per worker step."""
    wall = took * 2e6 / made
    total = sum(one.running for one in used.values()) / made / 1e3
    yield f"{name}: {made / took:,.0f} worker steps/s; a step takes {wall:,.0f} us, and all tasks "
    yield f"  together {total:,.0f} us of processor time for it"
    yield f"  {'task':14s} {'running':>9s} {'queued':>9s} {'switches':>9s} {'pages':>9s}"
    for task, one in sorted(used.items()):
        # A worker's own steps are half of all; everybody else works for both workers' steps.
        steps = made / 2 if task.startswith(("worker", "loop")) else made
        yield (
            f"  {task:14s} {one.running / steps / 1e3:9.1f} {one.queued / steps / 1e3:9.1f} "
            f"{one.switches / steps:9.2f} {one.faults / steps:9.1f}"
        )


def main() -> None:
    """Measures every contender once."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget", description=__doc__)
    parser.add_argument("--network", default="mlp", choices=("mlp", "lenet", "cifar"))
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    if sys.platform != "linux":
        parser.error("it reads /proc, which only Linux has")
    with tempfile.TemporaryDirectory() as scratch:
        context = Context(
            seconds=0,
            starts=1,
            quick=False,
            peers=Peers(Path(os.devnull)),
            data=real_data(),
            scratch=Path(scratch),
            say=print,
        )
        data, described = prepare(context, given.network)
        print(f"{given.network}: {described}; microseconds per worker step")
        with running(context, SETUPS, data, given.network, Slice()) as (contenders, _):
            for replicas in contenders:
                for line in table(replicas.name, *measure(replicas, given.seconds)):
                    print(line)


if __name__ == "__main__":
    main()
