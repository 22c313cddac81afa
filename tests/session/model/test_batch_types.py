"""Batches and outputs keep their classes on the way through a session; models with own losses."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import trireme
from trireme.errors import ConfigurationError
from trireme.session.loss import Loss
from trireme.session.model.batch import inputs_and_targets, pieces
from trireme.session.session import Session


class Output(dict[str, Any]):
    """As Hugging Face's: items are attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class Scores:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class Pair(NamedTuple):
    logits: torch.Tensor
    state: torch.Tensor


class Encoding(UserDict[str, Any]):
    """As what tokenizers give."""


class Classifier(nn.Module):
    """Computes its loss if it is told the labels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)
        self.kind = kind

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.linear(input_ids)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        if self.kind == "dict":
            return Output(logits=logits, **({} if loss is None else {"loss": loss}))
        if self.kind == "dataclass":
            return Scores(logits, loss)
        if self.kind == "loss":
            return loss
        return (loss, logits) if self.kind == "tuple" else Pair(logits, logits.sum())


def batch(kind: type = dict) -> Any:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, 4, generator=generator)
    return kind(input_ids=inputs, labels=inputs[:, :3].argmax(1))


def train(
    kind: str, loss: Loss, given: Any, **options: Any
) -> tuple[Session, trireme.StepResult, list[Any]]:
    seen: list[Any] = []

    def look(outputs: Any, targets: Any) -> float:
        seen.append((outputs, targets))
        return 0.0

    session = Session(
        Classifier(kind),
        loss,
        lambda params: torch.optim.SGD(params, lr=0.5),
        metrics={"look": look},
        max_steps=1,
        **options,
    )
    with session:
        result = session.step(given)
        assert result.metrics == {"look": 0.0}
    return session, result, seen


def plain() -> nn.Module:
    """The model after the same step in a program without Trireme."""
    model = Classifier("dataclass")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(**batch()).loss.backward()
    optimizer.step()
    return model


@pytest.mark.parametrize(
    ("kind", "expected"), [("dict", Output), ("dataclass", Scores), ("named tuple", Pair)]
)
def test_metrics_see_outputs_of_the_model_s_own_class(kind: str, expected: type) -> None:
    _, _, seen = train(kind, lambda out, labels: F.cross_entropy(out.logits, labels), batch())
    ((outputs, targets),) = seen
    assert type(outputs) is expected
    assert not outputs.logits.requires_grad
    assert torch.equal(targets, batch()["labels"])


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}], ids=["whole", "in pieces"])
@pytest.mark.parametrize("kind", ["dict", "dataclass", "tuple", "loss"])
def test_a_model_s_own_loss_trains_as_without_a_session(kind: str, options: Any) -> None:
    session, result, seen = train(kind, trireme.model_loss, batch(), **options)
    for name, value in plain().state_dict().items():
        torch.testing.assert_close(session.model.state_dict()[name], value)
    assert result.loss == pytest.approx(float(Classifier("dataclass")(**batch()).loss.detach()))
    assert sum(len(targets) for _, targets in seen) == 6


def test_a_batch_of_a_class_of_its_own_is_given_to_the_model_by_name() -> None:
    session, _, _ = train("dataclass", trireme.model_loss, batch(Encoding))
    assert torch.equal(session.model.linear.weight, plain().linear.weight)


def test_evaluation_takes_the_model_s_own_loss_too() -> None:
    data = [{k: v[i] for k, v in batch().items()} for i in range(6)]
    session = Session(
        Classifier("dict"),
        trireme.model_loss,
        lambda params: torch.optim.SGD(params, lr=0.5),
        metrics={"accuracy": lambda out, labels: trireme.accuracy(out.logits, labels)},
    )
    with session:
        found = session.evaluate(data, batch_size=4)
    out = Classifier("dict")(**batch())
    assert found["loss"] == pytest.approx(float(out.loss.detach()))
    assert found["accuracy"] == pytest.approx(
        float(trireme.accuracy(out.logits, batch()["labels"]))
    )


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("named tuple", batch(), "they are "),
        ("dict", {"input_ids": torch.ones(2, 4)}, "they are the keys logits"),
        ("dataclass", {"input_ids": torch.ones(2, 4)}, "they are Scores"),
    ],
)
def test_a_model_without_a_loss_is_named(kind: str, given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"no loss of one number: .*{message}"):
        train(kind, trireme.model_loss, given)


def test_no_loss_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"NoneType, .*trireme\.model_loss"):
        train("dict", None, batch())  # type: ignore[arg-type]


def test_a_loss_for_each_example_is_refused_by_its_shape() -> None:
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    with pytest.raises(ConfigurationError, match=r"the loss is a tensor of shape \(6,\).*mean"):
        train("dict", lambda out, labels: loss(out.logits, labels), batch())


@pytest.mark.parametrize("kind", [dict, Output, Encoding])
def test_targets_go_out_of_a_batch_or_stay_in_it(kind: type) -> None:
    whole = batch(kind)
    inputs, targets = inputs_and_targets(whole)
    assert list(inputs) == ["input_ids"]
    assert targets is whole["labels"]
    assert inputs_and_targets(whole, keep_targets=True) == (whole, targets)
    assert list(whole) == ["input_ids", "labels"], "the program's batch is as it was"


def test_pieces_are_of_the_batch_s_class_and_share_what_does_not_count_examples() -> None:
    given = Output(ids=torch.arange(6), table=torch.ones(2, 3))
    cut = list(pieces(given, 2))
    assert [size for _, size in cut] == [3, 3]
    assert all(type(piece) is Output for piece, _ in cut)
    assert torch.equal(torch.cat([piece.ids for piece, _ in cut]), given.ids)
    assert all(piece.table is given.table for piece, _ in cut)
