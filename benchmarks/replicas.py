"""Contenders that train a network in processes of their own, let through a gate in turn."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.context import Context
from benchmarks.gate import Gate, rate
from benchmarks.machine import ROOT, loopback_bytes
from benchmarks.pairs import Interleaved, Plan, Sample, interleave
from benchmarks.processes import Program, cpu_seconds, free_ports
from benchmarks.results import Kind

PROGRAMS = ROOT / "benchmarks" / "programs"
START_SECONDS = 240.0

Commands = Callable[["Place"], list[list[str]]]


@dataclass(frozen=True)
class Place:
    """Where one contender's processes run.

    Attributes:
        directory: its own.
        common: the options that every replica program takes.
    """

    directory: Path
    common: list[str]


@dataclass(frozen=True)
class Setup:
    """One contender, not started yet.

    Attributes:
        name: in the results.
        kind: see `benchmarks.results`.
        workers: how many participants make steps.
        commands: what to start.
    """

    name: str
    kind: Kind
    workers: int
    commands: Commands


@dataclass(frozen=True)
class Slice:
    """One turn.

    Attributes:
        settle: seconds after the gate opens that do not count: the caches are somebody else's.
        seconds: that count.
        batch: how many examples a step of one worker is; 1 to count steps.
    """

    settle: float = 0.3
    seconds: float = 1.5
    batch: int = 1


@dataclass
class Replicas:
    """A contender that has been started and waits at its gate."""

    setup: Setup
    gate: Gate
    programs: list[Program]
    turn: Slice

    @property
    def name(self) -> str:
        """In the results."""
        return self.setup.name

    def measure(self) -> Sample:
        """Opens the gate for a while; returns the steps, or examples, per second of all workers.

        Raises:
            RuntimeError: a process has ended, or a worker made no steps.
        """
        for program in self.programs:
            program.check()
        pids = [program.pid for program in self.programs]
        self.gate.open()
        try:
            time.sleep(self.turn.settle)
            before, sent, begin = cpu_seconds(pids), loopback_bytes(), time.perf_counter()
            time.sleep(self.turn.seconds)
            end, sent, after = time.perf_counter(), loopback_bytes() - sent, cpu_seconds(pids)
        finally:
            self.gate.close()
            self.gate.settle()
        stamps = self.gate.stamps(begin, end)
        rates = [rate(times) for times in stamps.values()]
        if len(rates) < self.setup.workers or not all(rates):
            raise RuntimeError(f"only {sum(map(bool, rates))} workers made steps: {self.tails()}")
        steps = sum(len(times) for times in stamps.values())
        return Sample(sum(rates) * self.turn.batch, steps, after - before, nbytes=sent)

    def tails(self) -> str:
        """Returns the last that each process said."""
        return " | ".join(program.tail(3) for program in self.programs)

    def progress(self) -> str:
        """Returns how training went, in a line: one that trains nothing is found out."""
        lanes = self.gate.lanes()
        loss = sum(lane.loss for lane in lanes) / max(len(lanes), 1)
        steps = sum(lane.steps for lane in lanes)
        step = max((lane.global_step for lane in lanes), default=0)
        return f"{self.name}: loss {loss:.3g} after {steps:,} worker steps, global step {step:,}"

    def close(self) -> None:
        """Ends all processes."""
        for program in self.programs:
            program.kill()


def take_turns(
    context: Context, setups: Sequence[Setup], data: Path, network: str, turn: Slice, plan: Plan
) -> tuple[Interleaved, list[str]]:
    """Has contenders train in turn; returns the rounds, and a line on how each one's training went.

    They are started `context.starts` times, for `plan` each time: two starts of the same program
    differ by up to a tenth for as long as they run, however many rounds are made. A contender that
    fails is not started again.
    """
    measured, went = Interleaved(), []
    for start in range(context.starts):
        left = [setup for setup in setups if setup.name not in measured.failed]
        with running(context, left, data, network, turn) as (contenders, failed):
            rounds = interleave(contenders, plan, say=context.say)
            rounds.failed.update(failed)
            which = f"start {start + 1}: " if context.starts > 1 else ""
            went += [which + contender.progress() for contender in contenders]
        measured.extend(rounds, start)
    return measured, went


@contextmanager
def running(
    context: Context, setups: Sequence[Setup], data: Path, network: str, turn: Slice
) -> Iterator[tuple[list[Replicas], dict[str, str]]]:
    """Starts contenders, all at once, and waits until each is at its gate.

    Yields:
        Those that came, and why the others did not.
    """
    started: list[Replicas] = []
    failed: dict[str, str] = {}
    try:
        for number, setup in enumerate(setups):
            started.append(_start(context, number, setup, data, network, turn))
        ready = []
        deadline = time.monotonic() + START_SECONDS
        for replicas in started:
            try:
                _wait(replicas, deadline)
                ready.append(replicas)
            except (RuntimeError, TimeoutError) as error:
                failed[replicas.name] = str(error)
                context.say(f"  {replicas.name} did not start: {error}")
                replicas.close()
        yield ready, failed
    finally:
        for replicas in started:
            replicas.close()


def _start(
    context: Context, number: int, setup: Setup, data: Path, network: str, turn: Slice
) -> Replicas:
    directory = context.scratch / f"{network}-{number}-{time.monotonic_ns()}"
    lanes = directory / "lanes"
    lanes.mkdir(parents=True)
    gate = Gate(lanes)
    common = ["--lanes", str(lanes), "--data", str(data), "--network", network]
    programs = [
        Program(command, log=directory / f"log-{index}.txt", directory=directory)
        for index, command in enumerate(setup.commands(Place(directory, common)))
    ]
    return Replicas(setup, gate, programs, turn)


def _wait(replicas: Replicas, deadline: float) -> None:
    while True:
        try:
            replicas.gate.wait_until_ready(
                replicas.setup.workers, min(deadline, time.monotonic() + 0.5)
            )
            return
        except TimeoutError as error:
            for program in replicas.programs:
                program.check()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{error}: {replicas.tails()}") from error


# The contenders --------------------------------------------------------------------------------


def trireme_job(
    strategy: str,
    *,
    workers: int = 2,
    servers: int = 1,
    options: Sequence[str] = (),
    program: Sequence[str] = (),
    script: str = "trireme_replica.py",
) -> Commands:
    """A job as a user starts it: `trireme run`, with options, and more for the program."""

    def commands(place: Place) -> list[list[str]]:
        run = [sys.executable, "-m", "trireme", "run", "--ps", str(servers)]
        run += ["--workers", str(workers), "--strategy", strategy, *options]
        return [[*run, str(PROGRAMS / script), *place.common, *program]]

    return commands


def loops(*, count: int = 2, options: Sequence[str] = ()) -> Commands:
    """Plain loops that never talk to each other."""

    def commands(place: Place) -> list[list[str]]:
        program = [sys.executable, str(PROGRAMS / "loop.py"), *place.common, *options]
        return [[*program, "--rank", str(rank)] for rank in range(count)]

    return commands


def ddp(place: Place) -> list[list[str]]:
    """Two ranks of DistributedDataParallel over gloo."""
    meet = f"file://{place.directory}/meet"
    program = [sys.executable, str(PROGRAMS / "ddp.py"), *place.common, "--meet", meet]
    return [[*program, "--world", "2", "--rank", str(rank)] for rank in range(2)]


def tensorflow(python: Path, *, synchronous: bool) -> Commands:
    """One server and two workers of TensorFlow's compat.v1."""

    def commands(place: Place) -> list[list[str]]:
        ps, first, second = (f"127.0.0.1:{port}" for port in free_ports(3))
        program = [str(python), str(PROGRAMS / "tensorflow_replica.py"), *place.common]
        program += ["--ps", ps, "--workers", f"{first},{second}"]
        program += ["--synchronous"] if synchronous else []
        tasks = [("ps", 0), ("worker", 0), ("worker", 1)]
        return [[*program, "--job", job, "--rank", str(rank)] for job, rank in tasks]

    return commands
