"""Runs the operations of a placed graph on the micro-batches of a step."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trireme.errors import ConfigurationError
from trireme.graph.execute.executor import Microbatch
from trireme.graph.placed.graph_decision import Example
from trireme.graph.placed.graph_part import GraphPart, PlacedGraph
from trireme.monitor.stage_operation import StageOperation
from trireme.parallel.processes.lost_peers import lost_peer
from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.session.model.operation_log import OperationLog
from trireme.tensors import joined, tensors_in

Piece = tuple[tuple[tuple[Any, ...], dict[str, Any]], Any, int]
"""A micro-batch: the arguments of the model's call, positional and by name, then the targets, and
the number of examples."""


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
        super().__init__(process_group)
        self._process_group = process_group
        self._part = part
        self._loss = loss
        self._about = ""
        self.graph: PlacedGraph | None = None
        self._compared = False

    @property
    def about(self) -> str:
        return self._about

    def prepare(
        self, split: Callable[[int], Sequence[Piece]], divides: Callable[[int], bool]
    ) -> PlacedGraph:
        """Returns the graph of the model's present mode; makes it if there is none."""

        def example(count: int) -> Example:
            (args, kwargs), targets, _ = split(count)[0]
            return Example(args, kwargs, lambda outputs: self._loss(outputs, targets))

        if not self._compared:
            self._part.check_batch(example(1))
            self._compared = True
        return self._part.graph(example, divides=divides)

    def step(
        self, graph: PlacedGraph, pieces: Sequence[Piece], targets: Any, factor: float
    ) -> tuple[torch.Tensor, list[tuple[Any, Any]], bool]:
        """Computes the gradients of a batch's mean loss into the parameters of this process.

        Where nobody has chosen the number of micro-batches, the process that receives the outputs
        computes the loss of the whole batch besides, and compares.
        """
        group, self.graph = self._process_group, graph
        self._check_same(pieces)
        total = sum(size for _, _, size in pieces)
        losses: list[torch.Tensor] = []
        microbatches = [
            Microbatch(
                graph.inputs(*call), partial(self._weighted, losses, own, size / total, factor)
            )
            for call, own, size in pieces
        ]
        self._about = f"{group.mesh.graph} tasks, {len(pieces)} micro-batches"
        executor = graph.executor
        executor.record = None if self.operations is None else self._record
        with lost_peer():
            executor.run(microbatches)
            has_outputs = group.part == group.output_part
            outputs = [
                (each.outputs, own) for each, (_, own, _) in zip(microbatches, pieces, strict=True)
            ]
            found = torch.zeros(2, device=group.device)
            for each in losses:
                found[0] += each.to(found.device)
            if has_outputs and len(pieces) > 1 and not self._part.microbatches_are_chosen:
                whole = joined([each for each, _ in outputs])
                with torch.no_grad():
                    found[1] = not same_loss(self._loss(whole, targets).detach(), found[0])
            dist.all_reduce(found, group=group.group("graph"))  # zeros in the other processes
        return found[0], outputs if has_outputs else [], not found[1]

    def _check_same(self, pieces: Sequence[Piece]) -> None:
        """Checks that the tasks have batches of one size, and a few equal numbers in them.

        The first batches are compared whole; of later ones, as this is done in every step, sizes
        and samples. Where sizes differ gloo would end the process.
        """
        mine = torch.tensor([signature(pieces)], dtype=torch.float64)
        both = torch.cat([mine, -mine])
        with lost_peer():
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._process_group.group("graph"))
        if not torch.equal(both[: len(mine)], -both[len(mine) :]):
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


_CLOSE = 1e-5
"""By how much losses may differ, relative to the batch's: as rounding in float32 does."""


def same_loss(whole: torch.Tensor, parts: torch.Tensor) -> bool:
    """Returns whether a batch's loss is the one that its micro-batches have together.

    Losses that are not finite are the same if both are.
    """
    one, other = float(whole), float(parts)
    if not (math.isfinite(one) and math.isfinite(other)):
        return not (math.isfinite(one) or math.isfinite(other))
    return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=1e-7)


_SAMPLES = 8


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
