"""Runs the operations of a placed graph on the micro-batches of a step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trireme.errors import ConfigurationError
from trireme.graph.capture.rehearsal import restored_state
from trireme.graph.execute.executor import Microbatch
from trireme.graph.placed.decision import Example
from trireme.graph.placed.graph_part import GraphPart, PlacedGraph
from trireme.parallel.operation_log import OperationLog, StageOperation
from trireme.parallel.processes.lost_peers import lost_peer
from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.session.loss import Loss
from trireme.tensors import tensors_in

Piece = tuple[tuple[tuple[Any, ...], dict[str, Any]], Any, int]
"""A micro-batch: the arguments of the model's call, positional and by name, then the targets, and
the number of examples."""

_SAMPLES = 8


class GraphExecution(OperationLog):
    """Computes the gradients of batches.

    Attributes:
        graph: the graph of the newest step; None before the first.
    """

    def __init__(
        self,
        process_group: TorchProcessGroup,
        part: GraphPart,
        loss: Callable[[Any, Any], torch.Tensor],
    ) -> None:
        super().__init__()
        self._process_group = process_group
        self._part = part
        self._loss = loss
        self.graph: PlacedGraph | None = None

    def prepare(self, pieces: Sequence[Piece], loss: Loss) -> PlacedGraph:
        """Returns the graph of the model's present mode; makes it if there is none.

        The loss is called to be measured, and keeps no trace of that.
        """
        self._check_same(pieces)
        (args, kwargs), targets, _ = pieces[0]
        example = Example(args, kwargs, lambda outputs: self._loss(outputs, targets))
        return self._part.graph(example, restored_state(loss))

    def step(
        self, graph: PlacedGraph, pieces: Sequence[Piece], factor: float
    ) -> tuple[torch.Tensor, list[tuple[Any, Any]]]:
        """Computes the gradients of a batch's mean loss into the parameters of this process."""
        group, self.graph = self._process_group, graph
        total = sum(size for _, _, size in pieces)
        losses: list[torch.Tensor] = []
        microbatches = [
            Microbatch(
                graph.inputs(*call), partial(self._weighted, losses, own, size / total, factor)
            )
            for call, own, size in pieces
        ]
        executor = graph.executor
        executor.record = None if self.operations is None else self._record
        with lost_peer():
            executor.run(microbatches)
            loss = torch.zeros(1, device=group.device)
            for each in losses:
                loss += each.to(loss.device)
            dist.all_reduce(loss, group=group.group("graph"))  # zeros in the other processes
        if group.part != group.output_part:
            return loss[0], []
        outputs = zip(microbatches, pieces, strict=True)
        return loss[0], [(each.outputs, own) for each, (_, own, _) in outputs]

    def _check_same(self, pieces: Sequence[Piece]) -> None:
        """Checks that the tasks have batches of one size, and a few equal numbers in them.

        Where sizes differ gloo would end the process.
        """
        mine = torch.tensor([signature(pieces)], dtype=torch.float64)
        both = torch.cat([mine, -mine])
        with lost_peer():
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._process_group.group("graph"))
        if not torch.equal(both[:1], -both[1:]):
            raise ConfigurationError(
                f"rank {self._process_group.rank} and another task of its graph were given "
                "different batches: give all tasks of a replica the same, as those of "
                "session.loader are"
            )

    def outputs(self, graph: PlacedGraph, piece: Piece) -> tuple[Any] | None:
        """Returns the model's outputs in the process that receives them; None elsewhere."""
        (args, kwargs), _, _ = piece
        microbatch = Microbatch(graph.inputs(args, kwargs))
        with lost_peer():
            graph.executor.run([microbatch])
        group = self._process_group
        return (microbatch.outputs,) if group.part == group.output_part else None

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Returns the sums of numbers over the tasks of this replica."""
        sums = torch.tensor(numbers, dtype=torch.float64)
        with lost_peer():
            dist.all_reduce(sums, group=self._process_group.group("graph"))
        return list(sums.tolist())

    def _weighted(
        self, losses: list[torch.Tensor], targets: Any, share: float, factor: float, outputs: Any
    ) -> torch.Tensor:
        loss = self._loss(outputs, targets).reshape(())
        losses.append(loss.detach() * share)
        return loss * (share * factor)

    def _record(
        self, kind: str, depth: int, place: int, microbatch: int, start: float, stop: float
    ) -> None:
        assert self.operations is not None
        operation = StageOperation(self._process_group.part, depth, kind, microbatch, start, stop)
        self.operations.append(operation)


def signature(pieces: Sequence[Piece]) -> float:
    """Returns a number that differs, most likely, for different batches.

    Of the first and of the last micro-batch every tensor takes part, with a few of its elements.
    """
    found = zlib.crc32(repr([examples for *_, examples in pieces]).encode())
    for call, targets, _ in (pieces[0], pieces[-1]):
        for tensor in tensors_in((*call[0], call[1], targets)):
            flat = tensor.detach().reshape(-1)
            samples = flat[:: max(1, flat.numel() // _SAMPLES)].tolist()
            found = zlib.crc32(repr((flat.numel(), samples)).encode(), found)
    return float(found)
