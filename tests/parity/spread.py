"""Models and batches for every way to spread a model, and one plain process to compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from tests.parity.plain import Values, values_of
from trireme.models import MLP, LeNet5, LSTMLanguageModel, Transformer
from trireme.session.session import Session

STEPS, BATCH = 20, 16
WORDS, TIME = 24, 8


@dataclass(frozen=True)
class Case:
    """A model, what it learns from, and how.

    Attributes:
        build: makes the model.
        inputs: shape of one example's input; whole numbers below `WORDS` where `words`.
        words: whether inputs are tokens.
        classes: how many targets there are.
    """

    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    words: bool = False
    classes: int = 10


CASES = {
    "MLP": Case(lambda: MLP(20, 32, 24, 10), (20,)),
    "LeNet-5": Case(lambda: LeNet5(1, 12), (1, 12, 12)),
    "LSTM": Case(lambda: LSTMLanguageModel(WORDS, 16, 2), (TIME,), words=True, classes=WORDS),
    "transformer": Case(
        lambda: Transformer(WORDS, 16, 4, 2, TIME), (TIME,), words=True, classes=WORDS
    ),
}

STATEFUL = {
    "LSTM that goes on": Case(
        lambda: LSTMLanguageModel(WORDS, 16, 2, carry=True), (TIME,), words=True, classes=WORDS
    ),
    "batch normalization": Case(
        lambda: nn.Sequential(
            nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.BatchNorm1d(16)
        ),
        (20,),
    ),
}
"""Models with more to them than parameters."""

ALL = CASES | STATEFUL


def model_of(case: str) -> nn.Module:
    """The model with its first values, the same in every process."""
    torch.manual_seed(3)
    return ALL[case].build()


def data_of(case: str) -> TensorDataset:
    """Random examples, enough for all steps."""
    generator = torch.Generator().manual_seed(4)
    shape = (STEPS * BATCH, *ALL[case].inputs)
    if ALL[case].words:
        tokens = torch.randint(WORDS, shape, generator=generator)
        return TensorDataset(tokens, (tokens + 1) % WORDS)
    inputs = torch.randn(shape, generator=generator)
    return TensorDataset(inputs, inputs.flatten(1)[:, :10].argmax(1))


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, also of sequences."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


def train_plain(case: str, optimizer: str = "sgd", clip_norm: float | None = None) -> Values:
    """Trains one plain PyTorch process."""
    model = model_of(case)
    made = OPTIMIZERS[optimizer](model.parameters())
    for inputs, targets in zip(*(t.split(BATCH) for t in data_of(case).tensors), strict=True):
        made.zero_grad()
        loss_of(model(inputs), targets).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        made.step()
    return {n: t.clone() for n, t in model.state_dict().items() if t.is_floating_point()}


def train_averaged(case: str, decay: float) -> Values:
    """Trains one plain process; returns the moving average of its values."""
    model = model_of(case)
    made = OPTIMIZERS["sgd"](model.parameters())
    average = values_of(model)
    for inputs, targets in zip(*(t.split(BATCH) for t in data_of(case).tensors), strict=True):
        made.zero_grad()
        loss_of(model(inputs), targets).backward()
        made.step()
        now = values_of(model)
        average = {name: decay * average[name] + (1 - decay) * now[name] for name in average}
    return average


def train_spread(
    case: str,
    replicas: int,
    optimizer: str = "sgd",
    options: dict[str, Any] | None = None,
    which: str = "values",
) -> dict[str, Any]:
    """Trains as the launch says, and returns the whole model at the end, as NumPy arrays.

    Args:
        case: which.
        replicas: how many batches make a step.
        optimizer: by name.
        options: of the session.
        which: `values` or `average`.
    """
    torch.use_deterministic_algorithms(True)
    session = Session(
        model_of(case), loss_of, OPTIMIZERS[optimizer], max_steps=STEPS, **(options or {})
    )
    with session:
        for batch in session.loader(data_of(case), BATCH // replicas, shuffle=False):
            session.step(batch)
        average = dict(session._supervisor.client.snapshot(state=False).average)
    values = {n: t for n, t in session.model.state_dict().items() if t.is_floating_point()}
    return {n: t.numpy() for n, t in (average if which == "average" else values).items()}


def train_and_look(case: str, replicas: int) -> tuple[dict[str, Any], list[float]]:
    """As `train_spread`; meanwhile the chief alone evaluates now and then. Returns its losses."""
    session = Session(model_of(case), loss_of, OPTIMIZERS["sgd"], max_steps=STEPS)
    losses = []
    with session:
        for batch in session.loader(data_of(case), BATCH // replicas, shuffle=False):
            if session.is_chief and session.global_step % 7 == 0:
                losses.append(session.evaluate(data_of(case))["loss"])
            session.step(batch)
    return {name: value.numpy() for name, value in values_of(session.model).items()}, losses
