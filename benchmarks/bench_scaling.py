"""(c) One to sixteen workers, device time EMULATED, the bytes of 1M parameters real."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.cluster import Address, flat_vector, join, kill, start_servers
from benchmarks.context import Context
from benchmarks.emulated import sleep_until
from benchmarks.forked import Forked, fork
from benchmarks.gate import Gate, rate
from benchmarks.pairs import Plan, Sample, interleave
from benchmarks.processes import cpu_seconds
from benchmarks.programs.lane import Lane
from benchmarks.results import Entry, Goal, Result
from trireme.ps.rule import Rule

WORKERS = (1, 2, 4, 8, 16)
RULES = {"async": Rule(), "sync": Rule(aggregate=0, staleness=0)}
DEVICE_SECONDS = 0.2
NUMBERS = 1_000_000
IDEAL = "no communication"


def run(context: Context) -> Result:
    """Measures the steps per second of all workers together."""
    result = Result(
        name="scaling",
        title="Scaling, 1M parameters, device time EMULATED by a sleep of 200 ms",
        unit="worker steps/s",
        higher_is_better=True,
        references=(IDEAL,),
        x_label="workers",
        goals=[_goal(mode) for mode in RULES],
    )
    workers = (1, 4) if context.quick else WORKERS
    plan = Plan(1, least=1) if context.quick else Plan(7, seconds=context.seconds, least=3)
    seconds = 1.0 if context.quick else 2.0
    with _jobs(context.scratch, workers, seconds) as jobs:
        measured = interleave(jobs, plan, say=context.say)
    for job in jobs:
        samples = measured.samples.get(job.name)
        if samples:
            condition = _condition(job.workers)
            entry = Entry(condition, f"Trireme {job.mode}", "trireme", tuple(samples), job.workers)
            result.entries.append(entry)
    result.failed += [f"{name} failed: {why}" for name, why in measured.failed.items()]
    for count in workers:
        ideal = Sample(count / DEVICE_SECONDS)
        rounds = max((len(samples) for samples in measured.samples.values()), default=1)
        entry = Entry(_condition(count), IDEAL, "limit", (ideal,) * rounds, count)
        result.entries.append(entry)
    result.notes += [
        "EMULATED: each worker sleeps to an absolute deadline, 200 ms after its values have come, "
        "where a device would compute; the gradient's and the values' 4 MB, the server and the "
        "worker processes are real. All workers begin together.",
        "A worker is a process with the client that a session has and a model that is one vector. "
        "It does not compute a gradient: sixteen that did would measure this machine's cores.",
        f"{IDEAL}: workers / 200 ms, computed and not measured.",
        "One server, shared memory where the system has it.",
    ]
    return result


def _goal(mode: str) -> Goal:
    name = f"Trireme {mode}"
    return Goal(
        f"{mode}: 16 workers over one worker",
        _condition(16),
        name,
        name,
        at_least=15,
        reference_condition=_condition(1),
    )


def _condition(workers: int) -> str:
    return f"{workers} worker{'s' if workers > 1 else ''}"


@dataclass
class _Job:
    """A job that waits at its gate."""

    mode: str
    workers: int
    gate: Gate
    processes: list[Forked]
    seconds: float

    @property
    def name(self) -> str:
        """In the results."""
        return f"{self.mode}, {self.workers}"

    def measure(self) -> Sample:
        """Lets the workers run for a while; the first steps do not count."""
        pids = [process.pid for process in self.processes]
        self.gate.open()
        try:
            time.sleep(3 * DEVICE_SECONDS)
            before, begin = cpu_seconds(pids), time.perf_counter()
            time.sleep(self.seconds)
            end, after = time.perf_counter(), cpu_seconds(pids)
        finally:
            self.gate.close()
            self.gate.settle(1.0)
        stamps = list(self.gate.stamps(begin, end).values())
        rates = [rate(times) for times in stamps]
        if len(rates) < self.workers or not all(rates):
            raise RuntimeError(f"{self.workers - sum(map(bool, rates))} workers made no steps")
        return Sample(sum(rates), sum(map(len, stamps)), after - before)


@contextmanager
def _jobs(scratch: Path, workers: Sequence[int], seconds: float) -> Iterator[list[_Job]]:
    jobs: list[_Job] = []
    started: list[Forked] = []
    try:
        for count in workers:
            for mode, rule in RULES.items():
                lanes = scratch / f"{mode}-{count}"
                lanes.mkdir()
                gate = Gate(lanes)
                address, servers = start_servers(workers=count, servers=1, shared=True)
                started += servers
                replicas = [
                    fork(f"worker:{index}", _work, address, index, str(lanes), rule)
                    for index in range(count)
                ]
                started += replicas
                gate.wait_until_ready(count, time.monotonic() + 120)
                jobs.append(_Job(mode, count, gate, [*servers, *replicas], seconds))
        yield jobs
    finally:
        kill(started)


def _work(pipe: Connection, address: Address, index: int, lanes: str, rule: Rule) -> None:
    model = flat_vector(NUMBERS)
    replica = join(address, index, model, torch.optim.Adam(model.parameters()), rule)
    for gradient in replica.flat.gradients:
        gradient.fill_(1e-3)
    lane = Lane(lanes, f"worker-{index}")
    lane.wait()
    while True:
        sleep_until(time.perf_counter() + DEVICE_SECONDS)
        replica.exchange()
        lane.step()
