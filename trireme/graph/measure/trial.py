"""Times a differentiable function with random inputs, forward and backward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trireme.graph.capture.exporting import tensors

_OTHER_BYTES = 3 << 22
"""How much other memory is read: more than a core's own caches hold, and part of its share of those
that cores have together."""

_OVERHEADS = 20  # how often overheads are measured; the medians count


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

    def run(
        self,
        function: Callable[[Sequence[Any]], Any],
        like: Sequence[Any],
        *,
        seconds: float,
        resident: Collection[int] = (),
        mutable: bool = False,
        read: Collection[int] | None = None,
    ) -> tuple[float, float]:
        """Returns how long a function takes, forward and backward without starting autograd.

        It is tried at least once, and again while so many seconds are not over. Tensors that it
        takes are random ones `like` the given ones; those that are `resident` are parameters. It
        may change them in place where it is `mutable`. Gradients come back to the outputs that are
        `read`, None for all. It may refuse random inputs by a RuntimeError.
        """
        began = last = time.perf_counter()
        leaves = [_random(each) if isinstance(each, torch.Tensor) else each for each in like]
        wanted = [each for each in tensors(leaves) if each.requires_grad]
        samples = list[tuple[float, float]]()
        while len(samples) <= self.repeats:
            given = tree_map_only(torch.Tensor, torch.clone, leaves) if mutable else leaves
            self._cool([each for place, each in enumerate(given) if place not in resident])
            forward, results = timed(lambda: function(given))  # noqa: B023
            outputs = [
                each
                for place, each in enumerate(tensors(results))
                if each.requires_grad and (read is None or place in read)
            ]
            samples.append((forward, self._backward(outputs, wanted) if wanted else 0.0))
            now = time.perf_counter()
            if now + (now - last) > began + seconds:
                break
            last = now
        forwards, backwards = zip(*(samples[1:] or samples), strict=True)
        return statistics.median(forwards), statistics.median(backwards)

    def _backward(self, outputs: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
        if not outputs:
            return 0.0
        incoming = [torch.rand_like(each) for each in outputs]
        self._cool(incoming)
        took, _ = timed(lambda: torch.autograd.grad(outputs, wanted, incoming, allow_unused=True))
        return max(took - self._start_seconds, 0.0)

    def _cool(self, recent: Sequence[Any]) -> None:
        self._other.sum()
        for each in tensors(recent):
            if 0 < each.nbytes <= _OTHER_BYTES // 4:
                each.detach().clone()

    @cached_property
    def call_seconds(self) -> float:
        """What calling a module, and starting autograd, take: the mean, as there are as many."""
        module, leaf = torch.nn.Identity(), torch.zeros(1)
        took = statistics.median(timed(lambda: module(leaf))[0] for _ in range(_OVERHEADS))
        return (took + self._start_seconds) / 2

    @cached_property
    def _start_seconds(self) -> float:
        leaf, gradient, took = torch.zeros(1, requires_grad=True), torch.ones(1), []
        for _ in range(_OVERHEADS):
            value = leaf.view(1)
            took.append(timed(lambda: torch.autograd.grad([value], [leaf], [gradient]))[0])  # noqa: B023
        return statistics.median(took)


def _random(like: torch.Tensor) -> torch.Tensor:
    sizes = zip(like.shape, like.stride(), strict=True)
    extent = 1 + sum((size - 1) * step for size, step in sizes) if like.numel() else 0
    if like.dtype.is_complex or (like.dtype.is_floating_point and like.dtype.itemsize > 1):
        # Positive, as logarithms and roots want it.
        memory = torch.rand(extent, dtype=like.dtype).add_(0.1)
    else:
        memory = torch.zeros(extent, dtype=like.dtype)
    return memory.as_strided(like.shape, like.stride()).requires_grad_(like.requires_grad)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Returns how long a function takes, by the clock that `Trials` uses, and its result."""
    # With one thread, time in which other processes have the processor does not count.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    result = function()
    return clock() - began, result
