"""Metrics are averaged by examples, or updated with each batch and computed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from trireme.errors import ConfigurationError
from trireme.session.metric_value import MetricValue, own_metrics, value_of


class Precision:
    """The share of true ones among those that are said to be ones: no mean over batches."""

    def __init__(self) -> None:
        self.sync_on_compute = True
        self.reset()

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        said = outputs.argmax(1) == 1
        self.said += int(said.sum())
        self.right += int((said & (targets == 1)).sum())

    def compute(self) -> float:
        return self.right / self.said

    def reset(self) -> None:
        self.said = self.right = 0


OUTPUTS = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
TARGETS = torch.tensor([1, 0, 0, 1, 1])


def test_a_function_is_averaged_by_examples() -> None:
    value = MetricValue("accuracy", trireme.accuracy)
    value.add(OUTPUTS[:3], TARGETS[:3], 3)
    value.add(OUTPUTS[3:], TARGETS[3:], 2)
    assert value.value() == pytest.approx(float(trireme.accuracy(OUTPUTS, TARGETS)))


def test_an_object_with_a_state_is_computed_once() -> None:
    metric: Any = Precision()
    metric.update(OUTPUTS, TARGETS)  # what was before does not count
    pieces = [(OUTPUTS[:3], TARGETS[:3]), (OUTPUTS[3:], TARGETS[3:])]
    assert value_of("precision", metric, pieces) == 0.5
    assert metric.said == 0


def test_no_batch_is_zero() -> None:
    assert MetricValue("precision", Precision()).value() == 0.0  # type: ignore[arg-type]
    assert MetricValue("accuracy", trireme.accuracy).value() == 0.0


@pytest.mark.parametrize(
    ("found", "said"),
    [(torch.ones(3), r"a tensor of shape \(3,\)"), ({"a": 1.0, "b": 2.0}, "the keys a, b")],
)
def test_more_than_one_number_is_refused(found: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'each' returned {said}"):
        value_of("each", lambda outputs, targets: found, [(OUTPUTS, TARGETS)])


def test_sessions_have_copies_that_wait_for_no_other_process() -> None:
    given: Any = Precision()
    own: Any = own_metrics({"precision": given, "accuracy": trireme.accuracy})
    assert own["precision"] is not given and own["accuracy"] is trireme.accuracy
    assert given.sync_on_compute and not own["precision"].sync_on_compute
    with pytest.raises(ConfigurationError, match="give a mapping from names"):
        own_metrics([given])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_and_evaluations_of_a_session_are_exact(accumulate: int) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(37, 4)
    targets = (inputs[:, 0] > 0.5).long()
    model = nn.Linear(4, 2)

    def exact() -> float:
        metric = Precision()
        metric.update(model(inputs), targets)
        return metric.compute()

    session = trireme.Session(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        metrics={"precision": Precision()},  # type: ignore[dict-item]
        accumulate=accumulate,
    )
    with session:
        for _ in range(2):
            before = exact()
            assert session.step((inputs, targets)).metrics == {"precision": pytest.approx(before)}
            found = session.evaluate(TensorDataset(inputs, targets), batch_size=8)
            assert found["precision"] == pytest.approx(exact())
