"""Models of which a step leaves some parameters without a gradient, and how torch trains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.harness import Cluster, run_job
from tests.parity.plain import Batch, OptimizerFactory, Values, loss_of, values_of
from trireme.session.session import Session

STEPS = 16


class Branches(nn.Module):
    """A classifier with two branches, of which a step uses the one, the other, both or none.

    Attributes:
        used: which branches the steps to come use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(11, 17)
        self.branches = nn.ModuleList(nn.Linear(17, 17) for _ in range(2))
        self.last = nn.Linear(17, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.used: tuple[int, ...] = (0, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        for index in self.used:
            hidden = hidden + torch.tanh(self.branches[index](hidden)) * self.scale
        outputs: torch.Tensor = self.last(hidden)
        return outputs


class Gated(Branches):
    """The second branch is for examples that ask for it, and a batch may have none of them."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs)) + torch.tanh(self.branches[0](inputs @ EYE))
        asks = inputs[:, 0] > 1.2
        if asks.any():
            more = torch.zeros_like(hidden)
            more[asks] = torch.tanh(self.branches[1](hidden[asks])) * self.scale
            hidden = hidden + more
        outputs: torch.Tensor = self.last(hidden)
        return outputs


EYE = torch.eye(11, 17, dtype=torch.float64)


def _nothing(model: Branches, step: int) -> None:
    """Every step is alike."""


def _never_second(model: Branches, step: int) -> None:
    model.used = (0,)


def _freeze(model: Branches, step: int) -> None:
    if step == STEPS // 2:
        model.branches[0].requires_grad_(False)
        model.last.weight.requires_grad_(False)


def _thaw(model: Branches, step: int) -> None:
    """Freezes, and lets go on later."""
    model.branches[0].requires_grad_(not 4 <= step < 10)


def _alternate(model: Branches, step: int) -> None:
    model.used = (step % 2,)


@dataclass(frozen=True)
class Case:
    """How a model is trained of which some parameters have no gradient.

    Attributes:
        make: its optimizer.
        before: called with the model and the step before each step.
        build: the model.
    """

    make: OptimizerFactory
    before: Callable[[Any, int], None]
    build: Callable[[], Branches] = Branches


CASES = {
    "unused": Case(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3), _never_second),
    "frozen": Case(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01), _freeze),
    "thawed": Case(lambda p: torch.optim.NAdam(p, lr=0.01, weight_decay=0.1), _thaw),
    "alternating": Case(lambda p: torch.optim.Adam(p, lr=0.01), _alternate),
    "gated": Case(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05), _nothing, Gated
    ),
    "gated, Adagrad": Case(
        lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.05, lr_decay=0.1), _nothing, Gated
    ),
}


def build(case: str) -> Branches:
    """The model with its first values, in float64."""
    torch.manual_seed(7)
    return CASES[case].build().double()


def batches(steps: int = STEPS) -> list[Batch]:
    """Random inputs, with targets that can be learned from them."""
    generator = torch.Generator().manual_seed(8)
    inputs = torch.randn(steps, 12, 11, generator=generator, dtype=torch.float64)
    return [(x, x[:, :5].argmax(1)) for x in inputs]


def plain(case: str, l2: float = 0.0, clip_norm: float | None = None) -> Values:
    """What torch makes of it: one process, with whole batches."""
    model, chosen = build(case), CASES[case]
    optimizer = chosen.make(model.parameters())
    for step, (inputs, targets) in enumerate(batches()):
        chosen.before(model, step)
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        if l2:
            squares = [(p**2).sum() for p in model.parameters() if p.dim() >= 2]
            loss = loss + l2 / 2 * torch.stack(squares).sum()
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return values_of(model)


def trained(
    case: str,
    cluster: Cluster,
    *,
    steps: Sequence[int] = range(STEPS),
    then: Callable[[Session], Any] = lambda session: values_of(session.model),
    **options: Any,
) -> list[Any]:
    """Trains with Trireme; returns what `then` says of each worker after its last step."""
    chosen = CASES[case]

    def session(worker: int) -> Session:
        return Session(build(case), loss_of, chosen.make, max_steps=steps[-1] + 1, **options)

    def program(session: Session) -> Any:
        index, workers = session.task.index, cluster.workers
        for step in steps:
            inputs, targets = batches()[step]
            chosen.before(session.model, step)
            session.step((inputs.chunk(workers)[index], targets.chunk(workers)[index]))
        return then(session)

    return run_job(cluster, session, program).values
