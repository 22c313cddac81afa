"""Workers that train by themselves: what their exchanges come to, against plain loops."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.harness import Cluster, run_job
from tests.parity.plain import (
    Batch,
    OptimizerFactory,
    Problem,
    Recipe,
    Values,
    difference,
    gradients,
    loss_of,
    train,
    values_of,
)
from tests.parity.problems import EXACT, adam, same_everywhere, sgd, small, trained
from trireme.errors import ConfigurationError
from trireme.ps.messages import Applied, Stale
from trireme.session.checkpoint import CheckpointData, latest, list_checkpoints, step_of
from trireme.session.options import Checkpoint
from trireme.session.session import Session

MAKERS = pytest.mark.parametrize("make", [sgd(), adam()], ids=["sgd", "adam"])


def plain_sgd() -> OptimizerFactory:
    return lambda params: torch.optim.SGD(params, lr=0.1)


class Outer:
    """The global values, and what the servers do with the workers' deltas. Only torch in here."""

    def __init__(self, model: nn.Module, make: OptimizerFactory) -> None:
        self.model = model
        self._optimizer = make(model.parameters())

    def round(self, workers: Sequence[nn.Module], weights: Sequence[float]) -> None:
        """Applies the weighted mean of the workers' deltas; they take the new values over."""
        pairs = zip(self.model.parameters(), *(w.parameters() for w in workers), strict=True)
        for parameter, *others in pairs:
            deltas = [
                weight * (parameter.detach() - other.detach())
                for weight, other in zip(weights, others, strict=True)
            ]
            parameter.grad = sum(deltas[1:], deltas[0]) / sum(weights)
        self._optimizer.step()
        for worker in workers:
            worker.load_state_dict(self.model.state_dict())


def train_locally(
    problem: Problem,
    make: OptimizerFactory,
    outer: OptimizerFactory,
    shares: Sequence[Sequence[Batch]],
    every: int,
) -> Values:
    """Each worker trains on its share; after every so many steps, and at the end, a round."""
    rule = Outer(problem.copy(), outer)
    models = [problem.copy() for _ in shares]
    optimizers = [make(model.parameters()) for model in models]
    weights = [0.0] * len(shares)
    for step in range(1, len(shares[0]) + 1):
        for worker, model in enumerate(models):
            batch = shares[worker][step - 1]
            pairs = zip(model.parameters(), gradients(model, batch), strict=True)
            for parameter, gradient in pairs:
                parameter.grad = gradient
            optimizers[worker].step()
            weights[worker] += len(batch[0])
        if step % every == 0 or step == len(shares[0]):
            rule.round(models, weights)
            weights = [0.0] * len(shares)
    return values_of(rule.model)


def averaged() -> OptimizerFactory:
    return lambda params: torch.optim.SGD(params, lr=1.0)


def nesterov() -> OptimizerFactory:
    return lambda params: torch.optim.SGD(params, lr=0.9, momentum=0.5, nesterov=True)


# What it is equal to ---------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_averaging_after_each_step_of_sgd_is_the_mean_gradient(workers: int) -> None:
    problem = small()
    values = same_everywhere(
        trained(problem, plain_sgd(), Cluster(workers, 1, "averaging", every=1))
    )
    mean = same_everywhere(trained(problem, plain_sgd(), Cluster(workers, 1, "sync")))
    assert difference(values, mean) < EXACT
    assert difference(values, train(problem, plain_sgd()).values) < EXACT


@pytest.mark.parametrize("workers", [2, 3])
def test_unequal_batches_weigh_as_many_examples_as_they_have(workers: int) -> None:
    problem = small()
    bounds = [0, 3, 24] if workers == 2 else [0, 3, 10, 24]
    shares = [
        [(x[low:high], y[low:high]) for x, y in problem.batches] for low, high in pairwise(bounds)
    ]
    cluster = Cluster(workers, 1, "averaging", every=1)
    values = same_everywhere(trained(problem, plain_sgd(), cluster, shares=shares))
    assert difference(values, train(problem, plain_sgd()).values) < EXACT


class Whole(nn.Module):
    """Its gradient is the batch's sum: whole numbers where those are."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.zeros(40))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.sum() * self.row).sum()


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_in_whole_numbers_it_is_the_mean_gradient_to_the_bit(workers: int) -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.randint(-8, 8, (1, 4), generator=generator).float() * 4, torch.zeros(1))
        for _ in range(24)
    ]
    shares = [batches[worker::workers] for worker in range(workers)]

    def make(worker: int) -> Session:
        return Session(
            Whole(),
            lambda outputs, _: outputs,
            lambda params: torch.optim.SGD(params, lr=0.5),
            max_steps=len(shares[0]),
        )

    def program(session: Session) -> Values:
        for batch in shares[session.task.index]:
            session.step(batch)
        return values_of(session.model)

    found = [
        same_everywhere(run_job(cluster, make, program).values)
        for cluster in (Cluster(workers, 1, "averaging", every=1), Cluster(workers, 1, "sync"))
    ]
    assert difference(*found) == 0.0
    assert found[0]["row"].abs().sum() > 0


@pytest.mark.slow(one_in=2)
@MAKERS
@pytest.mark.parametrize("servers", [1, 2])
def test_averaging_is_local_training_and_a_mean(make: OptimizerFactory, servers: int) -> None:
    problem = small()  # 20 steps: two periods, and half of one
    values = same_everywhere(trained(problem, make, Cluster(3, servers, "averaging", every=8)))
    assert (
        difference(values, train_locally(problem, make, averaged(), problem.shares(3), 8)) < EXACT
    )
    assert difference(values, train(problem, make).values) > 1e-4, "that would prove nothing"


@pytest.mark.slow(one_in=2)
@MAKERS
@pytest.mark.parametrize("workers", [1, 2])
def test_diloco_is_local_training_and_a_nesterov_step(make: OptimizerFactory, workers: int) -> None:
    problem = small()
    values = same_everywhere(trained(problem, make, Cluster(workers, 2, "diloco", every=4)))
    expected = train_locally(problem, make, nesterov(), problem.shares(workers), 4)
    assert difference(values, expected) < EXACT


@pytest.mark.slow(one_in=2)
@MAKERS
@pytest.mark.parametrize(
    "cluster",
    [Cluster(1, 1, "averaging", every=7), Cluster(1, 2, "averaging", every=3, staleness=1)],
    ids=["rounds", "asynchronous"],
)
def test_one_worker_that_averages_is_plain_training(
    make: OptimizerFactory, cluster: Cluster
) -> None:
    problem = small()
    (values,) = trained(problem, make, cluster)
    assert difference(values, train(problem, make).values) < EXACT


def test_the_optimizer_may_be_one_that_servers_do_not_have() -> None:
    problem = small()

    def nadam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.NAdam(parameters, lr=0.01)

    values = same_everywhere(trained(problem, nadam, Cluster(2, 1, "averaging", every=8)))
    expected = train_locally(problem, nadam, averaged(), problem.shares(2), 8)
    assert difference(values, expected) < EXACT


def test_a_longer_period_than_the_job_is_one_exchange_at_its_end() -> None:
    problem = small()
    values = same_everywhere(trained(problem, sgd(), Cluster(2, 1, "averaging")))
    every = len(problem.batches)
    shares = problem.shares(2)
    assert Averages(problem, 16).difference(values) < EXACT
    longer = same_everywhere(trained(problem, sgd(), Cluster(2, 1, "averaging", every=1000)))
    expected = train_locally(problem, sgd(), averaged(), shares, every)
    assert difference(longer, expected) < EXACT


class Averages:
    """What two workers' averaging of a problem comes to."""

    def __init__(self, problem: Problem, every: int) -> None:
        self._expected = train_locally(problem, sgd(), averaged(), problem.shares(2), every)

    def difference(self, values: Values) -> float:
        return difference(values, self._expected)


# Options of a session --------------------------------------------------------------------------


def test_schedules_and_clipping_are_those_of_the_local_steps() -> None:
    problem = small()
    recipe = Recipe(
        clip_norm=0.5,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    )
    (values,) = trained(
        problem,
        sgd(),
        Cluster(1, 1, "averaging", every=6),
        clip_norm=recipe.clip_norm,
        scheduler=recipe.scheduler,
    )
    assert difference(values, train(problem, sgd(), recipe).values) < EXACT
    assert difference(values, train(problem, sgd()).values) > 1e-4, "that would prove nothing"


def test_in_int8_pushes_take_a_quarter_of_the_bytes_and_the_values_are_close() -> None:
    problem = small(dtype=torch.float32)

    def then(session: Session) -> tuple[Values, int, int]:
        client = session.worker.backend
        return values_of(session.model), client.bytes_sent, client.bytes_received

    cluster = Cluster(2, 1, "averaging", every=5)
    ran = {
        codec: trained(problem, sgd(), replace(cluster, compress=codec), then=then)
        for codec in ("none", "int8")
    }
    (whole, sent, received), (packed, sent_packed, received_packed) = (
        ran[codec][0] for codec in ("none", "int8")
    )
    bytes_of_model = sent // 4  # 20 steps: four exchanges
    assert received == bytes_of_model * 5, "and the first pull"
    assert sent_packed * 3 < sent
    assert received_packed == received
    assert 0 < difference(whole, packed) < 0.02


def test_int8_comes_close_to_no_packing() -> None:
    problem, cluster = small(steps=60, dtype=torch.float32), Cluster(2, 1, "diloco", every=5)
    plain, packed = (
        same_everywhere(trained(problem, sgd(), replace(cluster, compress=codec)))
        for codec in ("none", "int8")
    )
    moved = difference(plain, values_of(problem.model))
    assert 0 < difference(plain, packed) < moved / 20


# Steps -----------------------------------------------------------------------------------------


def test_every_step_counts_and_verdicts_come_at_exchanges() -> None:
    problem = small()
    shares = problem.shares(2)

    def make(worker: int) -> Session:
        return Session(problem.copy(), loss_of, sgd(), max_steps=len(problem.batches))

    def program(session: Session) -> list[tuple[int, object, int]]:
        results = [session.step(batch) for batch in shares[session.task.index]]
        assert session.should_stop()
        with pytest.raises(ConfigurationError, match="after training had ended"):
            session.step(shares[0][0])
        assert session.recorder.applied == len(results)
        return [(r.global_step, r.verdict, r.steps) for r in results]

    for found in run_job(Cluster(2, 1, "averaging", every=8), make, program).values:
        assert [step for step, _, _ in found] == list(range(1, 21))
        told = {step: (verdict, steps) for step, verdict, steps in found if verdict is not None}
        assert told == {8: (Applied(8), 8), 16: (Applied(16), 8), 20: (Applied(20), 4)}


def test_who_leaves_its_loop_early_exchanges_what_it_has_learned_and_stops_the_others() -> None:
    problem = small()
    shares = problem.shares(2)

    def make(worker: int) -> Session:
        return Session(problem.copy(), loss_of, sgd())

    def program(session: Session) -> tuple[int, Values]:
        for batch in shares[session.task.index][:11]:
            session.step(batch)
        if session.is_chief:
            session.stop("enough")
        session.job.end()
        return session.global_step, values_of(session.model)

    found = run_job(Cluster(2, 1, "averaging", every=8), make, program).values
    assert [step for step, _ in found] == [11, 11]
    cut = Problem(problem.model, problem.batches[:11])
    assert Averages(cut, 8).difference(same_everywhere([v for _, v in found])) < EXACT


def test_a_quorum_closes_the_round_and_what_comes_later_is_stale() -> None:
    problem = small(steps=4)
    shares = problem.shares(3)

    def make(worker: int) -> Session:
        return Session(problem.copy(), loss_of, sgd(), max_steps=40)

    def program(session: Session) -> list[tuple[object, int]]:
        results = []
        while not session.should_stop():
            result = session.step(shares[session.task.index][len(results) % 4])
            results.append((result.verdict, result.steps))
        return [told for told in results if told[0] is not None]

    found = run_job(Cluster(3, 1, "diloco", every=5, aggregate=2), make, program).values
    told = [each for worker in found for each in worker]
    applied = sorted(verdict.step for verdict, _ in told if isinstance(verdict, Applied))
    assert applied == sorted([*range(5, 41, 5)] * 2), "two deltas a round"
    stale = [verdict for verdict, _ in told if isinstance(verdict, Stale)]
    assert stale, "three workers and rounds of two"
    assert {steps for _, steps in told} == {5}


def test_deltas_that_come_by_themselves_are_applied_one_by_one() -> None:
    problem = small(batch=24)
    shares = problem.shares(3)
    steps, every = 90, 6

    def make(worker: int) -> Session:
        return Session(problem.copy(), loss_of, plain_sgd(), max_steps=steps)

    def program(session: Session) -> tuple[list[tuple[int, int, Batch]], Values]:
        made: list[tuple[int, int, Batch]] = []
        taken, pulled = 0, session.global_step
        while not session.should_stop():
            batch = shares[session.task.index][taken % len(problem.batches)]
            taken += 1
            result = session.step(batch)
            if result.verdict is None:
                made.append((pulled, 0, batch))
                continue
            assert isinstance(result.verdict, Applied)
            made.append((pulled, result.verdict.step, batch))
            pulled = result.global_step
        return made, values_of(session.model)

    cluster = Cluster(3, 1, "averaging", every=every, staleness=2)
    ran = run_job(cluster, make, program).values
    rows = [row for made, _ in ran for row in made]
    last = max(step for _, step, _ in rows)
    assert steps <= last < steps + every
    assert len(rows) == last, "the global step counts everybody's steps"
    # Replays them in one process, each from the values that its worker had.
    pushes: dict[int, tuple[int, list[Batch]]] = {}
    for made, _ in ran:
        batches: list[Batch] = []
        for pulled, step, batch in made:
            batches.append(batch)
            if step:
                pushes[step] = pulled, batches
                batches = []
    assert sum(len(batches) for _, batches in pushes.values()) == last
    history = {0: problem.copy().state_dict()}
    model, now = problem.copy(), 0
    for step, (pulled, batches) in sorted(pushes.items()):
        local = problem.copy()
        local.load_state_dict(history[pulled])
        optimizer = plain_sgd()(local.parameters())
        for batch in batches:
            for p, g in zip(local.parameters(), gradients(local, batch), strict=True):
                p.grad = g
            optimizer.step()
        with torch.no_grad():
            for name, value in model.named_parameters():
                value -= (history[pulled][name] - dict(local.named_parameters())[name]) / 3
        assert step == now + len(batches)
        now = step
        history[now] = {name: value.clone() for name, value in model.state_dict().items()}
    final = next(v for made, v in ran if made[-1][1] == last)
    assert difference(final, values_of(model)) < EXACT


# Checkpoints -----------------------------------------------------------------------------------


def saved(run_dir: Path) -> CheckpointData:
    data = latest(run_dir, lambda path, error: pytest.fail(f"{path}: {error}"))
    assert data is not None
    return data


BATCH = 8


def digits() -> TensorDataset:
    """Examples for a loader, of the shape that `small` has."""
    batches = small(steps=1, batch=200, seed=9).batches
    return TensorDataset(*batches[0])


def run_to(end: int, cluster: Cluster, *, every_steps: int | None = None) -> CheckpointData:
    """Trains, or trains on, until a global step; returns the last checkpoint."""
    problem, data = small(), digits()
    keep = {"keep": 100} if every_steps else {}

    def session(worker: int) -> Session:
        return Session(
            problem.copy(),
            loss_of,
            adam(),
            max_steps=end,
            scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97),
            checkpoint=Checkpoint(every_seconds=None, every_steps=every_steps, **keep),
            deterministic=True,
            ema=0.9,
        )

    def program(session: Session) -> None:
        for batch in session.loader(data, BATCH):
            session.step(batch)
            session.worker.storage.settle()  # else one that is slow may be left out

    run_job(cluster, session, program).values  # noqa: B018 - raises what a worker raised
    assert cluster.run_dir is not None
    return saved(cluster.run_dir)


def assert_same_bits(one: CheckpointData, other: CheckpointData) -> None:
    assert one.step == other.step
    for mine, theirs in (
        (one.model, other.model),
        (one.average, other.average),
        (one.optimizer, other.optimizer),
        (one.local, other.local),
    ):
        assert mine.keys() == theirs.keys()
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []
    assert one.state["consumed"] == other.state["consumed"]


@pytest.mark.slow(but=("2-averaging-int8", "2-diloco-none"))
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("workers", "strategy", "codec"),
    [
        (1, "averaging", "none"),
        (2, "averaging", "none"),
        (1, "diloco", "none"),
        (2, "diloco", "none"),
        (2, "averaging", "int8"),
        (2, "diloco", "int8"),
        (2, "diloco", "topk:0.1"),
    ],
)
def test_a_resumed_job_is_the_very_bits_of_one_that_was_not_stopped(
    workers: int, strategy: str, codec: str, tmp_path: Path
) -> None:
    cluster = Cluster(workers, 1, strategy, every=6, run_dir=tmp_path / "whole", compress=codec)
    whole = run_to(40, cluster, every_steps=9)
    assert whole.step == 40
    local = {f"{w}/{n}" for w in range(workers) for n in ("0.weight/exp_avg", "2.bias/step")}
    assert local <= whole.local.keys()
    assert all(whole.local[f"{worker}/2.bias/step"] == 40 for worker in range(workers)), (
        "each worker made every step itself"
    )
    # Due at each multiple of 9: saved after the exchange that first reaches it.
    steps = [step_of(path) for path in list_checkpoints(tmp_path / "whole")]
    assert steps == [12, 18, 30, 36, 40]
    for start in (12, 30):
        other = tmp_path / f"from-{start}"
        (other / "checkpoints").mkdir(parents=True)
        for path in list_checkpoints(tmp_path / "whole"):
            if step_of(path) <= start:
                shutil.copytree(path, other / "checkpoints" / path.name)
        assert_same_bits(run_to(40, replace(cluster, run_dir=other)), whole)


def test_with_another_number_of_workers_optimizers_begin_anew_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = run_to(12, Cluster(2, 1, "averaging", every=6, run_dir=tmp_path))
    assert first.local["0/2.bias/step"] == 12
    second = run_to(18, Cluster(3, 1, "averaging", every=6, run_dir=tmp_path))
    assert second.step == 18
    assert {float(second.local[f"{w}/2.bias/step"]) for w in range(3)} == {6.0}
    assert "has the optimizers of 2 workers, and this job has 3" in caplog.text


def test_from_sync_every_worker_goes_on_with_the_servers_optimizer_and_back_it_is_fresh(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = run_to(12, Cluster(2, 1, "sync", run_dir=tmp_path))
    assert not first.local and first.optimizer["2.bias/step"] == 12
    second = run_to(18, Cluster(2, 1, "diloco", every=6, run_dir=tmp_path))
    assert {float(second.local[f"{w}/2.bias/step"]) for w in range(2)} == {18.0}
    assert {name.rpartition("/")[2] for name in second.optimizer} == {"momentum_buffer"}
    assert not caplog.text
    third = run_to(24, Cluster(2, 1, "sync", run_dir=tmp_path))
    assert not third.local and third.optimizer["2.bias/step"] == 6
    assert "servers applied deltas by momentum, and here they apply gradients" in caplog.text
