"""What goes on around a step: clipping, averages, schedules, groups, weights of unequal batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

from tests.harness import Cluster
from tests.parity.plain import Batch, OptimizerFactory, Problem, Recipe, difference, loss_of, train
from tests.parity.problems import EXACT, adam, same_everywhere, sgd, small, trained
from trireme.ps.rule import Average
from trireme.session.checkpoint import latest
from trireme.session.options import Checkpoint
from trireme.session.session import Session

ALONE = Cluster(1, 0)
ASYNC = Cluster(1, 1, "async")
SSP = Cluster(1, 2, "ssp", staleness=3)
SYNC = Cluster(2, 1, "sync")
SYNC_ON_TWO = Cluster(2, 2, "sync")
MODES = {
    "alone": ALONE,
    "async": ASYNC,
    "ssp": SSP,
    "sync": SYNC,
    "sync on two servers": SYNC_ON_TWO,
}


@pytest.fixture(params=MODES.values(), ids=MODES)
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """Every mode in which the batches of a step are those of one process."""
    return request.param


def assert_equal(
    cluster: Cluster,
    make: OptimizerFactory,
    recipe: Recipe,
    problem: Problem | None = None,
    **options: Any,
) -> None:
    problem = problem or small()
    expected = train(problem, make, recipe)
    values = same_everywhere(trained(problem, make, cluster, **options))
    assert difference(values, expected.values) < EXACT
    untouched = train(problem, make)
    if recipe != Recipe():
        assert difference(values, untouched.values) > 1e-4, "the recipe changed nothing"


# Gradient clipping ---------------------------------------------------------------------------


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("make", [sgd(), adam()], ids=["sgd", "adam"])
def test_clips_the_mean_of_a_step_as_clip_grad_norm_does(
    cluster: Cluster, make: OptimizerFactory
) -> None:
    assert_equal(cluster, make, Recipe(clip_norm=0.2), clip_norm=0.2)


def test_a_limit_that_is_not_reached_changes_nothing(cluster: Cluster) -> None:
    assert_equal(cluster, sgd(), Recipe(), clip_norm=1e6)


# Schedules: the hyper-parameters travel with the pushes ----------------------------------------


SCHEDULES = {
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.8),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 6, 0.3),
    "warm-up": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, n / 10)),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=30),
}
"""The last moves momentum, or the betas, too."""


@pytest.mark.slow(one_in=3)
@pytest.mark.thorough
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("make", [sgd(), adam()], ids=["sgd", "adam"])
def test_schedules_count_global_steps(
    cluster: Cluster, make: OptimizerFactory, schedule: Any
) -> None:
    assert_equal(cluster, make, Recipe(scheduler=schedule), scheduler=schedule)


# Parameter groups and weight decay -------------------------------------------------------------


def grouped(params: Any) -> torch.optim.Optimizer:
    """Weights decay; biases learn faster and do not; the groups are not in the model's order."""
    params = list(params)
    biases = {"params": [p for p in params if p.dim() == 1], "lr": 0.05}
    weights = {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1}
    return torch.optim.AdamW([biases, weights], lr=0.01, weight_decay=0.0)


def grouped_sgd(params: Any) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.SGD(
        [
            {"params": params[::2], "momentum": 0.9, "nesterov": True},
            {"params": params[1::2], "lr": 0.5, "weight_decay": 0.1},
        ],
        lr=0.05,
    )


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("make", [grouped, grouped_sgd], ids=["adamw", "sgd"])
def test_each_parameter_group_has_its_own_hyper_parameters(
    cluster: Cluster, make: OptimizerFactory
) -> None:
    assert_equal(cluster, make, Recipe())


def test_a_schedule_moves_every_group_by_its_own(cluster: Cluster) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)])

    assert_equal(cluster, grouped, Recipe(scheduler=schedule), scheduler=schedule)


# The loss and its gradient ---------------------------------------------------------------------


def test_l2_is_added_to_the_loss_of_the_weights(cluster: Cluster) -> None:
    assert_equal(cluster, sgd(), Recipe(l2=0.05), l2=0.05)


class WithIdle(nn.Module):
    """A network with a layer that no batch uses."""

    def __init__(self, used: nn.Module) -> None:
        super().__init__()
        self.used = used
        self.idle = nn.Linear(3, 3)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.used(inputs)


def test_l2_reaches_weights_that_no_batch_uses(cluster: Cluster) -> None:
    problem = small()
    problem = replace(problem, model=WithIdle(problem.model))
    assert_equal(cluster, sgd(), Recipe(l2=0.05), problem, l2=0.05)


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize("pieces", [2, 5])
def test_accumulation_makes_the_same_update(cluster: Cluster, pieces: int) -> None:
    assert_equal(cluster, sgd(), Recipe(), accumulate=pieces)


def test_l2_and_clipping_with_accumulation_and_a_schedule(cluster: Cluster) -> None:
    schedule = SCHEDULES["exponential"]
    recipe = Recipe(l2=0.05, clip_norm=0.3, scheduler=schedule)
    assert_equal(cluster, adam(), recipe, l2=0.05, clip_norm=0.3, scheduler=schedule, accumulate=3)


# Batches of unequal size -----------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("sizes", [(17, 7), (1, 20, 3), (23, 1)])
def test_unequal_batches_weigh_by_their_examples(servers: int, sizes: tuple[int, ...]) -> None:
    problem = small()
    split = [(x.split(sizes), y.split(sizes)) for x, y in problem.batches]
    shares: list[list[Batch]] = [[(x[w], y[w]) for x, y in split] for w in range(len(sizes))]
    cluster = Cluster(len(sizes), servers, "sync")
    values = same_everywhere(trained(problem, sgd(), cluster, shares=shares))
    assert difference(values, train(problem, sgd()).values) < EXACT


# Moving averages -------------------------------------------------------------------------------

AVERAGES = {
    "constant": (Average(0.9, warm_up=False), lambda n: 0.9),
    "warm-up": (0.6, lambda n: min(0.6, (1 + n) / (10 + n))),
}
"""The latter reaches its last decay at step 13 of 20."""


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize(("ema", "decay"), AVERAGES.values(), ids=AVERAGES)
def test_the_moving_average_is_saved_and_evaluated(
    cluster: Cluster, ema: Any, decay: Any, tmp_path: Path
) -> None:
    problem = small()
    expected = train(problem, sgd(), Recipe(decay=decay))
    with_run_dir = Cluster(**{**vars(cluster), "run_dir": tmp_path})
    inputs, targets = (torch.cat(column) for column in zip(*problem.batches, strict=True))

    def evaluate(session: Session) -> float:
        return session.evaluate(TensorDataset(inputs, targets), batch_size=50)["loss"]

    losses = trained(problem, sgd(), with_run_dir, ema=ema, then=evaluate, checkpoint=Checkpoint())

    saved = latest(tmp_path, lambda path, error: pytest.fail(f"{path}: {error}"))
    assert saved is not None and saved.step == len(problem.batches)
    assert difference(saved.average, expected.average) < EXACT
    assert difference(saved.model, expected.values) < EXACT
    model = problem.copy()
    model.load_state_dict(expected.average)
    with torch.no_grad():
        assert losses == pytest.approx([float(loss_of(model(inputs), targets))] * len(losses))
