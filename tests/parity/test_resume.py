"""A job that was stopped and resumed is the job that was not: bit by bit, wherever it stopped.

`tests/integration/test_resume.py` does the same with processes and SIGTERM; here it is done at many
steps, with other numbers of servers, for several optimizers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from tests.harness import Cluster, run_job
from tests.parity.plain import OptimizerFactory, difference, loss_of
from tests.parity.problems import adam, sgd, small
from trireme.session.checkpoint import CheckpointData, latest
from trireme.session.options import Checkpoint
from trireme.session.session import Session

STEPS, BATCH = 24, 10
DATA = 97
"""Examples: so batches cross the borders of epochs, and a job of 2 workers sees each 4 times."""


def adagrad(params: object) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.1, lr_decay=0.05, initial_accumulator_value=0.1)


def rmsprop(params: object) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.9)


MAKERS = {"sgd": sgd(), "adam": adam(amsgrad=True), "adagrad": adagrad, "rmsprop": rmsprop}


def noisy(batch: tuple[torch.Tensor, ...], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    inputs, targets = batch
    noise = torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)
    return inputs + 0.1 * noise, targets


def schedule(optimizer: torch.optim.Optimizer) -> lr_scheduler.OneCycleLR:
    """Moves the learning rate, and momentum where there is one."""
    has_momentum = not isinstance(optimizer, torch.optim.Adagrad)
    return lr_scheduler.OneCycleLR(optimizer, 0.1, STEPS, cycle_momentum=has_momentum)


def train(
    run_dir: Path, cluster: Cluster, make: OptimizerFactory, *, stop_at: int | None = None
) -> CheckpointData:
    """Trains until step `STEPS`, or until about `stop_at`; returns what was saved then."""
    problem = small(steps=1, batch=DATA, dtype=torch.float32)
    data = TensorDataset(*problem.batches[0])

    def session(worker: int) -> Session:
        return Session(
            problem.copy(),
            loss_of,
            make,
            max_steps=STEPS,
            deterministic=True,
            ema=0.9,
            scheduler=schedule,
            checkpoint=Checkpoint(every_seconds=None),
        )

    def program(session: Session) -> None:
        for batch in session.loader(data, BATCH, transform=noisy):
            if session.global_step == stop_at and session.is_chief:
                session.stop("the test")
            session.step(batch)

    placed = Cluster(**{**vars(cluster), "run_dir": run_dir})
    assert run_job(placed, session, program).values == [None] * cluster.workers
    saved = latest(run_dir, lambda path, error: pytest.fail(f"{path}: {error}"))
    assert saved is not None
    assert saved.step == STEPS or (stop_at is not None and stop_at < saved.step < STEPS)
    return saved


def largest_difference(one: CheckpointData, other: CheckpointData) -> float:
    assert one.state["consumed"] == other.state["consumed"]
    return max(difference(one.model, other.model), difference(one.average, other.average))


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough(but=("adam",))
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_goes_on_bit_by_bit_whatever_the_number_of_servers(
    make: OptimizerFactory, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", Cluster(2, 1, "sync"), make)
    for place, (stop_at, before, after) in enumerate(
        [(1, 1, 1), (6, 1, 3), (13, 2, 1), (20, 3, 2)]
    ):
        run_dir = tmp_path / str(place)
        train(run_dir, Cluster(2, before, "sync"), make, stop_at=stop_at)
        resumed = train(run_dir, Cluster(2, after, "sync"), make)
        assert largest_difference(resumed, whole) == 0.0
        assert difference(resumed.optimizer, whole.optimizer) == 0.0


def test_goes_on_with_other_workers_at_the_exact_example(tmp_path: Path) -> None:
    """One worker instead of two, with a batch that is not theirs together: no example is left."""
    stopped = train(tmp_path, Cluster(2, 1, "sync"), sgd(), stop_at=7)
    assert stopped.state["consumed"] == {"train": [[0, 2 * BATCH * stopped.step]]}
    resumed = train(tmp_path, Cluster(1, 1, "async"), sgd())
    examples = BATCH * (2 * stopped.step + STEPS - stopped.step)
    assert resumed.state["consumed"] == {"train": [[0, examples]]}


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_moves_between_a_lone_process_and_servers(make: OptimizerFactory, tmp_path: Path) -> None:
    """The optimizers are different objects there, and do the same: up to rounding."""
    whole = train(tmp_path / "whole", Cluster(1, 0), make)
    for name, before, after in (("out", 0, 2), ("back", 2, 0), ("home", 0, 0)):
        train(tmp_path / name, Cluster(1, before), make, stop_at=9)
        resumed = train(tmp_path / name, Cluster(1, after), make)
        found = largest_difference(resumed, whole)
        assert found == 0.0 if name == "home" else found < 1e-5
