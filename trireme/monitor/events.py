"""Events that `SummaryWriter` has no method for: graphs, what a step cost, distributions, runs.

Each function is given the writer of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensorboard.compat.proto.event_pb2 import Event, TaggedRunMetadata
from tensorboard.plugins.hparams import summary_v2 as hparams

from trireme.monitor.distribution import Distribution
from trireme.monitor.graph import Graph

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["add_costs", "add_distribution", "add_graph", "add_hparams"]

Hyper = bool | float | str
"""The value of a hyper-parameter."""


def add_graph(writer: SummaryWriter, graph: Graph) -> None:
    """Writes the graph of the run's model: the GRAPHS dashboard."""
    _file(writer).add_event(Event(graph_def=graph.definition().SerializeToString()))


def add_costs(writer: SummaryWriter, graph: Graph, tag: str, step: int) -> None:
    """Writes what a pass cost, node by node: the compute time and memory of the GRAPHS dashboard.

    Args:
        writer: the run's.
        graph: of the pass.
        tag: what it is listed as; each only once in a run.
        step: the global step.
    """
    metadata = TaggedRunMetadata(tag=tag, run_metadata=graph.costs().SerializeToString())
    _file(writer).add_event(Event(tagged_run_metadata=metadata), step)


def add_distribution(
    writer: SummaryWriter, name: str, found: Distribution, step: int, walltime: float
) -> None:
    """Writes a histogram as `name`, and its moments as scalars below: `name/mean` and so on.

    Args:
        writer: the run's.
        name: what it is shown as.
        found: how the values are distributed.
        step: the global step.
        walltime: when that was, in seconds since the epoch.
    """
    writer.add_histogram_raw(
        name,
        min=found.low,
        max=found.high,
        num=found.count,
        sum=found.sum,
        sum_squares=found.sum_of_squares,
        bucket_limits=list(found.limits),
        bucket_counts=list(found.counts),
        global_step=step,
        walltime=walltime,
    )
    moments = dict(found.moments)
    if found.infinite:
        moments["not_finite"] = float(found.infinite)
    for moment, value in moments.items():
        writer.add_scalar(f"{name}/{moment}", value, step, walltime=walltime)


def add_hparams(
    writer: SummaryWriter, values: Mapping[str, Hyper], metrics: Sequence[tuple[str, str]]
) -> None:
    """Writes a run's hyper-parameters, and which curves compare runs: the HPARAMS dashboard.

    Args:
        writer: of the directory that holds the curves' runs.
        values: by name.
        metrics: the run and the tag of each curve.
    """
    shown = [hparams.Metric(tag, group=run, display_name=f"{tag} ({run})") for run, tag in metrics]
    asked = [hparams.HParam(name) for name in values]
    _file(writer).add_summary(hparams.hparams_config_pb(asked, shown))
    _file(writer).add_summary(hparams.hparams_pb(dict(values)))


def _file(writer: SummaryWriter) -> Any:
    return writer._get_file_writer()
