"""Flat buffers, and the views of them that modules and servers use.

On the worker a module's parameters and gradients are views into flat vectors, so that a push
sends, and a pull receives, without packing. On the server each part of a vector is one tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.host import check_fits
from trireme.ps.layout import ALIGNMENT, DEFAULT_SLOTS, Layout, Part
from trireme.ps.messages import ParameterSpec
from trireme.wire.shared_memory import SharedMemory
from trireme.wire.transport import local_memory


def dtype_of(name: str) -> torch.dtype:
    """Returns the torch dtype of a layout's dtype name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor as bytes, without a copy."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    return flat.numpy().data


class PartBuffer:
    """One shard's part of every flat vector, as tensors.

    Args:
        vectors: the part of each vector, 1-D, in the layout's order; zeros if not given.
    """

    def __init__(
        self, layout: Layout, shard: int, vectors: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.layout, self._shard = layout, shard
        parts = layout.parts(shard)
        if vectors is None:
            vectors = [torch.zeros(p.length, dtype=dtype_of(p.vector.dtype)) for p in parts]
        self.vectors: tuple[torch.Tensor, ...] = tuple(vectors)
        self._by_name = {p.vector.name: (p, v) for p, v in zip(parts, self.vectors, strict=True)}
        self.segments = tuple(self._piece(segment) for segment in layout.segments(shard))

    def _piece(self, piece: Part) -> torch.Tensor:
        part, vector = self._by_name[piece.vector.name]
        return vector[piece.start - part.start : piece.stop - part.start]

    def place(self, vector: int) -> tuple[int, int]:
        """Returns a vector's position among those that are not empty, and where its part begins."""
        parts = self.layout.parts(self._shard)
        return sum(part.length > 0 for part in parts[:vector]), parts[vector].start

    def copy(self) -> PartBuffer:
        return PartBuffer(self.layout, self._shard, [v.clone() for v in self.vectors])

    def extended(self, layout: Layout) -> PartBuffer:
        """Returns the same with zeros for the parameters that a layout has besides."""
        more = layout.parts(self._shard)[len(self.vectors) :]
        zeros = [torch.zeros(p.length, dtype=dtype_of(p.vector.dtype)) for p in more]
        return PartBuffer(layout, self._shard, [*self.vectors, *zeros])

    @cached_property
    def views(self) -> tuple[memoryview, ...]:
        """The vectors' memory as bytes, empty parts left out. Only for CPU tensors."""
        return tuple(as_bytes(vector) for vector in self.vectors if vector.numel())

    @cached_property
    def nbytes(self) -> int:
        """The size of all vectors in bytes."""
        return sum(vector.numel() * vector.element_size() for vector in self.vectors)


NamedGroups: TypeAlias = Sequence[Sequence[tuple[str, nn.Parameter]]]  # of each optimizer group


def specs_of(groups: NamedGroups) -> list[ParameterSpec]:
    """Returns the descriptions of parameters, in order."""
    return [
        ParameterSpec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), index)
        for index, group in enumerate(groups)
        for name, p in group
    ]


class FlatModel:
    """A module whose trained parameters and gradients are views into flat vectors.

    The module keeps its parameters (the same `nn.Parameter` objects); their memory moves into
    `values`, and their `.grad` into `gradients`.

    Args:
        groups: named parameters of each optimizer group, in the optimizer's order.
        shared: whether servers read and write memory that can be lent to them.
        staged: whether that memory is separate from the module's, so that the module can compute
            meanwhile; it always is where the module is not on the CPU.

    A parameter that backward did not reach is *absent*: it has no gradient, as `torch.optim` sees
    it where `.grad` is None. Its place in the flat gradients is zero.

    Attributes:
        parameters: the trained parameters by name.
        layout: where each parameter lies.
        values, gradients: the flat vectors, in the layout's order.
        memory: the memory that can be lent to servers of this host; None where there is none.
        presence: one number for each parameter, for sums of the gradients of several processes: it
            lies right before the last of the flat gradients, and can be summed together with them.
            Empty where it is not needed.
    """

    def __init__(
        self,
        groups: NamedGroups,
        *,
        servers: int,
        slots: int = DEFAULT_SLOTS,
        shared: bool = False,
        staged: bool = False,
        counted: bool = False,
    ) -> None:
        self._servers, self._slots = servers, slots
        self._local_memory = local_memory() if shared else None
        self._counted = counted
        # the device of all parameters
        self.device = _one_device({name: each for group in groups for name, each in group})
        self._staged = staged or self.device.type != "cpu"
        self._left_alone: dict[nn.Parameter, torch.Tensor] = {}
        # whether sparse gradients stay as they are, for an optimizer of this process. The flat
        # gradients have them too.
        self.keeps_sparse = False
        # whether backward adds to the flat gradients where they lie. If not, backward makes tensors
        # of its own, which are copied to their places when all are there: two passes over memory
        # less than zeros and sums, but at the end of backward twice the memory of the gradients.
        self.keeps_views = True
        self._copied_out = self._staged and self.device.type == "cpu"
        self.lay_out(groups)
        for parameter, view in self._bound:
            parameter.grad = view

    def lay_out(self, groups: NamedGroups, layout: Layout | None = None) -> None:
        """Moves the values of these parameters into new flat vectors.

        Parts that were returned stay as they are. All keep their values and gradients.

        Args:
            layout: where each lies; None for one that has not grown.
        """
        by_name = {name: parameter for group in groups for name, parameter in group}
        self.parameters = by_name
        _one_device(by_name)
        known = layout or Layout.of(specs_of(groups), servers=self._servers, slots=self._slots)
        self.layout = known
        if self.device.type == "cpu":
            needed, advice = 2 * self.layout.bytes, "train a smaller model, or on a larger host"
            check_fits(needed, "the model, with its gradients,", advice)
        self.memory: SharedMemory | None = None
        last = self.layout.vectors[-1]
        step = ALIGNMENT // last.item_size
        lead = -(-len(by_name) // step) * step if self._counted else 0
        lent = self._local_memory is not None and not self._staged
        self.values, gradients = self._allocate(self.device, lead, lent=lent)
        self.presence = gradients[-1][:lead]
        self.gradients = (*gradients[:-1], gradients[-1][lead:])
        self._bound: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._places: list[torch.Tensor] = []  # of the values
        views = zip(self._views(self.values), self._views(self.gradients), strict=True)
        in_order = [parameter for vector in self.placed for parameter, _, _ in vector]
        for parameter, (value, place) in zip(in_order, views, strict=True):
            value.copy_(parameter.detach())
            parameter.data = value
            # With a version of its own, which tells who has a gradient.
            self._bound.append((parameter, place.data))
            self._places.append(value)
        self._zeroed: list[int] = []  # the views' versions when they were zeroed; of none otherwise
        self._known_writes = 0  # `_flat_writes` that have given no parameter a gradient
        self._host_views: list[torch.Tensor] = []
        # Where servers are reached from: made when the first part is asked for.
        self._host_values: tuple[torch.Tensor, ...] = self.values
        self._host_gradients: tuple[torch.Tensor, ...] = self.gradients

    def part_values(self, shard: int) -> PartBuffer:
        self._stage()
        return self._part(self._host_values, shard)

    def part_gradients(self, shard: int) -> PartBuffer:
        self._stage()
        return self._part(self._host_gradients, shard)

    @property
    def placed(self) -> list[list[tuple[nn.Parameter, int, int]]]:
        """Where each parameter lies: for each vector, parameters with their first and last + 1."""
        return [
            [(self.parameters[p.parameter.name], p.start, p.stop) for p in vector.placed]
            for vector in self.layout.vectors
        ]

    def zero_gradients(self) -> None:
        """Sets the gradients to zero in place; or drops them, where the views need not stay.

        Until backward reaches it, a parameter has no gradient.
        """
        if self._copied_out or not self.keeps_views:
            self._zeroed = []
            for parameter, _ in self._bound:
                parameter.grad = None
            return
        for gradient in self.gradients:
            gradient.zero_()
        for parameter, view in self._bound:
            if parameter.grad is not view:
                parameter.grad = view
        self._zeroed = [view._version for _, view in self._bound]
        self._known_writes = self._flat_writes

    def restore_gradients(self, absent: Collection[int] = ()) -> None:
        """Makes every gradient a view of the flat gradients, which callers have written, but some.

        Args:
            absent: the positions of the parameters that have no gradient.
        """
        self._zeroed = []
        for position, (parameter, view) in enumerate(self._bound):
            parameter.grad = None if position in absent else view

    @property
    def absent(self) -> tuple[int, ...]:
        """The positions, in the vectors' order, of the parameters that have no gradient.

        Those whose `.grad` is None; and where the views stay, those whose place nobody has written
        to since all were zeroed.
        """
        if self._zeroed and self._flat_writes == self._known_writes:
            return tuple(
                [
                    position
                    for position, ((parameter, view), version) in enumerate(
                        zip(self._bound, self._zeroed, strict=True)
                    )
                    if (gradient := parameter.grad) is None
                    or (gradient is view and view._version == version)
                ]
            )
        return tuple([i for i, (parameter, _) in enumerate(self._bound) if parameter.grad is None])

    @property
    def _flat_writes(self) -> int:
        """How often the vectors as a whole were written to; writes to single gradients left out."""
        return sum([gradient._version for gradient in self.gradients])

    def collect_gradients(self) -> None:
        """Copies the gradients of backward to the memory that servers read."""
        if self._copied_out:
            self._stage()
            self._copy_gradients(self._host_views)
            return
        self.gather_gradients()
        if self._host_gradients is not self.gradients:
            for host, gradient in zip(self._host_gradients, self.gradients, strict=True):
                host.copy_(gradient, non_blocking=True)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()

    def gather_gradients(self) -> None:
        """Copies the gradients of backward into the flat gradients.

        A gradient that is not the view (it was dropped before backward, which made a new one) is
        copied, and the view put back. An absent gradient is zero there, and its `.grad` None.
        """
        absent = self.absent
        self._copy_gradients([view for _, view in self._bound])
        for position in absent:
            self._bound[position][0].grad = None

    def _copy_gradients(self, places: Sequence[torch.Tensor]) -> None:
        """Copies each gradient to its place, where it is not there; a view is put back."""
        sources: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        for (parameter, view), place in zip(self._bound, places, strict=True):
            gradient = parameter.grad
            if gradient is place:
                continue
            if gradient is None:
                place.zero_()
                continue
            if gradient.layout is not torch.strided:
                if not self.keeps_sparse:
                    raise ConfigurationError(self._sparse(parameter))
                place.copy_(gradient.to_dense())
                continue
            sources.append(gradient)
            targets.append(place)
            if place is view:
                parameter.grad = view
        if targets:
            torch._foreach_copy_(targets, sources)

    def _sparse(self, parameter: nn.Parameter) -> str:
        name = next(name for name, each in self.parameters.items() if each is parameter)
        return (
            f"the gradient of {name!r} is sparse, as of nn.Embedding(sparse=True), and processes "
            "that train together exchange whole gradients: use sparse=False, with an optimizer for "
            "whole gradients (not SparseAdam); or, with parameter servers, trireme.Embedding, "
            "whose rows the servers keep, and of which only those of a batch are sent"
        )

    def divide(self, bounds: tuple[int, ...]) -> None:
        """Divides the vectors into other shards; parts from before stay as they are."""
        self.layout = self.layout.divided(bounds)

    def publish_values(self) -> None:
        """Completes the receipt of values: copies those that were received beside the module."""
        if self._host_values is not self.values:
            for host, value in zip(self._host_values, self.values, strict=True):
                value.copy_(host, non_blocking=True)
        self.values_received()

    def values_received(self) -> None:
        """Counts the receipt of values as a write to each parameter, as autograd counts writes.

        Values arrive through views of memory, which autograd does not see. A graph that was built
        on the values before is then refused by backward, as after a step of any optimizer. Those
        of `left_alone` count only where another value has come.
        """
        written = [
            parameter
            for parameter, _ in self._bound
            if (before := self._left_alone.get(parameter)) is None
            or not torch.equal(parameter.detach(), before)
        ]
        torch.autograd.graph.increment_version(written)

    @contextmanager
    def left_alone(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Keeps, for the block, the values of parameters that its update is not of."""
        self._left_alone = {each: each.detach().clone() for each in parameters}
        try:
            yield
        finally:
            self._left_alone = {}

    @torch.no_grad()
    def take_back_values(self) -> None:
        """Takes over values that the program has put in the place of its own, by `p.data = ...`."""
        for (parameter, _), place in zip(self._bound, self._places, strict=True):
            if parameter.data_ptr() != place.data_ptr():
                place.copy_(parameter)
                parameter.data = place

    def collect_values(self) -> None:
        """Copies the module's values to the host, before the chief's first load."""
        if self._host_values is not self.values:
            for host, value in zip(self._host_values, self.values, strict=True):
                host.copy_(value)

    def gradient_norm(self) -> torch.Tensor:
        """Returns the L2 norm of all gradients, a 0-dim tensor: float64 where one of them is."""
        self.gather_gradients()
        wide = any(gradient.dtype == torch.float64 for gradient in self.gradients)
        dtype = torch.float64 if wide else torch.float32
        norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in self.gradients]
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return norm

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        self.gather_gradients()
        for gradient in self.gradients:
            gradient.mul_(factor)
        for parameter, _ in self._bound:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                parameter.grad.mul_(float(factor))
        self._known_writes = self._flat_writes

    def _stage(self) -> None:
        """Allocates the memory on the host of a staged model, when it is first used."""
        if not self._staged or self._host_values is not self.values:
            return
        pinned, host = self.device.type == "cuda", torch.device("cpu")
        self._host_values, self._host_gradients = self._allocate(
            host, lent=self._local_memory is not None, pinned=pinned
        )
        if self._copied_out:
            self._host_views = list(self._views(self._host_gradients))

    def _views(self, vectors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for vector, flat in zip(self.layout.vectors, vectors, strict=True):
            for placed in vector.placed:
                yield flat[placed.start : placed.stop].view(placed.parameter.shape)

    def _allocate(
        self, device: torch.device, lead: int = 0, *, lent: bool, pinned: bool = False
    ) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """Returns values and gradients, zero, in new memory.

        Args:
            lead: how many more elements the last of the gradients begins with.
            pinned: whether a CUDA device is to copy to and from it directly.
        """
        vectors = self.layout.vectors * 2
        sizes = [(vector.length, dtype_of(vector.dtype)) for vector in vectors]
        sizes[-1] = sizes[-1][0] + lead, sizes[-1][1]
        made: list[torch.Tensor] = []
        if lent and self._local_memory is not None:
            total = sum(length * dtype.itemsize for length, dtype in sizes)
            self.memory = self._local_memory.create(max(total, 1))
            offset = 0
            for length, dtype in sizes:
                piece = self.memory.view[offset : offset + length * dtype.itemsize]
                made.append(torch.frombuffer(piece, dtype=dtype))
                offset += piece.nbytes
            if pinned:
                pin(self.memory)
        else:
            for length, dtype in sizes:
                made.append(torch.zeros(length, dtype=dtype, device=device, pin_memory=pinned))
        return tuple(made[: len(made) // 2]), tuple(made[len(made) // 2 :])

    def _part(self, vectors: Sequence[torch.Tensor], shard: int) -> PartBuffer:
        parts = zip(self.layout.parts(shard), vectors, strict=True)
        return PartBuffer(self.layout, shard, [v[part.start : part.stop] for part, v in parts])


def _one_device(parameters: dict[str, nn.Parameter]) -> torch.device:
    devices = {parameter.device for parameter in parameters.values()}
    if not devices:
        raise ConfigurationError(
            "there is nothing to train: the optimizer was given no parameter of the model"
        )
    if len(devices) > 1:
        names = ", ".join(sorted(str(device) for device in devices))
        raise ConfigurationError(
            f"the model's parameters are on several devices ({names}): put a worker's model on "
            "one; spreading one over devices is not built yet"
        )
    return devices.pop()


def pin(memory: SharedMemory) -> None:
    """Lets a CUDA device copy to and from memory directly."""
    address = torch.frombuffer(memory.view, dtype=torch.uint8).data_ptr()
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    failed = runtime.cudaHostRegister(address, memory.nbytes, 0)
    if int(failed) != 0:
        raise RuntimeError(f"cudaHostRegister of {memory.nbytes} bytes failed with {failed}")
    memory.moves = False  # the device knows its pages
