"""The operations with which a constructor makes and fills its tensors, recorded to be repeated.

A tape knows memory, not tensors: each operation lists the storages that it reads, writes and makes,
and each tensor argument is a view of one of them. So views, `.data`, `nn.Parameter(...)` and other
ways to make a tensor of a storage need no entry of their own.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_leaves, tree_map_only

LARGE = 1 << 20
"""The size in bytes from which the memory of temporary tensors is given back at once."""


@dataclass(frozen=True)
class View:
    """A strided view of a storage of the tape."""

    storage: int  # the storage's number
    # dtype, size, stride, offset: of the tensor; stride and offset count elements
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Returns the tensor in a given storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)

    @property
    def nbytes(self) -> int:
        """The size of its elements."""
        return math.prod(self.size) * self.dtype.itemsize

    def scratch(self) -> torch.Tensor:
        """Returns a new tensor of this layout with undefined values, on the CPU."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


@dataclass(frozen=True)
class Operation:
    """One call of an operator, or of a function that is repeated as a whole."""

    call: Callable[..., Any]  # the operator
    args: tuple[Any, ...]  # args, kwargs: its arguments, with a `View` in place of each tensor
    kwargs: dict[str, Any]
    writes: frozenset[int]  # the numbers of the storages that it changes
    outputs: list[View | None]  # of each tensor that it returns; None for other results
    made: frozenset[int]  # the numbers of the storages that it makes
    generator: torch.Generator | None = None  # from which it draws random numbers
    state: torch.Tensor | None = None  # the state of the generator before the call

    @property
    def views(self) -> list[View]:
        """The views among its arguments."""
        return [leaf for leaf in tree_iter((self.args, self.kwargs)) if isinstance(leaf, View)]

    @property
    def used(self) -> frozenset[int]:
        """The numbers of the storages of its arguments."""
        return frozenset(view.storage for view in self.views)

    def run(self, tensor: Callable[[View], torch.Tensor]) -> list[Any]:
        """Calls the operator with tensors in place of the views; returns its results in a row."""
        args, kwargs = tree_map_only(View, tensor, (self.args, self.kwargs))
        return tree_leaves(self.call(*args, **kwargs), is_leaf=lambda leaf: leaf is None)


class Tape:
    """The recorded operations, in order, and the storages that they use."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.constants: dict[int, torch.UntypedStorage] = {}  # real ones, by number
        self._numbers: dict[int, int] = {}  # by the address of the storage
        self._kept: list[torch.UntypedStorage] = []  # or another one could get the same address

    def __len__(self) -> int:
        """Returns the number of storages that the tape knows."""
        return len(self._kept)

    def number(self, tensor: torch.Tensor) -> int | None:
        """Returns the number of a tensor's storage; None if the tape does not know it."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def add_storage(self, tensor: torch.Tensor) -> int:
        """Returns the number of a tensor's storage, a new one if need be."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._kept)
            self._kept.append(storage)
        return self._numbers[storage._cdata]

    def view(self, tensor: torch.Tensor) -> View:
        """Returns the view that a meta tensor is; adds its storage if need be."""
        return View(
            self.add_storage(tensor),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a meta tensor that stands for a real one, which the tape keeps."""
        real = tensor.untyped_storage()
        if real._cdata not in self._numbers:
            meta = torch.empty(real.nbytes(), dtype=torch.uint8, device="meta")
            number = self.add_storage(meta)
            self.constants[number] = real
            self._numbers[real._cdata] = number
        storage = self._kept[self._numbers[real._cdata]]
        size, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return View(0, tensor.dtype, size, stride, offset).of(storage)

    def needed(self, storages: Collection[int]) -> list[bool]:
        """Returns, for each operation, whether the given storages depend on it."""
        wanted, needed = set(storages), [False] * len(self.operations)
        for number in range(len(self.operations) - 1, -1, -1):
            operation = self.operations[number]
            if not wanted.isdisjoint(operation.writes | operation.made):
                needed[number] = True
                wanted |= operation.used
        return needed

    def values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the present values of meta tensors, on the CPU."""
        views = [self.view(tensor) for tensor in tensors]
        found = self.replay({view.storage for view in views}, torch.device("cpu"))
        return [view.of(found[view.storage]) for view in views]

    @torch.no_grad()
    def replay(
        self, storages: Collection[int], device: torch.device
    ) -> dict[int, torch.UntypedStorage]:
        """Repeats the construction of some storages; leaves the generators as they are."""
        real: dict[int, torch.UntypedStorage] = {}
        needed = self.needed(storages)
        last = self._last_uses(needed)

        def storage(number: int) -> torch.UntypedStorage:
            if number not in real:  # a copy: the constant itself must stay as it is
                real[number] = self.constants[number].clone()  # type: ignore[no-untyped-call]
            return real[number]

        for number, operation in enumerate(self.operations):
            if not needed[number]:
                continue
            with _in_state(operation):
                results = operation.run(lambda view: view.of(storage(view.storage)))
            self._take(operation, results, real)
            del results
            if any(view.nbytes >= LARGE for view in operation.views):
                return_free_memory()
            for done in last.get(number, ()):
                if done not in storages:
                    real.pop(done, None)
                else:
                    real[done] = _moved(storage(done), device)
        return {number: _moved(storage(number), device) for number in storages}

    def _last_uses(self, needed: list[bool]) -> dict[int, list[int]]:
        """Returns, by operation, the storages that no later needed operation uses."""
        last: dict[int, int] = {}
        for number, operation in enumerate(self.operations):
            if needed[number]:
                last.update(dict.fromkeys(operation.used | operation.made, number))
        ends: dict[int, list[int]] = {}
        for storage, number in last.items():
            ends.setdefault(number, []).append(storage)
        return ends

    def _take(
        self, operation: Operation, results: list[Any], real: dict[int, torch.UntypedStorage]
    ) -> None:
        """Puts the storages that an operation has made among the real ones."""
        made = set(operation.made)
        for result, view in zip(results, operation.outputs, strict=True):
            if view is None or view.storage not in made:
                continue
            made.discard(view.storage)
            if result.stride() != view.stride or result.storage_offset() != view.offset:
                # Kernels of the meta device may lay out their results differently.
                size = self._kept[view.storage].nbytes()
                bare = torch.empty(size, dtype=torch.uint8).untyped_storage()
                result = view.of(bare).copy_(result)
            real[view.storage] = result.untyped_storage()


def written(
    call: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[torch.Tensor]:
    """Yields the tensors that a call of an operator changes."""
    for position, argument in enumerate(call._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_iter(value) if isinstance(leaf, torch.Tensor))


@contextmanager
def _in_state(operation: Operation) -> Iterator[None]:
    """Gives the generator the state that it had when the operation was recorded."""
    generator, state = operation.generator, operation.state
    if generator is None or state is None:
        yield
        return
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


def _moved(storage: torch.UntypedStorage, device: torch.device) -> torch.UntypedStorage:
    if storage.device == device:
        return storage
    return torch.empty(0, dtype=torch.uint8).set_(storage).to(device).untyped_storage()


def return_free_memory() -> None:
    """Returns freed memory to the operating system, where the C library is glibc.

    glibc keeps freed blocks of up to 32 MiB in its heap, where tensors of different sizes that come
    and go leave holes. Elsewhere this does nothing.
    """
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
