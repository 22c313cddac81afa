"""Programs that use what a session offers, for graphs: losses, optimizers, batches, hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import trireme
from tests.parity.plain import values_of
from tests.parity.spread import BATCH, OPTIMIZERS, STEPS, data_of, loss_of, model_of
from trireme.session.loss import model_loss
from trireme.session.session import Session


class OwnLoss(nn.Module):
    """Computes its loss itself, from inputs and labels by name, as models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = model_of("MLP")

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.body(inputs)
        return {"loss": cross_entropy(scores, labels), "scores": scores}


class ByName(nn.Module):
    """Takes two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = model_of("MLP")

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(torch.cat([left, right], 1))
        return scores


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of all steps; of some, the size differs from the first one's."""
    data = data_of("MLP")
    assert isinstance(data, TensorDataset)
    inputs, labels = data.tensors
    sizes = [BATCH, BATCH, 5, BATCH, 1, BATCH - 1, 2 * BATCH]
    sizes = [*sizes, len(inputs) - sum(sizes)]
    return list(zip(inputs.split(sizes), labels.split(sizes), strict=True))


def as_pairs(inputs: torch.Tensor, labels: torch.Tensor) -> Any:
    return inputs, labels


def as_labelled(inputs: torch.Tensor, labels: torch.Tensor) -> Any:
    return {"inputs": inputs, "labels": labels}


def as_two(inputs: torch.Tensor, labels: torch.Tensor) -> Any:
    return {"left": inputs[:, :8], "right": inputs[:, 8:], "target": labels}


@dataclass(frozen=True)
class Form:
    """A form of batches.

    Attributes:
        make: builds the model.
        loss: of the session.
        batch: makes a batch of inputs and labels.
    """

    make: Any
    loss: Any
    batch: Any


FORMS = {
    "pairs": Form(lambda: model_of("MLP"), loss_of, as_pairs),
    "the model's loss": Form(OwnLoss, model_loss, as_labelled),
    "by name": Form(ByName, loss_of, as_two),
}


def train_form(form: str, options: Mapping[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """Trains with batches of a form; returns the loss of each step, and the values."""
    chosen = FORMS[form]
    session = Session(chosen.make(), chosen.loss, OPTIMIZERS["sgd"], **options)
    with session:
        losses = [session.step(chosen.batch(*batch)).loss for batch in batches()]
        values = session.worker.backend.snapshot(state=False).values
    return losses, {name: values[name].detach().numpy() for name in values}


def squared(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Another loss than the session's."""
    return (outputs - nn.functional.one_hot(targets, 10)).square().mean()


def train_two_losses() -> dict[str, Any]:
    """Every other step has a loss of its own."""
    with Session(model_of("MLP"), loss_of, OPTIMIZERS["sgd"]) as session:
        for place, batch in enumerate(batches()):
            session.step(batch, loss=squared if place % 2 else None)
    return {name: value.numpy() for name, value in values_of(session.model).items()}


def train_plainly(loss_at: Any = lambda place: loss_of) -> tuple[list[float], dict[str, Any]]:
    """The same in plain torch."""
    model = model_of("MLP")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    losses = []
    for place, (inputs, labels) in enumerate(batches()):
        optimizer.zero_grad()
        loss = loss_at(place)(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(values_of(model))


class Watch(trireme.Hook):
    """Counts the calls of a hook."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def on_start(self, session: Session) -> None:
        self._count("start")

    def before_step(self, session: Session, batch: Any) -> None:
        self._count("before")

    def after_step(self, session: Session, result: Any) -> None:
        self._count("after")

    def on_stop(self, session: Session, reason: str) -> None:
        self._count("stop")


def train_with_hooks(run_dir: str) -> dict[str, int]:
    """Trains with hooks, summaries among them; returns the calls of a hook."""
    watch = Watch()
    session = Session(
        model_of("MLP"),
        loss_of,
        OPTIMIZERS["sgd"],
        max_steps=STEPS,
        run_dir=run_dir,
        log_every=2,
        hooks=[watch, trireme.Summaries(every=3)],
    )
    with session:
        for batch in session.loader(data_of("MLP"), BATCH):
            session.step(batch)
    return watch.calls


def unfreeze_alone() -> None:
    """Thaws a parameter that was frozen when training began."""
    model = model_of("MLP")
    next(model.parameters()).requires_grad_(False)
    with Session(model, loss_of, OPTIMIZERS["sgd"]) as session:
        session.step(batches()[0])
        next(session.model.parameters()).requires_grad_(True)
        session.step(batches()[1])


def train_and_say(options: Mapping[str, Any]) -> list[str]:
    """Makes one step; returns what the session says and warns of."""
    session = Session(model_of("MLP"), loss_of, OPTIMIZERS["sgd"], max_steps=1, **options)
    said: list[str] = []
    with session:
        part = session._setup.part
        assert part is not None
        part.say = part.warn = said.append
        session.step(batches()[0])
    return said


def train_on_other_batches() -> None:
    """Each process has a batch of another size."""
    with Session(model_of("MLP"), loss_of, OPTIMIZERS["sgd"]) as session:
        inputs, labels = batches()[0]
        session.step((inputs[session.task.group.rank :], labels[session.task.group.rank :]))


def train_with_modes() -> dict[str, Any]:
    """Sets one layer that has statistics to evaluation half way, and the whole model later."""
    with Session(
        model_of("batch normalization"), loss_of, OPTIMIZERS["sgd"], max_steps=STEPS
    ) as session:
        for batch in session.loader(data_of("MLP"), BATCH, shuffle=False):
            if session.global_step == STEPS // 3:
                session.model.get_submodule("1").eval()
            if session.global_step == STEPS // 2:
                session.model.eval()
            session.step(batch)
    return {name: value.numpy() for name, value in session.model.state_dict().items()}


def train_from_one_example() -> list[float]:
    """The first batch has one example, and the next ones have more; returns the losses."""
    inputs, labels = batches()[0]
    with Session(model_of("MLP"), loss_of, OPTIMIZERS["sgd"]) as session:
        return [session.step((inputs[:size], labels[:size])).loss for size in (1, 16, 5)]
