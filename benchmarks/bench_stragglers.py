"""(d) Four workers, one five times slower: the time to a target loss. Device time EMULATED."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from benchmarks.cluster import Address, join, kill, start_servers
from benchmarks.context import Context
from benchmarks.emulated import Device, sleep_until
from benchmarks.forked import Forked, fork
from benchmarks.pairs import Plan, Sample, interleave
from benchmarks.processes import cpu_seconds
from benchmarks.results import Goal, Kind, Result
from trireme.data import digits
from trireme.models import MLP
from trireme.ps.rule import Rule

Examples = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]

WORKERS = 4
SLOWER = 5.0
DEVICE_SECONDS = 0.03
JITTER = 0.3
BATCH = 32
TARGET = 0.4
LOOSE, TIGHT = 64, 8
LONGEST = 30.0
WATCHED = 480  # training examples of which the loss is taken


@dataclass(frozen=True)
class _Mode:
    """A mode of the one rule, and its learning rate.

    A round of four moves the values once and four asynchronous pushes move them four times: by the
    linear scaling rule (Goyal et al., Accurate, Large Minibatch SGD, 2017, 2.1) the latter have a
    quarter of the rate, and both kinds train alike.
    """

    rule: Rule
    learning_rate: float


MODES = {
    "sync": _Mode(Rule(aggregate=0, staleness=0), 0.4),
    "backup": _Mode(Rule(aggregate=WORKERS - 1, staleness=0), 0.4),
    f"ssp {LOOSE}": _Mode(Rule(staleness=LOOSE), 0.1),
    f"ssp {TIGHT}": _Mode(Rule(staleness=TIGHT), 0.1),
    "async": _Mode(Rule(), 0.1),
}
EQUAL, SLOW = "four equal", "one of four 5x slower"
WITHOUT_EQUAL = ("backup", f"ssp {TIGHT}")
"""Modes that four equal workers are not measured in."""


def run(context: Context) -> Result:
    """Measures the seconds until the loss on all training examples is at the target."""
    result = Result(
        name="stragglers",
        title=f"Seconds to a loss of {TARGET}: four workers, device time EMULATED",
        unit="s",
        higher_is_better=False,
        references=("sync, four equal",),
        work="run",
        goals=_goals(),
    )
    contests = [_Contest(mode, slow) for slow in (False, True) for mode in MODES]
    contests = [c for c in contests if c.slow or c.mode not in WITHOUT_EQUAL]
    plan = Plan(1, 0, least=1) if context.quick else Plan(7, 0, seconds=context.seconds, least=3)
    measured = interleave(contests, plan, say=context.say)
    kinds: dict[str, Kind] = {contest.name: "trireme" for contest in contests}
    result.add(measured, kinds)
    result.notes += [
        f"EMULATED: a worker sleeps to an absolute deadline, {DEVICE_SECONDS * 1000:.0f} ms after "
        f"its values have come ({SLOWER:g} times that for the slow one), times a lognormal factor "
        f"of mean 1 and sigma {JITTER}; within that time it computes the real gradient.",
        f"Training is real: MLP 64-100-10 on the digits, batches of {BATCH} a worker, SGD at 0.4 "
        "for a synchronous round and a quarter of it for an asynchronous push. The loss is that "
        f"of {WATCHED} training examples under the values that a worker has just pulled; the first "
        "worker to see the target stops the watch.",
        f"ssp {LOOSE}, ssp {TIGHT}: a worker may be so many pushes ahead of the slowest. The bound "
        "only postpones: once it is reached, all go at the slowest one's pace. "
        "backup: rounds of the first three.",
        "Goals compare with four equal workers of the same mode (backup: of sync).",
    ]
    return result


def _goals() -> list[Goal]:
    loose = f"ssp {LOOSE}"
    pairs = [("backup", "sync", 1.15), ("async", "async", 1.4), (loose, loose, 1.4)]
    goals = [
        Goal(f"{mode}, one slow: of {equal} with four equal", "", _name(mode, True),
             _name(equal, False), at_most=bound)
        for mode, equal, bound in pairs
    ]  # fmt: skip
    plain = Goal(
        "sync, one slow: of sync with four equal (for comparison)", "", _name("sync", True),
        _name("sync", False), at_least=1.0,
    )  # fmt: skip
    return [*goals, plain]


def _name(mode: str, slow: bool) -> str:
    return f"{mode}, {SLOW if slow else EQUAL}"


@dataclass
class _Contest:
    """One mode with or without a slow worker; each measurement is a run of its own."""

    mode: str
    slow: bool
    _runs: int = 0

    @property
    def name(self) -> str:
        """In the results."""
        return _name(self.mode, self.slow)

    def measure(self) -> Sample:
        """Trains from the beginning until the target is reached.

        Raises:
            TimeoutError: it was not reached in time.
        """
        self._runs += 1
        address, servers = start_servers(workers=WORKERS, servers=1, shared=True)
        replicas: list[Forked] = []
        try:
            for index in range(WORKERS):
                arguments = (address, index, MODES[self.mode], self._device(index), _examples())
                replicas.append(fork(f"worker:{index}", _work, *arguments))
            for replica in replicas:
                replica.receive(60)
            begin = time.perf_counter()
            for replica in replicas:
                replica.pipe.send(begin)
            reached = _first(replicas, begin + LONGEST)
            cpu = cpu_seconds(process.pid for process in [*servers, *replicas])
            return Sample(reached - begin, 1, cpu)
        finally:
            kill([*replicas, *servers])

    def _device(self, index: int) -> Device:
        slower = SLOWER if self.slow and index == WORKERS - 1 else 1.0
        return Device(DEVICE_SECONDS * slower, JITTER, 1000 * self._runs + index)


def _first(replicas: list[Forked], deadline: float) -> float:
    """Returns when the first worker saw the target."""
    while time.perf_counter() < deadline:
        for replica in replicas:
            if replica.pipe.poll(0.005):
                return float(replica.receive(1))
    raise TimeoutError(f"the target was not reached within {LONGEST:.0f} s")


@cache
def _examples() -> Examples:
    """Returns the digits; loaded here, since scikit-learn takes each process a second to import."""
    inputs, targets = digits.load()[0].tensors
    return inputs.numpy(), targets.numpy()


def _work(
    pipe: Connection, address: Address, index: int, mode: _Mode, device: Device, examples: Examples
) -> None:
    torch.manual_seed(0)
    inputs, targets = (torch.from_numpy(array) for array in examples)
    model = MLP(64, 100, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=mode.learning_rate)
    replica = join(address, index, model, optimizer, mode.rule)
    criterion: Any = nn.CrossEntropyLoss()
    generator = torch.Generator().manual_seed(device.seed)
    pipe.send("ready")
    pipe.recv()
    for seconds in device.times(100_000):
        deadline = time.perf_counter() + seconds
        chosen = torch.randint(len(inputs), (BATCH,), generator=generator)
        replica.flat.zero_gradients()
        criterion(model(inputs[chosen]), targets[chosen]).backward()
        sleep_until(deadline)
        replica.exchange(float(BATCH))
        pulled = time.perf_counter()
        with torch.no_grad():
            if float(criterion(model(inputs[:WATCHED]), targets[:WATCHED])) <= TARGET:
                pipe.send(pulled)
                pipe.recv()  # for ever: it is killed, and its processor time counted before
