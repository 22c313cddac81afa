"""Tries a differentiable function on random inputs: how long it takes, and what autograd keeps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Input:
    """An input of a function."""

    # a tensor of the `meta` device, whose shape, strides and dtype the input gets; anything else is
    # the input itself
    value: Any
    trained: bool = False  # whether the input needs a gradient
    resident: bool = False  # whether it is a parameter or a buffer, which is there anyway


@dataclass(frozen=True)
class Trial:
    """What trying a function has shown. Outputs are the tensors that it returns, by their order."""

    forward_seconds: float  # how long it computes
    backward_seconds: float  # how long its backward computation takes, without starting autograd
    trained: tuple[bool, ...]  # whether each output has a gradient
    shares: tuple[int | None, ...]  # the input whose memory each output shares
    kept_inputs: frozenset[int] = frozenset()  # that autograd keeps, without resident ones
    kept_outputs: frozenset[int] = frozenset()
    kept_bytes: int = 0  # what it keeps besides


class Trials:
    """Tries functions, on the CPU. The tensors of one function exist at a time.

    With one thread it measures the processor's time of that thread, which other processes do not
    lengthen, else the time that passes.

    In a step other operators compute between two runs of one, so that parameters and what autograd
    keeps are not in a core's cache any more, whereas an operator has just computed the inputs.
    So it is here: before each run other memory is read, and after that the inputs.
    """

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self._other = torch.zeros(_OTHER_BYTES // 4)

    def _cool(self, recent: Sequence[Any]) -> None:
        """Makes the caches forget everything but what has been computed just before."""
        self._other.sum()
        for each in recent:
            if isinstance(each, torch.Tensor) and 0 < each.nbytes <= _OTHER_BYTES // 4:
                each.detach().clone()

    def run(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Input],
        *,
        seconds: float,
        mutable: bool = False,
        read: frozenset[int] | None = None,
    ) -> Trial:
        """Tries a function, at least once, and again while so many seconds are not over.

        It may change inputs in place where it is `mutable`; gradients come back to the outputs that
        are `read`, None for all. It may refuse random inputs of these shapes by a RuntimeError.
        """
        began = time.perf_counter()
        leaves = [_made(each) for each in inputs]
        given = _copies(leaves) if mutable else leaves
        keeping = _Kept(given, inputs)
        with torch.autograd.graph.saved_tensors_hooks(keeping.pack, lambda tensor: tensor):
            forward, results = timed(lambda: function(*given))
        outputs = _tensors(results)
        trained = tuple(each.requires_grad for each in outputs)
        shares = tuple(keeping.shared(each) for each in outputs)
        kept_inputs, kept_outputs, kept_bytes = keeping.found(outputs)
        gradients = {
            place: torch.rand_like(each)
            for place, each in enumerate(outputs)
            if each.requires_grad and (read is None or place in read)
        }
        wanted = [each for each in leaves if isinstance(each, torch.Tensor) and each.requires_grad]

        def backward(outputs: list[torch.Tensor]) -> float:
            if not gradients:
                return 0.0
            roots, incoming = [outputs[place] for place in gradients], list(gradients.values())
            self._cool(incoming)
            took, _ = timed(lambda: torch.autograd.grad(roots, wanted, incoming, allow_unused=True))
            return max(took - self._start_seconds, 0.0)

        first = forward, backward(outputs)
        del outputs, results, keeping, given
        samples = list[tuple[float, float]]()
        last = time.perf_counter() - began
        while len(samples) < self.repeats and time.perf_counter() - began + last < seconds:
            at = time.perf_counter()
            given = _copies(leaves) if mutable else leaves
            self._cool([each for each, of in zip(given, inputs, strict=True) if not of.resident])
            forward, results = timed(lambda: function(*given))  # noqa: B023
            samples.append((forward, backward(_tensors(results))))
            last = time.perf_counter() - at
        forwards, backwards = zip(*(samples or [first]), strict=True)
        medians = statistics.median(forwards), statistics.median(backwards)
        return Trial(*medians, trained, shares, kept_inputs, kept_outputs, kept_bytes)

    @cached_property
    def call_seconds(self) -> float:
        """What calling a module, and starting autograd, take: the mean, as there are as many."""
        module, leaf = torch.nn.Identity(), torch.zeros(1)
        took = statistics.median(timed(lambda: module(leaf))[0] for _ in range(_OVERHEADS))
        return (took + self._start_seconds) / 2

    @cached_property
    def _start_seconds(self) -> float:
        short, long = 1, 9
        one, many = _backward_seconds(short), _backward_seconds(long)
        return max(one - (many - one) / (long - short) * short, 0.0)


_OTHER_BYTES = 3 << 22
"""How much other memory is read: more than a core's own caches hold, and part of its share of those
that cores have together."""

_OVERHEADS = 20
"""How often overheads are measured; the medians count."""


def _backward_seconds(length: int) -> float:
    """Returns how long a backward computation through that many cheap operators takes."""
    leaf = torch.zeros(1, requires_grad=True)
    gradient, took = torch.ones(1), []
    for _ in range(_OVERHEADS):
        value: torch.Tensor = leaf
        for _ in range(length):
            value = value.view(1)
        took.append(timed(lambda: torch.autograd.grad([value], [leaf], [gradient]))[0])  # noqa: B023
    return statistics.median(took)


class _Kept:
    """What autograd keeps, by storages."""

    def __init__(self, leaves: Sequence[Any], inputs: Sequence[Input]) -> None:
        self._inputs = {
            _storage(leaf): place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        }
        self._resident = {place for place, each in enumerate(inputs) if each.resident}
        # The tensors themselves are held, so that no other storage gets the place of a freed one.
        self._tensors: dict[int, torch.Tensor] = {}

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._tensors.setdefault(_storage(tensor), tensor.detach())
        return tensor

    def shared(self, output: torch.Tensor) -> int | None:
        return self._inputs.get(_storage(output))

    def found(self, outputs: Sequence[torch.Tensor]) -> tuple[frozenset[int], frozenset[int], int]:
        kept_inputs, kept_outputs, size = set[int](), set[int](), 0
        made = {_storage(output): place for place, output in enumerate(outputs)}
        for storage, tensor in self._tensors.items():
            if storage in self._inputs:
                kept_inputs.add(self._inputs[storage])
            elif storage in made:
                kept_outputs.add(made[storage])
            else:
                size += tensor.untyped_storage().nbytes()
        return frozenset(kept_inputs - self._resident), frozenset(kept_outputs), size


def _made(each: Input) -> Any:
    like = each.value
    if not isinstance(like, torch.Tensor):
        return like
    extent = 1 + sum(
        (size - 1) * step for size, step in zip(like.shape, like.stride(), strict=True)
    )
    extent = extent if like.numel() else 0
    if like.dtype.is_complex or (like.dtype.is_floating_point and like.dtype.itemsize > 1):
        # Positive, as logarithms and roots want it.
        memory = torch.rand(extent, dtype=like.dtype).add_(0.1)
    else:
        memory = torch.zeros(extent, dtype=like.dtype)
    return memory.as_strided(like.shape, like.stride()).requires_grad_(each.trained)


def _copies(leaves: Sequence[Any]) -> list[Any]:
    return [each.clone() if isinstance(each, torch.Tensor) else each for each in leaves]


def _storage(tensor: torch.Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Returns how long a function takes, by the clock that `Trials` uses, and its result."""
    clock = _clock()
    began = clock()
    result = function()
    return clock() - began, result


def _clock() -> Callable[[], float]:
    # With one thread, time in which other processes have the processor does not count.
    return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
