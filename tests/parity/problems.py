"""The networks and batches that are trained twice, and how Trireme trains them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.harness import Cluster, run_job
from tests.parity.plain import Batch, OptimizerFactory, Problem, Values, loss_of, values_of
from trireme.session.session import Session

EXACT = 1e-12
"""In float64, what rounding leaves between two ways to compute the same."""


def small(
    steps: int = 20, batch: int = 24, dtype: torch.dtype = torch.float64, seed: int = 5
) -> Problem:
    """Two layers of odd sizes, so that nothing of it fills its slots; classes to be learned."""
    generator = torch.Generator().manual_seed(seed)
    return Problem(mlp(generator, dtype), draw(generator, steps, batch, dtype))


def mlp(generator: torch.Generator, dtype: torch.dtype) -> nn.Module:
    model = nn.Sequential(nn.Linear(11, 17), nn.Tanh(), nn.Linear(17, 5))
    return seeded(model, generator).to(dtype)


def seeded(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Gives a model first values that follow from the generator."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def draw(generator: torch.Generator, steps: int, batch: int, dtype: torch.dtype) -> list[Batch]:
    """Random inputs, with targets that can be learned from them."""
    inputs = torch.randn(steps, batch, 11, generator=generator).to(dtype)
    return [(x, x[:, :5].argmax(1)) for x in inputs]


def sgd(**options: Any) -> OptimizerFactory:
    return lambda params: torch.optim.SGD(params, **{"lr": 0.1, "momentum": 0.9, **options})


def adam(**options: Any) -> OptimizerFactory:
    return lambda params: torch.optim.Adam(params, **{"lr": 0.01, **options})


def trained(
    problem: Problem,
    make: OptimizerFactory,
    cluster: Cluster,
    *,
    shares: Sequence[Sequence[Batch]] | None = None,
    then: Callable[[Session], Any] = lambda session: values_of(session.model),
    **options: Any,
) -> list[Any]:
    """Trains with Trireme.

    Args:
        problem: what.
        make: how to make the optimizer.
        cluster: with how many workers and servers, by which strategy.
        shares: for each worker its batches; by default equal parts of the problem's.
        then: what to return of each worker after its last step; its values by default.
        options: of the session.
    """
    parts = shares or problem.shares(cluster.workers)

    def session(worker: int) -> Session:
        steps = len(problem.batches)
        return Session(problem.copy(), loss_of, make, max_steps=steps, **options)

    def program(session: Session) -> Any:
        for batch in parts[session.task.index]:
            assert not session.should_stop()
            session.step(batch)
        assert session.should_stop()
        return then(session)

    return run_job(cluster, session, program).values


def same_everywhere(trained: Sequence[Values]) -> Values:
    """The values that all workers of a synchronous job have, which must be the same bits."""
    first = trained[0]
    for other in trained[1:]:
        assert all(torch.equal(first[name], other[name]) for name in first)
    return first
