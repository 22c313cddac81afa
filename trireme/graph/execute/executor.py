"""Runs the segments of one task of a cut graph on micro-batches, in the order of `plan`.

Autograd ends at the borders of segments: what a segment reads are leaves, whose gradients go the
way back, to the segment that has computed the value. Parameters and buffers that another place
reads are sent once in each batch; the gradient of such a parameter comes back once, summed over the
micro-batches.

Random numbers, as of dropout, come from the generator of the task that draws them: give each task a
seed of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_unflatten

from trireme.graph.capture.rebuild import constants_of, copied, rebuild
from trireme.graph.execute.cut import Cut
from trireme.graph.execute.plan import BATCH, Event, Message, plan
from trireme.graph.execute.sizes import numbers, symbols
from trireme.graph.execute.transfers import Route, TaskDevice, Transfers, route

Record = Callable[[str, int, int, int, float, float], None]
"""(kind: forward or backward, depth, place, micro-batch, begin, end): times in seconds of the wall
clock. The end of a forward pass is that of its computation; waiting for what it reads, which is
before it begins, is not included. The early and the late segment of a place have the same depth:
the early one comes first of a forward pass, and last of a backward pass."""

_AHEAD = 4
"""For so many events ahead of the present one the receives are begun: what arrives while a segment
computes need not be waited for. More would take memory for values that are not yet needed."""


@dataclass(eq=False)
class Microbatch:
    """One micro-batch."""

    inputs: Sequence[Any]  # the model's inputs, flat and in their order, the same in all tasks
    # computes the scalar that is differentiated from the model's outputs, weighted by the share of
    # the micro-batch in the batch; it is called at the output place only. None computes the outputs
    # only. Either all tasks give a loss or none does
    loss: Callable[[Any], torch.Tensor] | None = None
    outputs: Any = None  # the model's outputs, detached; None at tasks without them
    value: torch.Tensor | None = None  # the loss, detached; None as for `outputs`


class Executor:
    """Computes the segments of one task; `record` is called after each, with its times."""

    def __init__(
        self,
        cut: Cut,
        rank: int,
        places: Sequence[TaskDevice],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.record: Record | None = None
        self._cut = cut
        self._rank = rank
        self._places = tuple(places)
        self._group = group
        self._modules = {
            index: _on_device(segment.module, places[segment.place].device)
            for index, segment in enumerate(cut.segments)
            if places[segment.place].rank == rank
        }
        self._plans: dict[tuple[bool, ...], tuple[tuple[tuple[int, Event], ...], Route]] = {}
        self._shapes: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def run(self, microbatches: Sequence[Microbatch]) -> None:
        """Computes a batch: forward, and backward of each micro-batch that has a loss.

        Gradients are added to those of the parameters that live at places of this task. After an
        error, of this task's own too, the process group cannot be used again: the others get to
        know of it when this task ends or the group's timeout is over.
        """
        events, numbered = self._planned(tuple(each.loss is not None for each in microbatches))
        sizes = [symbols(self._cut.inputs, each.inputs) for each in microbatches]

        def allocate(message: Message) -> torch.Tensor:
            value = self._cut.values[message.name]
            known = {} if message.microbatch == BATCH else sizes[message.microbatch]
            key = message.name, *known.values()
            if key not in self._shapes:
                self._shapes[key] = numbers(value.shape, known)
            return torch.empty(self._shapes[key], dtype=value.dtype)

        transfers = Transfers(self._rank, self._places, numbered, allocate, self._group)
        batch = _Batch(self, microbatches, transfers)
        ahead = 0
        for number, (position, event) in enumerate(events):
            while ahead < min(number + 1 + _AHEAD, len(events)):
                for message in events[ahead][1].receives:
                    transfers.expect(message)
                ahead += 1
            transfers.release(position)
            batch.handle(event)
        transfers.release()

    def _planned(self, trained: tuple[bool, ...]) -> tuple[tuple[tuple[int, Event], ...], Route]:
        if trained not in self._plans:
            events = plan(self._cut, trained)
            mine = (
                (position, event)
                for position, event in enumerate(events)
                if self._places[event.place].rank == self._rank
            )
            self._plans[trained] = tuple(mine), route(events)
        return self._plans[trained]


class _Batch:
    """What a task keeps while it computes a batch."""

    def __init__(
        self, executor: Executor, microbatches: Sequence[Microbatch], transfers: Transfers
    ) -> None:
        self._record = executor.record
        self._cut = executor._cut
        self._places = executor._places
        self._modules = executor._modules
        self._microbatches = microbatches
        self._trains = any(each.loss is not None for each in microbatches)
        self._transfers = transfers
        # By name, place and micro-batch.
        self._leaves: dict[tuple[str, int, int], torch.Tensor] = {}
        self._edges: dict[tuple[int, int], dict[str, GradientEdge]] = {}
        self._scalars: dict[int, torch.Tensor] = {}
        # The ids of tensors whose `grad` is a sum that was made here: nothing shares its memory.
        self._summed: set[int] = set()

    def handle(self, event: Event) -> None:
        if event.kind == "forward":
            self._forward(event)
        elif event.kind == "backward":
            self._backward(event)
        elif event.kind == "give":
            for message in event.sends:
                self._transfers.send(message, self._attribute(message.name).detach())
        else:
            for message in event.receives:
                gradient = self._transfers.take(message)
                if gradient is not None:
                    self._add_gradient(self._attribute(message.name), gradient)
        for name in event.releases:
            self._summed.discard(id(self._leaves.pop((name, event.place, event.microbatch))))

    def _forward(self, event: Event) -> None:
        segment, number, place = self._cut.segments[event.segment], event.microbatch, event.place
        microbatch, device = self._microbatches[number], self._places[place].device
        for message in event.receives:
            leaf = self._transfers.take(message)
            assert leaf is not None
            self._leaves[message.name, place, message.microbatch] = leaf.requires_grad_(
                self._is_trained(message.name, message.microbatch)
            )
        values = [self._read(name, place, number) for name in segment.receives]
        given = [microbatch.inputs[position] for position in segment.inputs]
        given = [each.to(device) if isinstance(each, torch.Tensor) else each for each in given]
        began = time.time()
        with torch.set_grad_enabled(microbatch.loss is not None):
            results = self._modules[event.segment](*values, *given)
            if event.segment == len(self._cut.segments) - 1:
                self._finish(number, results)
                results = []
        self._tell(event, began)
        edges: dict[str, GradientEdge] = {}
        for name, result in zip(segment.outputs, results, strict=True):
            trained = result.requires_grad and self._is_trained(name, number)
            self._leaves[name, place, number] = result.detach().requires_grad_(trained)
            if trained:  # the edge, unlike the result, does not keep the result's memory
                edges[name] = get_gradient_edge(result)
        if microbatch.loss is not None:
            self._edges[event.segment, number] = edges
        for message in event.sends:
            self._transfers.send(message, self._leaves[message.name, place, number].detach())

    def _finish(self, number: int, results: list[Any]) -> None:
        microbatch = self._microbatches[number]
        if microbatch.loss is not None:
            # The loss may change outputs in place; they may be leaves, or on their way elsewhere.
            kept = {id(each): each for each in results if isinstance(each, torch.Tensor)}
            copies = {key: each.clone() for key, each in kept.items()}
            results = [copies.get(id(each), each) for each in results]
            outputs = tree_unflatten(results, self._cut.nesting)
            self._scalars[number] = microbatch.loss(outputs)
            microbatch.value = self._scalars[number].detach()
        plain = [each.detach() if isinstance(each, torch.Tensor) else each for each in results]
        microbatch.outputs = tree_unflatten(plain, self._cut.nesting)

    def _backward(self, event: Event) -> None:
        number, place = event.microbatch, event.place
        if event.segment == len(self._cut.segments) - 1:
            began = time.time()
            if (scalar := self._scalars.pop(number)).requires_grad:
                self._differentiate(event, [scalar])
        else:
            edges, gradients = self._gradients(event)
            began = time.time()
            if edges:
                self._differentiate(event, edges, gradients)
        self._tell(event, began)
        for message in event.sends:
            leaf = self._leaves[message.name, place, message.microbatch]
            gradient, leaf.grad = leaf.grad, None
            self._transfers.send(message, gradient)

    def _differentiate(
        self,
        event: Event,
        ends: Sequence[torch.Tensor] | Sequence[GradientEdge],
        gradients: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Adds gradients to those of what a segment has read.

        Autograd gives several tensors gradients of the same memory, as those of `stack(...).sum(0)`
        are, and adds to a gradient in place. So it finds none that it could add to.
        """
        read = [
            self._read(name, event.place, event.microbatch)
            for name in self._cut.segments[event.segment].receives
            if self._cut.values[name].differentiable  # of others there may be no leaf any more
        ]
        read += self._modules[event.segment].parameters()
        earlier = {id(each): (each, each.grad) for each in read if each.grad is not None}
        for tensor, _ in earlier.values():
            tensor.grad = None
        torch.autograd.backward(ends, gradients)
        for tensor, sum_ in earlier.values():
            gradient, tensor.grad = tensor.grad, sum_
            if gradient is not None:
                self._add_gradient(tensor, gradient)

    def _add_gradient(self, tensor: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds to a gradient in place only if its memory is known to be its own."""
        if tensor.grad is None:
            tensor.grad = gradient
            self._summed.discard(id(tensor))
        elif id(tensor) in self._summed:
            tensor.grad += gradient
        else:
            tensor.grad = tensor.grad + gradient
            self._summed.add(id(tensor))

    def _gradients(self, event: Event) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Returns where autograd goes on, and the gradients there: sums over all readers."""
        totals: dict[str, torch.Tensor] = {}
        for name in event.releases:
            leaf = self._leaves.get((name, event.place, event.microbatch))
            if leaf is not None and leaf.grad is not None:
                totals[name] = leaf.grad
        for message in event.receives:
            gradient, name = self._transfers.take(message), message.name
            if gradient is None:  # the loss does not use the value
                continue
            totals[name] = totals[name] + gradient if name in totals else gradient
        edges = self._edges.pop((event.segment, event.microbatch))
        found = [name for name in edges if name in totals]
        return [edges[name] for name in found], [totals[name] for name in found]

    def _read(self, name: str, place: int, number: int) -> torch.Tensor:
        return self._leaves[name, place, BATCH if self._cut.values[name].attribute else number]

    def _attribute(self, name: str) -> torch.Tensor:
        found: torch.Tensor = attrgetter(self._cut.values[name].attribute)(self._cut.root)
        return found

    def _is_trained(self, name: str, number: int) -> bool:
        trained = self._trains if number == BATCH else self._microbatches[number].loss is not None
        return trained and self._cut.values[name].differentiable

    def _tell(self, event: Event, began: float) -> None:
        if self._record is not None:
            segment = self._cut.segments[event.segment]
            self._record(
                event.kind, segment.depth, segment.place, event.microbatch, began, time.time()
            )


def _on_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Returns a module that computes the same graph on a device, whatever it was captured on.

    Tensors that operators make are made there, and constants are copied there. Parameters and
    buffers are the same objects as before: the caller moves them.
    """
    if device.type == "cpu":
        return module
    graph = copied(module.graph)
    for node in graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
    constants = {
        str(node.target): attrgetter(str(node.target))(module).to(device)
        for node in constants_of(module, graph)
    }
    return rebuild(module, graph, constants)
