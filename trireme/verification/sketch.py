"""Sketches of tensors: few numbers, by which the distance of two tensors is estimated.

A sketch has the products of the tensor with fixed vectors of random signs. The square of each is,
in expectation, the squared norm of the tensor (Alon, Matias, Szegedy: The Space Complexity of
Approximating the Frequency Moments, STOC 1996, section 2.2). Sketches add up as the tensors do: the
sketch of a mean of gradients is the mean of their sketches.
"""

from __future__ import annotations

import math
import operator
from functools import cache

import msgspec
import torch

_MARKS = 16
_COLUMNS = 4096
_ROWS = 256  # that are in memory as float64 at a time
FLOAT32 = 2.0**-23
"""The precision of float32."""
_PLACES = 65_521  # by which the places of elements are told apart; a prime


class Sketch(msgspec.Struct, frozen=True, array_like=True):
    """What stands for a tensor, or for a number."""

    marks: tuple[float, ...]  # the products of its finite elements with vectors of random signs
    count: int  # of elements
    # the norm of one unit in the last place of every element; 0 of dtypes that are narrower than
    # float32, whose rounding is no measure
    last: float = 0.0
    broken: float = 0.0  # tells which elements are NaN or infinite; 0 where none are

    @property
    def norm(self) -> float:
        """The L2 norm of the tensor's finite elements, estimated."""
        return math.hypot(*self.marks) / math.sqrt(len(self.marks))

    @property
    def size(self) -> float:
        """The number that it stands for, or the norm of the tensor."""
        if len(self.marks) > 1:
            return self.norm
        return math.nan if self.broken else self.marks[0]


def number(value: float) -> Sketch:
    """Returns the sketch of one number, which is exact; all that are not finite are alike."""
    return Sketch((value,), 1) if math.isfinite(value) else Sketch((0.0,), 1, broken=1.0)


def sketch(tensor: torch.Tensor) -> Sketch:
    """Returns the sketch of a tensor of any shape, dtype and device."""
    flat, size = as_real(tensor).reshape(-1), _ROWS * _COLUMNS
    marks, broken = torch.zeros(_MARKS, dtype=torch.float64), 0.0
    for block, part in enumerate(torch.split(flat, size)):
        part = part.to("cpu", torch.float64)
        places = (~part.isfinite()).nonzero().squeeze(1)
        kinds = part[places].nan_to_num(nan=1.0, posinf=2.0, neginf=3.0)
        broken += float((kinds * (1 + (size * block + places) % _PLACES)).sum())
        part = part.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        whole = torch.nn.functional.pad(part, (0, -len(part) % _COLUMNS)).view(-1, _COLUMNS)
        rows = _signs(1 + block, _ROWS)[: len(whole)]
        marks += ((whole @ _signs(0, _COLUMNS)) * rows).sum(0)
    found = Sketch(tuple(marks.tolist()), flat.numel(), 0.0, broken)
    eps = precision(flat.dtype)
    return found if eps > FLOAT32 else msgspec.structs.replace(found, last=eps * found.norm)


def precision(dtype: torch.dtype) -> float:
    """Returns the distance from 1 to the next number of a dtype; 0 of integers."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the numbers of a tensor: of complex ones both parts."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def combined(*parts: tuple[float, Sketch]) -> Sketch:
    """Returns the sketch of the sum of tensors, each times a factor."""
    first = parts[0][1]
    factors = [factor for factor, _ in parts]
    columns = zip(*(each.marks for _, each in parts), strict=True)
    marks = tuple(sum(map(operator.mul, factors, column)) for column in columns)
    broken = next((each.broken for _, each in parts if each.broken), 0.0)
    return Sketch(marks, first.count, first.last, broken)


def distance(one: Sketch, other: Sketch) -> float:
    """Returns the L2 norm of the difference of two tensors, estimated.

    It is infinite where their shapes differ, or other elements are NaN or infinite.
    """
    if (one.count, one.broken) != (other.count, other.broken):
        return math.inf
    return combined((1.0, one), (-1.0, other)).norm


@cache
def _signs(seed: int, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(2, (rows, _MARKS), generator=generator)
    return drawn.to(torch.float64) * 2 - 1
