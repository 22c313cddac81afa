"""Programs for jobs whose workers have several replicas inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.parity.spread import OPTIMIZERS, data_of, loss_of, model_of
from trireme.launch.environment import current_task
from trireme.session.options import Checkpoint
from trireme.session.session import Session

BATCH, STEPS = 8, 12
"""Of a worker: its replicas share it."""


def train(replicas: int, steps: int, optimizer: str, options: Mapping[str, Any]) -> Any:
    """Trains as the launch says, with so many replicas a worker.

    Returns:
        The values at the end, as NumPy arrays, and where training began.
    """
    session = Session(
        model_of("MLP"),
        loss_of,
        OPTIMIZERS[optimizer],
        max_steps=steps,
        **{"checkpoint": Checkpoint(every_seconds=None), **options},
    )
    with session:
        began = session.global_step
        for batch in session.loader(data_of("MLP"), BATCH // replicas, shuffle=False):
            session.step(batch)
    return {n: p.detach().numpy() for n, p in session.model.named_parameters()}, began


def train_with_bad_examples(bad: tuple[int, ...]) -> Any:
    """Leaves out updates of batches with these examples, whose loss is not finite."""
    inputs, targets = data_of("MLP").tensors
    inputs = inputs.clone()
    inputs[list(bad)] = float("nan")
    session = Session(
        model_of("MLP"), loss_of, OPTIMIZERS["sgd"], max_steps=STEPS, nan="skip", log_every=1
    )
    with session:
        for batch in session.loader(TensorDataset(inputs, targets), BATCH // 2, shuffle=False):
            session.step(batch)
    return {n: p.detach().numpy() for n, p in session.model.named_parameters()}


def train_and_record() -> tuple[list[float], list[float]]:
    """Returns each step's loss in this process, and what the chief has recorded of it."""
    session = Session(
        model_of("MLP"), loss_of, OPTIMIZERS["sgd"], max_steps=STEPS, log_every=1, run_dir="."
    )
    own: list[float] = []
    recorded: list[float] = []

    def record(values: Mapping[str, float], run: str, step: int) -> None:
        recorded.append(values["loss"])

    with session, mock.patch.object(session.worker.observers["curves"], "log", record):
        for batch in session.loader(data_of("MLP"), BATCH // 2, shuffle=False):
            own.append(session.step(batch).loss)
    return own, recorded


def stop_at(step: int) -> int:
    """Has the process that is not the leader ask that the job end; returns where it did."""
    session = Session(model_of("MLP"), loss_of, OPTIMIZERS["sgd"], max_steps=10**6)
    with session:
        for batch in session.loader(data_of("MLP"), BATCH // 2, shuffle=False):
            session.step(batch)
            if session.recorder.applied == step and current_task().group.rank == 1:
                session.stop("the test")
    return session.global_step


def running_statistics() -> tuple[dict[str, Any], list[float]]:
    """Trains with batch normalization; returns all floating values and the batches' own means."""
    model = nn.Sequential(nn.BatchNorm1d(20, momentum=1.0), nn.Linear(20, 10))
    session = Session(model, loss_of, OPTIMIZERS["sgd"], max_steps=STEPS, log_every=4)
    means: list[float] = []
    with session:
        for batch in session.loader(data_of("MLP"), BATCH // 2, shuffle=False):
            means.append(float(batch[0].mean()))
            session.step(batch)
    state = session.model.state_dict()
    return {n: t.numpy() for n, t in state.items() if t.is_floating_point()}, means


def random_state() -> list[float]:
    """What the process draws in its session."""
    with Session(model_of("MLP"), loss_of, OPTIMIZERS["sgd"], max_steps=1):
        return torch.rand(4).tolist()
