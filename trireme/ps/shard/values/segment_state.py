"""The state of an optimizer over flat segments: divides it, and joins it again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from trireme.ps.flat import dtype_of
from trireme.ps.layout import Segment
from trireme.ps.shard.values.snapshot_tensors import Tensors

__all__ = ["divided", "state_within"]


def divided(value: Any, low: int, high: int) -> Any:
    """Returns a piece's share of a state: its elements, or a copy of a scalar."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.dim() == 0 else value[low:high]


def state_within(
    segment: Segment, state: Tensors
) -> list[tuple[int, int, dict[str, torch.Tensor]]]:
    """Returns one segment's state, put together from ranges of its flat vector.

    Returns:
        (start, stop, state by name): in order, as few as can be, which cover the segment. Elements
        are together that have the same kinds of state and the same counters.
    """
    relevant = [
        (spec, value, spec.key.removeprefix("state/"), value.item() if spec.group >= 0 else None)
        for spec, value in state
        if spec.vector == segment.vector.dtype
        and spec.group in (-1, segment.group)
        and spec.start < segment.stop
        and segment.start < spec.stop
    ]
    edges = {segment.start, segment.stop}
    for spec, *_ in relevant:
        edges |= {max(spec.start, segment.start), min(spec.stop, segment.stop)}
    runs: list[tuple[int, int, dict[str, Any]]] = []
    for low, high in pairwise(sorted(edges)):
        has = {n: number for s, _, n, number in relevant if s.start <= low and high <= s.stop}
        if runs and runs[-1][2] == has:
            runs[-1] = runs[-1][0], high, has
        else:
            runs.append((low, high, has))
    found: list[tuple[int, int, dict[str, torch.Tensor]]] = []
    for low, high, has in runs:
        tensors: dict[str, torch.Tensor] = {}
        for spec, value, name, number in relevant:
            start, stop = max(spec.start, low), min(spec.stop, high)
            if start >= stop or name not in has:
                continue
            if number is not None:
                tensors[name] = value.reshape(()).clone()
                continue
            if name not in tensors:
                tensors[name] = torch.zeros(high - low, dtype=dtype_of(spec.dtype))
            tensors[name][start - low : stop - low] = value[start - spec.start : stop - spec.start]
        found.append((low, high, tensors))
    return found
