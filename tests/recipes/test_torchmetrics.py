"""Metrics of TorchMetrics in a session equal their value on the whole set."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme

torchmetrics = pytest.importorskip(
    "torchmetrics", reason="NOT TESTED: TorchMetrics is not installed: make test-recipes"
)
pytestmark = [pytest.mark.recipes, pytest.mark.thorough]


def test_a_collection_is_exact_over_an_evaluation() -> None:
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

    torch.manual_seed(0)
    inputs, targets = torch.randn(103, 8), torch.randint(3, (103,))
    model = nn.Linear(8, 3)
    collection = MetricCollection({"f1": MulticlassF1Score(3), "auroc": MulticlassAUROC(3)})
    session = trireme.Session(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        metrics=collection,
    )
    with session:
        for _ in range(3):
            session.step((inputs[:10], targets[:10]))
        found = session.evaluate(TensorDataset(inputs, targets), batch_size=7)
        exact = collection(model(inputs), targets)
    for name in ("f1", "auroc"):
        assert found[name] == pytest.approx(float(exact[name]), abs=1e-6)
