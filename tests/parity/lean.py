"""Programs whose model is placed by an example, so that no process ever holds the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.parity.spread import BATCH, OPTIMIZERS, STEPS, data_of, inputs_of, loss_of, model_of
from trireme.graph.config import GraphConfig
from trireme.ps.rule import Average
from trireme.session.model.module_names import named_parameters
from trireme.session.options import Checkpoint
from trireme.session.session import Session


def tied_and_frozen() -> nn.Module:
    """The head is the embedding's matrix, and the first layer is not trained."""
    model = model_of("tied weights")
    next(model.children()).get_submodule("token").requires_grad_(False)
    return model


def with_statistics() -> nn.Module:
    """Batch normalization, whose running statistics are buffers."""
    return model_of("batch normalization")


def frozen() -> nn.Module:
    """The second layer is not trained."""
    model = model_of("frozen")
    model.get_submodule("2").requires_grad_(False)
    return model


BUILDS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "MLP": ("MLP", partial(model_of, "MLP")),
    "LSTM": ("LSTM", partial(model_of, "LSTM")),
    "tied weights": ("tied weights", partial(model_of, "tied weights")),
    "tied and frozen": ("tied weights", tied_and_frozen),
    "frozen": ("frozen", frozen),
    "unused": ("unused", partial(model_of, "unused")),
    "batch normalization": ("batch normalization", with_statistics),
}
"""The case whose data are taken, and the function that builds the model."""


def session_of(build: str, steps: int = STEPS, **options: Any) -> Session:
    """A session whose model is placed by an example."""
    case, make = BUILDS[build]
    return Session(
        make,
        loss_of,
        OPTIMIZERS["sgd"],
        **{
            "max_steps": steps,
            "checkpoint": Checkpoint(every_seconds=None),
            "graph": GraphConfig(alternating(make()), example=inputs_of(case)[:BATCH]),
            "metrics": {"error": error},
            "ema": Average(0.8, warm_up=False),
            **options,
        },
    )


def alternating(model: nn.Module) -> dict[str, str]:
    """A placement that has every other parameter elsewhere; those of unused layers are left out."""
    names = [name for name, _ in named_parameters(model) if "unused" not in name]
    return {name: f"worker:{place % 2}" for place, name in enumerate(names)}


def error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The share of examples whose largest output is not the target's."""
    return (outputs.argmax(-1) != targets).float().mean()


def held(session: Session) -> dict[str, int]:
    """The number of elements in memory of each parameter of this process."""
    return {
        name: parameter.numel()
        for name, parameter in session.parameters.items()
        if not parameter.is_meta
    }


def train_lean(
    build: str, steps: int = STEPS, evaluates: bool = False, replicas: int = 1
) -> tuple[dict[str, int], dict[str, float]]:
    """Trains as the launch says.

    Returns:
        What `held` says at the end, and the evaluation, if there is to be one.
    """
    torch.use_deterministic_algorithms(True)
    found: dict[str, float] = {}
    with session_of(build, steps) as session:
        lean = session.task.group.size > 1
        assert session._setup.lean == lean
        data, size = data_of(BUILDS[build][0]), BATCH // replicas
        for batch in session.loader(data, size, shuffle=False):
            session.step(batch)
        if lean:
            assert all(p.is_meta for _, p in named_parameters(session.model))
        if evaluates:
            found = session.evaluate(evaluated(build), batch_size=24)
    return held(session), found


def evaluated(build: str) -> TensorDataset:
    """A data set whose size is no multiple of the batches of the evaluation."""
    data = data_of(BUILDS[build][0])
    assert isinstance(data, TensorDataset)
    return TensorDataset(*(tensor[:100] for tensor in data.tensors))


def stop_and_evaluate() -> tuple[int, dict[str, float], dict[str, float]]:
    """Evaluates before the first step; the process that is not the chief ends the job later.

    Returns:
        The last step, and an evaluation before the first and after the last step.
    """
    with session_of("MLP", 10**6) as session:
        before = session.evaluate(evaluated("MLP"), batch_size=33)
        for batch in session.loader(data_of("MLP"), BATCH, shuffle=False):
            session.step(batch)
            if session.recorder.applied == 5 and not session.is_chief:
                session.stop("the test")
        return session.global_step, before, session.evaluate(evaluated("MLP"))


def evaluate_alone(steps: int) -> None:
    """The chief alone evaluates after the first step."""
    with session_of("MLP", steps) as session:
        for batch in session.loader(data_of("MLP"), BATCH, shuffle=False):
            session.step(batch)
            if session.is_chief:
                session.evaluate(evaluated("MLP"))


def other_batches() -> None:
    """Each process has a random example of its own, which is fine, and batches of its own."""
    torch.seed()
    with session_of("MLP", graph=GraphConfig(example=torch.randn(BATCH, 20))) as session:
        size = BATCH - session.task.group.rank
        session.step((torch.randn(size, 20), torch.zeros(size, dtype=torch.long)))


def wrong_shape() -> None:
    """The example has another width than the batches."""
    config = GraphConfig(alternating(model_of("MLP")), example=torch.zeros(BATCH, 20))
    with session_of("MLP", graph=config) as session:
        session.step((torch.zeros(BATCH, 21), torch.zeros(BATCH, dtype=torch.long)))
