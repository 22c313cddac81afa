"""Sketches of tensors: few numbers, by which the distance of two tensors is estimated.

A sketch has the products of the tensor with fixed vectors of random signs. The square of each is,
in expectation, the squared norm of the tensor (Alon, Matias, Szegedy: The Space Complexity of
Approximating the Frequency Moments, STOC 1996, section 2.2). Sketches add up as the tensors do: the
sketch of a mean of gradients is the mean of their sketches.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TypeAlias

import msgspec
import torch

_MARKS = 16
_COLUMNS = 4096
_ROWS = 256  # that are in memory as float64 at a time


class Sketch(msgspec.Struct, frozen=True, array_like=True):
    """What stands for a tensor."""

    marks: tuple[float, ...]  # its products with vectors of random signs
    count: int = 0  # of elements
    dtype: str = ""

    @property
    def norm(self) -> float:
        """The L2 norm of the tensor, estimated."""
        return _root_mean_square(self.marks)

    @property
    def eps(self) -> float:
        """The distance of 1 from the next number of the tensor's dtype; 0 of integers."""
        dtype = getattr(torch, self.dtype, torch.float32)
        return float(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


Sketches: TypeAlias = dict[str, Sketch]
"""Sketches of tensors by name."""


def sketch(tensor: torch.Tensor) -> Sketch:
    """Returns the sketch of a tensor of any shape, real dtype and device."""
    flat = tensor.detach().reshape(-1)
    marks = torch.zeros(_MARKS, dtype=torch.float64)
    columns = _signs(0, _COLUMNS)
    size = _ROWS * _COLUMNS
    for number, first in enumerate(range(0, flat.numel(), size)):
        part = flat[first : first + size].to("cpu", torch.float64)
        whole = torch.nn.functional.pad(part, (0, -len(part) % _COLUMNS)).view(-1, _COLUMNS)
        rows = _signs(1 + number, _ROWS)[: len(whole)]
        marks += ((whole @ columns) * rows).sum(0)
    return Sketch(tuple(marks.tolist()), flat.numel(), str(tensor.dtype).removeprefix("torch."))


def distance(one: Sketch, other: Sketch) -> float:
    """Returns the L2 norm of the difference of two tensors, estimated; infinite for NaN."""
    if one.count != other.count:
        return math.inf
    found = _root_mean_square(a - b for a, b in zip(one.marks, other.marks, strict=True))
    return math.inf if math.isnan(found) else found


def means(parts: Iterable[tuple[float, Mapping[str, Sketch]]]) -> Sketches:
    """Returns the weighted means of tensors by name; one that is missing counts as zeros."""
    several = [(weight, each) for weight, each in parts if weight]
    total = sum(weight for weight, _ in several)
    found: Sketches = {}
    for name in dict.fromkeys(name for _, each in several for name in each):
        having = [(weight / total, each[name]) for weight, each in several if name in each]
        columns = zip(*(one.marks for _, one in having), strict=True)
        shares = [share for share, _ in having]
        marks = tuple(sum(map(operator.mul, shares, column)) for column in columns)
        found[name] = Sketch(marks, having[0][1].count, having[0][1].dtype)
    return found


def plus(one: Sketch, other: Sketch) -> Sketch:
    """Returns the sketch of the sum of two tensors."""
    marks = tuple(a + b for a, b in zip(one.marks, other.marks, strict=True))
    return Sketch(marks, one.count, one.dtype)


def minus(one: Sketch, other: Sketch) -> Sketch:
    """Returns the sketch of the difference of two tensors."""
    marks = tuple(a - b for a, b in zip(one.marks, other.marks, strict=True))
    return Sketch(marks, one.count, one.dtype)


def signs(count: int) -> torch.Tensor:
    """Returns so many fixed random signs, as float64."""
    return _signs(0, -(-count // _MARKS)).reshape(-1)[:count]


def _root_mean_square(values: Iterable[float]) -> float:
    squares = [value * value for value in values]
    return math.sqrt(sum(squares) / len(squares))


@cache
def _signs(seed: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(2, (rows, _MARKS), generator=generator)
    return drawn.to(torch.float64) * 2 - 1
