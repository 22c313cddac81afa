"""Runs one task's segments of a cut graph on micro-batches, and exchanges values with other tasks.

All tasks agree on one order: by depth plus number of the micro-batch, then by depth. A segment
waits for segments of smaller depths of the same micro-batch only, which come earlier in that order
at every task, and no task waits until what it has sent is received: so no schedule deadlocks,
whatever the placement. While one micro-batch is on its way to the next task the one after it is
computed: pipelining as in Huang et al., GPipe (NeurIPS 2019), for any acyclic graph.

The backward pass runs the segments in the reverse order. Autograd ends at the borders of segments:
what a segment receives are leaves, whose gradients are sent the way back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_unflatten

from trireme.graph.cut import Cut, Segment, Value

Record = Callable[[str, int, int, float, float], None]
"""(kind: forward or backward, depth, micro-batch, begin, end): times in seconds, on the wall."""


@dataclass(eq=False)
class Microbatch:
    """One micro-batch.

    Attributes:
        inputs: the model's inputs, flat and in their order, the same in all tasks.
        loss: computes the scalar that is differentiated from the model's outputs; None computes
            the outputs only.
        outputs: the model's outputs, detached; None at other tasks than the one that receives them.
        value: the loss, detached; None as for `outputs`.
    """

    inputs: Sequence[Any]
    loss: Callable[[Any], torch.Tensor] | None = None
    outputs: Any = None
    value: torch.Tensor | None = None
    _leaves: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    _results: dict[int, list[Any]] = field(default_factory=dict, repr=False)
    _sizes: dict[Any, int] = field(default_factory=dict, repr=False)
    _scalar: torch.Tensor | None = field(default=None, repr=False)


class Executor:
    """Computes the segments of one task.

    Args:
        cut: the cut graph, equal in all tasks.
        task: the number of this task.
        ranks: the global rank of each task in `torch.distributed`.
        group: the process group of the tasks.
        device: the device of the values that are received.

    Attributes:
        record: called after each segment with its times; None for nobody.
    """

    def __init__(
        self,
        cut: Cut,
        task: int,
        ranks: Sequence[int],
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.record: Record | None = None
        self._cut = cut
        self._task = task
        self._ranks = ranks
        self._group = group
        self._device = torch.device(device)
        self._mine = [each for each in cut.segments if each.task == task]
        self._numbers = {name: number for number, name in enumerate(cut.values)}
        self._reads = self._first_readers()
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def run(self, microbatches: Sequence[Microbatch]) -> None:
        """Computes a batch: forward, and backward of each micro-batch that has a loss.

        Gradients are added to those of this task's parameters.

        Args:
            microbatches: the micro-batches; all tasks give as many, with the same inputs.

        Raises:
            RuntimeError: another task has gone, or does not answer within the group's timeout.
        """
        for each in microbatches:
            each._sizes = _symbols(self._cut.inputs, each.inputs)
        order = sorted(
            (segment.depth + number, segment.depth, number, place)
            for place, segment in enumerate(self._mine)
            for number in range(len(microbatches))
        )
        try:
            arriving = dict(self._receive_values(microbatches))
            for _, _, number, place in order:
                with _Timed(self, "forward", self._mine[place], number):
                    self._forward(microbatches, number, self._mine[place], arriving)
            trained = [each.loss is not None for each in microbatches]
            if any(trained):
                gradients = dict(self._receive_gradients(microbatches))
                for _, _, number, place in reversed(order):
                    with _Timed(self, "backward", self._mine[place], number):
                        self._backward(microbatches, number, place, gradients)
            for work, _ in self._sent:
                work.wait()
        finally:
            self._sent.clear()
            for each in microbatches:
                each._leaves.clear()
                each._results.clear()

    # -- forward ---------------------------------------------------------------------------------

    def _receive_values(
        self, microbatches: Sequence[Microbatch]
    ) -> Iterator[tuple[tuple[str, int], tuple[Any, torch.Tensor]]]:
        """Begins to receive all values, in the order in which they are sent."""
        coming = [each for each in self._cut.values.values() if self._task in each.readers]
        order = sorted(
            (value.depth + number, value.depth, number, self._numbers[value.name])
            for value in coming
            for number in range(len(microbatches))
        )
        named = list(self._cut.values.values())
        for _, _, number, place in order:
            value = named[place]
            yield (value.name, number), self._receive(value, value.task, microbatches, number, 0)

    def _forward(
        self,
        microbatches: Sequence[Microbatch],
        number: int,
        segment: Segment,
        arriving: Mapping[tuple[str, int], tuple[Any, torch.Tensor]],
    ) -> None:
        microbatch = microbatches[number]
        values = []
        for name in segment.receives:
            if name not in microbatch._leaves:  # it comes from another task
                work, buffer = arriving[name, number]
                work.wait()
                microbatch._leaves[name] = buffer.requires_grad_(self._is_trained(name, microbatch))
            values.append(microbatch._leaves[name])
        given = [microbatch.inputs[place] for place in segment.inputs]
        results = segment.module(*values, *given)
        if segment is self._cut.segments[-1]:
            self._finish(microbatch, results)
            return
        microbatch._results[id(segment)] = results
        for name, result in zip(segment.outputs, results, strict=True):
            value, detached = self._cut.values[name], result.detach()
            trained = result.requires_grad and self._is_trained(name, microbatch)
            microbatch._leaves[name] = detached.requires_grad_(trained)
            for reader in value.readers:
                self._send(detached.detach(), value, reader, len(microbatches), number, 0)

    def _finish(self, microbatch: Microbatch, results: list[Any]) -> None:
        outputs = tree_unflatten(results, self._cut.nesting)
        if microbatch.loss is not None:
            microbatch._scalar = microbatch.loss(outputs)
            microbatch.value = microbatch._scalar.detach()
        plain = [each.detach() if isinstance(each, torch.Tensor) else each for each in results]
        microbatch.outputs = tree_unflatten(plain, self._cut.nesting)

    def _is_trained(self, name: str, microbatch: Microbatch) -> bool:
        return microbatch.loss is not None and self._cut.values[name].differentiable

    # -- backward --------------------------------------------------------------------------------

    def _first_readers(self) -> dict[tuple[str, int], int]:
        """Returns the least depth at which each other task reads each value."""
        found: dict[tuple[str, int], int] = {}
        for segment in self._cut.segments:  # by depth
            for name in segment.receives:
                if segment.task in self._cut.values[name].readers:
                    found.setdefault((name, segment.task), segment.depth)
        return found

    def _receive_gradients(
        self, microbatches: Sequence[Microbatch]
    ) -> Iterator[tuple[tuple[str, int, int], tuple[Any, torch.Tensor]]]:
        """Begins to receive all gradients, in the order in which each reader sends them."""
        order = sorted(
            (self._gradient_order(name, reader, number), name, reader, number)
            for (name, reader) in self._reads
            for number, microbatch in enumerate(microbatches)
            if self._cut.values[name].task == self._task and self._is_trained(name, microbatch)
        )
        for _, name, reader, number in order:
            value = self._cut.values[name]
            yield (name, reader, number), self._receive(value, reader, microbatches, number, 1)

    def _gradient_order(self, name: str, reader: int, number: int) -> tuple[int, ...]:
        depth = self._reads[name, reader]
        return (-depth - number, -depth, -number, self._numbers[name])

    def _backward(
        self,
        microbatches: Sequence[Microbatch],
        number: int,
        place: int,
        gradients: Mapping[tuple[str, int, int], tuple[Any, torch.Tensor]],
    ) -> None:
        microbatch, segment = microbatches[number], self._mine[place]
        if microbatch.loss is None:
            return
        if segment is self._cut.segments[-1]:
            assert microbatch._scalar is not None
            torch.autograd.backward(microbatch._scalar)
            microbatch._scalar = None
        else:
            self._differentiate(microbatch, number, segment, gradients)
        for name in segment.receives:
            value = self._cut.values[name]
            first = self._reads.get((name, self._task)) == segment.depth
            if first and value.differentiable:  # all segments that read it are through
                leaf = microbatch._leaves.pop(name)
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                self._send(gradient, value, value.task, len(microbatches), number, 1)

    def _differentiate(
        self,
        microbatch: Microbatch,
        number: int,
        segment: Segment,
        gradients: Mapping[tuple[str, int, int], tuple[Any, torch.Tensor]],
    ) -> None:
        outputs, totals = [], []
        for name, result in zip(
            segment.outputs, microbatch._results.pop(id(segment)), strict=True
        ):
            total = microbatch._leaves.pop(name).grad
            value = self._cut.values[name]
            for reader in value.readers if self._is_trained(name, microbatch) else ():
                work, buffer = gradients[name, reader, number]
                work.wait()
                total = buffer if total is None else total + buffer
            if total is not None and result.requires_grad:
                outputs.append(result)
                totals.append(total)
        if outputs:
            torch.autograd.backward(outputs, totals)

    # -- transfers -------------------------------------------------------------------------------

    def _send(
        self, tensor: torch.Tensor, value: Value, task: int, count: int, number: int, back: int
    ) -> None:
        tensor = tensor.contiguous()
        tag = self._tag(value, count, number, back)
        self._sent.append((dist.isend(tensor, self._ranks[task], self._group, tag), tensor))

    def _receive(
        self,
        value: Value,
        task: int,
        microbatches: Sequence[Microbatch],
        number: int,
        back: int,
    ) -> tuple[Any, torch.Tensor]:
        sizes = microbatches[number]._sizes
        shape = [_number(size, sizes) for size in value.shape]
        buffer = torch.empty(shape, dtype=value.dtype, device=self._device)
        tag = self._tag(value, len(microbatches), number, back)
        return dist.irecv(buffer, self._ranks[task], self._group, tag), buffer

    def _tag(self, value: Value, count: int, number: int, back: int) -> int:
        return (self._numbers[value.name] * count + number) * 2 + back


class _Timed:
    def __init__(self, executor: Executor, kind: str, segment: Segment, number: int) -> None:
        self._record = executor.record
        self._what = kind, segment.depth, number
        self._began = 0.0

    def __enter__(self) -> None:
        if self._record is not None:
            self._began = time.time()

    def __exit__(self, *error: object) -> None:
        if self._record is not None:
            self._record(*self._what, self._began, time.time())


def _symbols(fakes: Sequence[Any], inputs: Sequence[Any]) -> dict[Any, int]:
    """Returns the sizes of the inputs for the symbols in the shapes of the graph."""
    found: dict[Any, int] = {}
    for fake, given in zip(fakes, inputs, strict=True):
        if isinstance(fake, torch.Tensor):
            for size, actual in zip(fake.shape, given.shape, strict=True):
                if isinstance(size, torch.SymInt):
                    found[size.node.expr] = actual
    return found


def _number(size: Any, symbols: Mapping[Any, int]) -> int:
    """Returns a size as a number."""
    return int(size.node.expr.subs(symbols)) if isinstance(size, torch.SymInt) else int(size)
