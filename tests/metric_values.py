"""What collectors of metrics yield, as Prometheus would read it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


def metrics_of(*collectors: Collector) -> dict[str, Metric]:
    """Returns the metrics by name; a name that two collectors have is an error."""
    registry = CollectorRegistry(auto_describe=True)
    for collector in collectors:
        registry.register(collector)
    return {metric.name: metric for metric in registry.collect()}


def value(collector: Collector, name: str, **labels: object) -> float:
    """Returns the value of a sample, which there must be once."""
    wanted = {label: str(text) for label, text in labels.items()}
    (found,) = [
        sample.value
        for metric in collector.collect()
        for sample in metric.samples
        if sample.name == name and sample.labels == wanted
    ]
    return float(found)
