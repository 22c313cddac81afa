"""Models that are more than a list of trained parameters: tied, frozen, with statistics, mixed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.harness import Cluster, run_job
from tests.parity.plain import Problem, difference, loss_of, train
from tests.parity.problems import EXACT, adam, draw, same_everywhere, seeded, sgd, trained
from trireme.session.session import Session

CLUSTERS = [Cluster(1, 0), Cluster(1, 1, "async"), Cluster(2, 2, "sync")]
every_mode = pytest.mark.parametrize("cluster", CLUSTERS, ids=str)


def problem_of(model: nn.Module, *, steps: int = 20, batch: int = 24) -> Problem:
    generator = torch.Generator().manual_seed(8)
    seeded(model, generator).double()
    return Problem(model, draw(generator, steps, batch, torch.float64))


# Tied and frozen parameters ----------------------------------------------------------------------


class Tied(nn.Module):
    """One matrix, there and back again."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(11, 7, bias=False)
        self.decoder = nn.Linear(7, 11)
        self.decoder.weight = nn.Parameter(self.encoder.weight.detach().T.clone())
        self.out = nn.Linear(11, 11, bias=False)
        self.last = nn.Linear(11, 11, bias=False)
        self.last.weight = self.out.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.out(torch.tanh(self.decoder(self.encoder(x))))))


@every_mode
def test_tied_weights_are_one_parameter(cluster: Cluster) -> None:
    problem = problem_of(Tied())

    def values(session: Session) -> dict[str, torch.Tensor]:
        model = session.model
        assert model.last.weight is model.out.weight
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    found = same_everywhere(trained(problem, adam(), cluster, then=values))
    assert "last.weight" not in found
    assert difference(found, train(problem, adam()).values) < EXACT


class Frozen(nn.Module):
    """A first layer that nobody trains, and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Linear(11, 9).requires_grad_(False)
        self.trained = nn.Linear(9, 5)
        self.register_buffer("scale", torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(torch.tanh(self.fixed(x)) * self.scale)


@every_mode
def test_frozen_parameters_stay_as_they_are(cluster: Cluster) -> None:
    problem = problem_of(Frozen())
    values = same_everywhere(trained(problem, sgd(), cluster))
    assert difference(values, train(problem, sgd()).values) < EXACT
    assert torch.equal(values["fixed.weight"], problem.model.fixed.weight)


def test_everybody_trains_on_what_the_chief_has_frozen() -> None:
    problem = problem_of(Frozen())
    shares = problem.shares(2)

    def make(worker: int) -> Session:
        model = problem.copy()
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(worker)  # worker 1 begins elsewhere
        return Session(model, loss_of, sgd(), max_steps=len(problem.batches))

    def program(session: Session) -> dict[str, torch.Tensor]:
        for batch in shares[session.task.index]:
            session.step(batch)
        return {name: tensor.clone() for name, tensor in session.model.state_dict().items()}

    chief, other = run_job(Cluster(2, 1, "sync"), make, program).values
    assert difference(chief, other) == 0.0
    assert torch.equal(chief["fixed.weight"], problem.model.fixed.weight)
    values = {name: chief[name] for name, _ in problem.model.named_parameters()}
    assert difference(values, train(problem, sgd()).values) < EXACT


# Parameters that are not trained, not used, or of another dtype -----------------------------------


class Mixed(nn.Module):
    """Two dtypes, a parameter of no dimension, and one that no batch ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(11, 9)
        self.narrow = nn.Linear(9, 5)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.tensor([3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.wide(x)) * self.gain
        return self.narrow(hidden.to(self.narrow.weight.dtype))


@every_mode
@pytest.mark.parametrize("clip", [None, 0.1])
def test_dtypes_may_differ_between_parameters(cluster: Cluster, clip: float | None) -> None:
    model = Mixed()
    problem = problem_of(model)
    model.narrow.float()
    options: dict[str, Any] = {} if clip is None else {"clip_norm": clip}
    values = same_everywhere(trained(problem, sgd(lr=0.05), cluster, **options))
    expected = train_with_unused(problem, clip)
    assert difference(values, expected) < 1e-5  # some of it is float32
    assert values["narrow.weight"].dtype == torch.float32
    assert torch.equal(values["unused"], model.unused)


def train_with_unused(problem: Problem, clip: float | None) -> dict[str, torch.Tensor]:
    model = problem.copy()
    optimizer = sgd(lr=0.05)(model.parameters())
    for inputs, targets in problem.batches:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        if clip is not None:
            gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.mul_(min(1.0, clip / (float(norm) + 1e-6)))
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# Statistics of batches ---------------------------------------------------------------------------


State = dict[str, torch.Tensor]


def state_of(session: Session) -> State:
    return {name: tensor.clone() for name, tensor in session.model.state_dict().items()}


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(11, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 5))


@pytest.mark.parametrize("workers", [2, 3])
def test_evaluation_averages_the_statistics_of_the_workers(workers: int) -> None:
    problem = problem_of(normed())
    inputs, targets = (torch.cat(column) for column in zip(*problem.batches, strict=True))

    def evaluated(session: Session) -> tuple[float, State, State]:
        own = state_of(session)
        session.job.end()  # as the end of a loader does
        settled = state_of(session)
        loss = session.evaluate(TensorDataset(inputs, targets))["loss"]
        for name, tensor in session.model.state_dict().items():
            assert torch.equal(tensor, settled[name]), "evaluation leaves the model as it was"
        return loss, own, settled

    found = trained(problem, sgd(), Cluster(workers, 1, "sync"), then=evaluated)
    mean = {
        name: torch.stack([own[name].double() for _, own, _ in found]).mean(0).to(tensor.dtype)
        for name, tensor in found[0][1].items()
    }
    for _, own, settled in found:
        assert any(not torch.equal(mean[name], tensor) for name, tensor in own.items())
        assert difference(settled, mean) < EXACT  # the end of training leaves the mean in models
    model = problem.copy().eval()
    model.load_state_dict(mean)
    with torch.no_grad():
        expected = float(loss_of(model(inputs), targets))
    assert [loss for loss, _, _ in found] == pytest.approx([expected] * workers, abs=EXACT)


def test_the_last_statistics_of_the_slowest_worker_count_too() -> None:
    problem = problem_of(normed())
    data = TensorDataset(*(torch.cat(column) for column in zip(*problem.batches, strict=True)))
    chief_has_evaluated = threading.Event()

    def evaluated(session: Session) -> float:
        if not session.is_chief:
            # After its last update, before it has told anybody its last statistics. A chief that
            # does not wait for them is done by then.
            chief_has_evaluated.wait(1.0)
        session.job.end()
        loss = session.evaluate(data)["loss"]
        chief_has_evaluated.set()
        return loss

    first, second = trained(problem, sgd(), Cluster(2, 1, "sync"), then=evaluated)
    assert first == second


def test_one_worker_keeps_the_statistics_of_one_process() -> None:
    problem = problem_of(normed())

    def state(session: Session) -> dict[str, torch.Tensor]:
        return {name: t.double().clone() for name, t in session.model.state_dict().items()}

    model = problem.copy()
    optimizer = sgd()(model.parameters())
    for inputs, targets in problem.batches:
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
    expected = {name: tensor.double() for name, tensor in model.state_dict().items()}
    for cluster in (Cluster(1, 0), Cluster(1, 2, "async")):
        (found,) = trained(problem, sgd(), cluster, then=state)
        assert difference(found, expected) < EXACT
