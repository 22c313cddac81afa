"""The value of a metric over several batches, each example counted once.

A metric is a function, whose values are averaged by the number of examples, or an object with the
methods `update`, `compute` and `reset`, as those of TorchMetrics: it is updated with each batch and
computed once, so that metrics that are no mean over batches, such as F1 or AUROC, are exact.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.session.loss import described
from trireme.tensors import tensors_in

Metric = Callable[..., torch.Tensor | float]
"""(outputs, targets) -> a number, the mean over the batch; or an object with `update(outputs,
targets)`, `compute()` and `reset()`, as the metrics of TorchMetrics."""


def own_metrics(metrics: Any) -> dict[str, Metric]:
    """Returns the metrics by name; those with a state as copies that ask no other process."""
    if not isinstance(metrics, Mapping | None) and not hasattr(metrics, "keys"):
        raise ConfigurationError(
            f"metrics={metrics!r}: give a mapping from names to functions of (outputs, targets) or "
            'to metrics of TorchMetrics, such as {"accuracy": trireme.accuracy}'
        )
    return {name: _own(metric) for name, metric in dict(metrics or {}).items()}


def _own(metric: Metric) -> Metric:
    if not _has_state(metric):
        return metric
    own = copy.deepcopy(metric)
    if hasattr(own, "sync_on_compute"):
        own.sync_on_compute = False
    return own


def _has_state(metric: object) -> bool:
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


class MetricValue:
    """Collects a metric's value over batches."""

    def __init__(self, name: str, metric: Metric) -> None:
        self._name = name
        self._metric = cast(Any, metric)
        self._keeps = _has_state(self._metric)
        self._total = 0.0
        self._weight = 0.0
        if self._keeps:
            self._metric.reset()

    def add(self, outputs: Any, targets: Any, weight: float) -> None:
        self._weight += weight
        if self._keeps:
            self._follow_device((outputs, targets))
            self._metric.update(outputs, targets)
        else:
            value = self._metric(outputs, targets)
            self._total += _number(self._name, value) * weight

    def value(self) -> float:
        if not self._weight:
            return 0.0
        if not self._keeps:
            return self._total / self._weight
        value = _number(self._name, self._metric.compute())
        self._metric.reset()  # some keep all outputs
        return value

    def _follow_device(self, batch: tuple[Any, Any]) -> None:
        if isinstance(self._metric, nn.Module):
            device = next((tensor.device for tensor in tensors_in(batch)), None)
            if device is not None and device != getattr(self._metric, "device", device):
                self._metric.to(device)


def value_of(name: str, metric: Metric, pieces: Iterable[tuple[object, object]]) -> float:
    """Returns a metric's value over the pieces of one batch."""
    value = MetricValue(name, metric)
    for outputs, targets in pieces:
        size = targets.shape[0] if isinstance(targets, torch.Tensor) and targets.dim() else 1
        value.add(outputs, targets, size)
    return value.value()


def _number(name: str, value: Any) -> float:
    if isinstance(value, Mapping) or (isinstance(value, torch.Tensor) and value.numel() != 1):
        raise ConfigurationError(
            f"metric {name!r} returned {described(value)}: it must be one number. Give one metric "
            "for each number, such as with average='macro'; metrics=collection takes a "
            "MetricCollection"
        )
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"metric {name!r} returned {value!r}: it must be one number"
        ) from error
