"""Traces of process groups: one file."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.process_groups import ProcessGroup, run_process_group
from tests.tracing import Event, read_trace, tasks_of
from trireme.launch.environment import current_task
from trireme.session.hooks import Hook
from trireme.session.result import StepResult
from trireme.session.session import Session
from trireme.tracking import profile
from trireme.tracking.profile import Profile

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

INPUTS = torch.linspace(-1, 1, 400).reshape(100, 4)
DATA = TensorDataset(INPUTS, INPUTS[:, :2].argmax(1))
WAYS = {
    "allreduce": ProcessGroup(workers=2),
    "fsdp": ProcessGroup(workers=2, strategy="fsdp"),
    "pipeline": ProcessGroup(workers=2, strategy="pipeline", microbatches=4),
}


class Warnings(logging.Handler):
    """Keeps what a process warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        logging.getLogger("trireme").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


# What the processes run -------------------------------------------------------------------------


def train(*hooks: Hook, steps: int = 6) -> list[str]:
    warnings = Warnings()
    torch.manual_seed(0)
    session = Session(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_steps=steps,
        checkpoint=None,
        hooks=hooks,
    )
    with session:
        for batch in session.loader(DATA, 8):
            session.step(batch)
    return warnings.said


class Evaluates(Hook):
    """Evaluates after each step, in the chief alone: the others then wait for the chief's word."""

    def after_step(self, session: Session, result: StepResult) -> None:
        if session.is_chief:
            session.evaluate(DATA)


def profiled(directory: Path, steps: str) -> list[str]:
    return train(Evaluates(), Profile(steps, operators=False, directory=directory))


def with_stages(directory: Path) -> list[str]:
    return train(Profile("2:4", operators=False, directory=directory))


class Silent(Profile):
    """Profiles, and does not share what it has."""

    def _leave(self, session: Session) -> None:
        self._tracing = None


def without_the_second_part(directory: Path) -> list[str]:
    profile._PATIENCE = 0.1
    kind = Silent if current_task().group.rank else Profile
    return train(kind("2:4", operators=False, directory=directory))


# What comes of it -------------------------------------------------------------------------------


def steps_of(events: list[Event], worker: str) -> dict[str, Event]:
    pid = tasks_of(events)[worker]
    return {e["name"]: e for e in events if e["pid"] == pid and e.get("cat") == "step"}


@pytest.mark.thorough
@pytest.mark.parametrize("steps", ["0:1", "2:5", "4:100"])
@pytest.mark.parametrize("way", ["allreduce", pytest.param("fsdp", marks=pytest.mark.thorough)])
def test_steps_that_processes_make_together_are_together_on_the_timeline(
    tmp_path: Path, way: str, steps: str
) -> None:
    said = run_process_group(WAYS[way], profiled, tmp_path, steps).values
    assert said == [[], []]
    (path,) = tmp_path.iterdir()
    assert path.name == f"steps-{steps.replace(':', '-')}.json.gz"
    events = read_trace(path)
    assert tasks_of(events) == {"worker:0": 1, "worker:1": 2}
    first, second = (steps_of(events, worker) for worker in ("worker:0", "worker:1"))
    begin, end = map(int, steps.split(":"))
    assert list(first) == list(second) == [f"step {n}" for n in range(begin, min(end, 6))]
    for name, one in first.items():  # neither ends a step before the other has begun it
        other = second[name]
        assert one["ts"] < other["ts"] + other["dur"] + 1e4
        assert other["ts"] < one["ts"] + one["dur"] + 1e4


def test_a_part_that_does_not_come_is_named(tmp_path: Path) -> None:
    ran = run_process_group(WAYS["allreduce"], without_the_second_part, tmp_path)
    (warning,), none = ran.values
    assert warning == "the trace of steps 2 to 3 lacks worker:1"
    assert none == []
    assert set(tasks_of(read_trace(tmp_path / "steps-2-4.json.gz"))) == {"worker:0"}


def test_stages_are_on_the_timeline(tmp_path: Path) -> None:
    assert run_process_group(WAYS["pipeline"], with_stages, tmp_path).values == [[], []]
    events = read_trace(tmp_path / "steps-2-4.json.gz")
    tasks = tasks_of(events)
    for stage, worker in enumerate(("worker:0", "worker:1")):
        found = [e for e in events if e["pid"] == tasks[worker] and e.get("cat") == "stage"]
        wanted = [
            f"{kind} {stage}, micro-batch {piece}"
            for kind in ("backward", "forward")
            for piece in range(4)
            for _ in range(2)
        ]
        assert sorted(each["name"] for each in found) == wanted
        computes = [e for e in events if e["pid"] == tasks[worker] and e.get("name") == "compute"]
        assert len(computes) == 2
        for each in found:
            assert any(
                phase["ts"] - 1e3 <= each["ts"]
                and each["ts"] + each["dur"] <= phase["ts"] + phase["dur"] + 1e3
                for phase in computes
            ), each
