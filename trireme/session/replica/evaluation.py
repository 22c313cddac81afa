"""Evaluation: the mean loss and metrics of a data set, and the metrics that most tasks want."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from trireme.data.loader import tensors_of
from trireme.session.replica.batch import examples_in, inputs_and_targets, move
from trireme.session.replica.replica import Replica
from trireme.session.result import Metric

__all__ = ["accuracy", "evaluate"]

Transform = Callable[[Any], Any]


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the fraction of examples whose largest output is at the target.

    Args:
        outputs: scores of shape (examples, classes), or (examples,) for two classes, where a score
            above 0 means the second class.
        targets: class indices of shape (examples,), or one-hot rows of shape (examples, classes).

    Returns:
        A 0-dim float tensor in [0, 1].
    """
    chosen = outputs.argmax(dim=1) if outputs.dim() > 1 else (outputs > 0).long()
    if targets.dim() > 1:
        targets = targets.argmax(dim=1)
    return (chosen == targets).float().mean()


def evaluate(
    replica: Replica,
    dataset: Dataset[Any],
    metrics: Mapping[str, Metric],
    *,
    batch_size: int,
    transform: Transform | None = None,
) -> dict[str, float]:
    """Returns the means of the loss and of each metric over a data set, each example once.

    The model is in evaluation mode meanwhile; its mode is restored afterwards.

    Args:
        replica: the model and its loss, with the values to evaluate.
        dataset: map-style.
        metrics: by name.
        batch_size: the number of examples that are computed at a time.
        transform: applied to each batch before it is computed.
    """
    totals: dict[str, float] = dict.fromkeys(["loss", *metrics], 0.0)
    count = 0
    training = replica.model.training
    replica.model.eval()
    try:
        with torch.inference_mode():
            for batch in _batches(dataset, batch_size):
                inputs, targets = inputs_and_targets(
                    transform(batch) if transform else batch, keep_targets=replica.keeps_targets
                )
                inputs, targets = (move(value, replica.flat.device) for value in (inputs, targets))
                size = examples_in(inputs)
                loss, outputs = replica.forward(inputs, targets)
                totals["loss"] += float(loss) * size
                for name, metric in metrics.items():
                    totals[name] += float(metric(outputs, targets)) * size
                count += size
    finally:
        replica.model.train(training)
    return {name: total / max(count, 1) for name, total in totals.items()}


def _batches(dataset: Dataset[Any], batch_size: int) -> Iterator[Any]:
    if (tensors := tensors_of(dataset)) is not None:
        yield from zip(*(torch.split(tensor, batch_size) for tensor in tensors), strict=True)
    else:
        yield from DataLoader(dataset, batch_size=batch_size)
