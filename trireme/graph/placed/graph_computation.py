"""Computes a placed graph: this process's operations, on the micro-batches of a step."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trireme.errors import ConfigurationError
from trireme.graph.execute.executor import Microbatch
from trireme.graph.placed.decision import Example
from trireme.graph.placed.graph_part import GraphPart, PlacedGraph
from trireme.parallel.assembly import ProcessGroupComputation
from trireme.parallel.operation_log import OperationLog, StageOperation
from trireme.parallel.processes.lost_peers import lost_peer
from trireme.session.loss import Loss, scalar
from trireme.session.metric_value import Metric
from trireme.session.model.batch import arguments, examples_of, pieces
from trireme.session.model.reducer import Reducer
from trireme.session.options import Options
from trireme.session.result import StepResult
from trireme.tensors import tensors_in

Piece = tuple[tuple[tuple[Any, ...], dict[str, Any]], Any, int]
"""A micro-batch: the arguments of the model's call, positional and by name, then the targets, and
the number of examples."""

_SAMPLES = 8


class GraphComputation(ProcessGroupComputation):
    """Computes this process's operations of a graph; one process has the outputs."""

    def __init__(
        self,
        part: GraphPart,
        loss: Loss,
        options: Options,
        metrics: Mapping[str, Metric],
        reducer: Reducer,
    ) -> None:
        if options.accumulate > 1:
            raise ConfigurationError(
                f"accumulate={options.accumulate} with a graph: micro-batches do that already; "
                f"use --microbatches {options.accumulate}"
            )
        if options.precision != "float32":
            raise ConfigurationError(
                f"precision={options.precision!r} with a graph: it computes in the precision of "
                "the model; convert the model, or take another strategy"
            )
        super().__init__(part.modules[0], loss, part, options, metrics, reducer)
        self._reducer: Reducer = reducer
        self._part = part
        self._group = part.process_group
        self.pipeline = OperationLog()

    def _compute(self, batch: tuple[Any, Any]) -> StepResult:
        group, examples = self._group, examples_of(*batch)
        if not examples:
            raise ConfigurationError(
                f"rank {group.rank} was given a batch without examples: leave such batches out, or "
                "make batches large enough for all replicas"
            )
        split: list[Piece] = [
            (arguments(inputs), targets, size)
            for (inputs, targets), size in pieces(
                batch, min(self._part.microbatches, examples), examples
            )
        ]
        graph = self.pipeline.graph = self._prepared(split)
        weight = self._weight(self._data, None, batch[1], examples)
        share = self._reducer.scale_factor(self._counted(weight))()
        losses: list[torch.Tensor] = []
        microbatches = [
            Microbatch(
                graph.inputs(*call), partial(self._weighted, losses, own, size / examples, share)
            )
            for call, own, size in split
        ]
        graph.executor.record = None if self.pipeline.operations is None else self._record
        with lost_peer():
            graph.executor.run(microbatches)
            loss = torch.zeros(1, device=group.device)
            for each in losses:
                loss += each.to(loss.device)
            dist.all_reduce(loss, group=group.group("graph"))  # zeros in the other processes
        outputs = [
            (each.outputs, own) for each, (_, own, _) in zip(microbatches, split, strict=True)
        ]
        seen = outputs if group.part == group.output_part else []
        return StepResult(loss[0], list(seen), self._metrics, examples, weight=weight)

    def _evaluated(self, inputs: Any, targets: Any) -> tuple[torch.Tensor, Any] | None:
        args, kwargs = arguments(inputs)
        with torch.inference_mode(False), torch.no_grad():  # the graph may have to be captured
            graph = self._prepared([((args, kwargs), targets, examples_of(inputs, targets))])
            microbatch = Microbatch(graph.inputs(args, kwargs))
            with lost_peer():
                graph.executor.run([microbatch])
            if self._group.part != self._group.output_part:
                return None
            return scalar(self._loss(microbatch.outputs, targets)), microbatch.outputs

    def _united(self, totals: dict[str, float]) -> dict[str, float]:
        sums = torch.tensor(list(totals.values()), dtype=torch.float64)
        with lost_peer():
            dist.all_reduce(sums, group=self._group.group("graph"))
        return dict(zip(totals, sums.tolist(), strict=True))

    def _prepared(self, pieces: Sequence[Piece]) -> PlacedGraph:
        """Checks that tasks have equal batches, else gloo ends the process; returns the graph."""
        mine = torch.tensor([signature(pieces)], dtype=torch.float64)
        both = torch.cat([mine, -mine])
        with lost_peer():
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group.group("graph"))
        if not torch.equal(both[:1], -both[1:]):
            raise ConfigurationError(
                f"rank {self._group.rank} and another task of its graph were given different "
                "batches: give all tasks of a replica the same, as those of session.loader are"
            )
        (args, kwargs), targets, _ = pieces[0]
        return self._part.graph(Example(args, kwargs, self._loss, targets))

    def _weighted(
        self, losses: list[torch.Tensor], targets: Any, share: float, factor: float, outputs: Any
    ) -> torch.Tensor:
        loss = scalar(self._loss(outputs, targets)).reshape(())
        losses.append(loss.detach() * share)
        return loss * (share * factor)

    def _record(
        self, kind: str, depth: int, place: int, microbatch: int, start: float, stop: float
    ) -> None:
        assert self.pipeline.operations is not None
        operation = StageOperation(self._group.part, depth, kind, microbatch, start, stop)
        self.pipeline.operations.append(operation)


def signature(pieces: Sequence[Piece]) -> float:
    """Returns a number that differs, most likely, for different batches: of some elements."""
    found = zlib.crc32(repr([examples for *_, examples in pieces]).encode())
    for call, targets, _ in (pieces[0], pieces[-1]):
        for tensor in tensors_in((*call[0], call[1], targets)):
            flat = tensor.detach().reshape(-1)
            samples = flat[:: max(1, flat.numel() // _SAMPLES)].tolist()
            found = zlib.crc32(repr((flat.numel(), samples)).encode(), found)
    return float(found)
