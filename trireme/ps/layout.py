"""Where each parameter lies: parameters -> flat vectors -> slots -> shards.

Parameters lie one after the other in one flat vector per dtype, grouped by parameter group, each
aligned to 64 bytes. A vector is divided into slots at multiples of 64 bytes; a shard is a run of
contiguous slots, which is one contiguous *part* of each vector. Parameters that are added while
training goes on lie in vectors of their own, behind the others. Everything here is numbers:
no tensor is made or touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from msgspec.structs import replace

from trireme.errors import ConfigurationError, ModelMismatchError
from trireme.ps.messages import LayoutSpec, ParameterSpec

ALIGNMENT = 64  # bytes of a cache line, and of the widest vector: no kernel meets an odd start

DEFAULT_SLOTS = 256  # far more than the servers of any job

ITEM_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}  # bytes of an element

MOST_BYTES = 1 << 48  # of a model: more than any machine has, and few enough to count with

Range = tuple[int, int, int]  # elements of a vector: (which of the layout's vectors, start, stop)


@dataclass(frozen=True, slots=True)
class Placed:
    """One parameter and the elements [start, stop) of its vector that it takes."""

    parameter: ParameterSpec
    position: int  # among all parameters, in the vectors' order
    start: int
    stop: int
    end: int  # where the padding behind it ends

    def within(self, start: int, stop: int) -> tuple[int, int] | None:
        """Returns its elements, and the padding behind it, in a range; None for none."""
        low, high = max(self.start, start), min(self.end, stop)
        return (low, high) if low < high else None


@dataclass(frozen=True, slots=True)
class Vector:
    """One flat vector: all parameters of one dtype that came together."""

    dtype: str  # the dtype's name
    length: int  # its elements, padding included
    placed: tuple[Placed, ...]  # its parameters in order
    # (parameter group, start, stop), in order; together they cover the vector
    groups: tuple[tuple[int, int, int], ...]
    addition: int = 0  # of its parameters

    @property
    def name(self) -> str:
        return f"{self.dtype}.{self.addition}" if self.addition else self.dtype

    @property
    def item_size(self) -> int:
        return ITEM_SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Part:
    """The elements [start, stop) of a vector in one shard."""

    vector: Vector
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def bytes(self) -> int:
        return self.length * self.vector.item_size


@dataclass(frozen=True, slots=True)
class Segment(Part):
    """A part of one parameter group, which one call of the optimizer updates."""

    group: int


class Layout:
    """The layout of a model: where each parameter lies.

    Args:
        spec: the parameters, and the slots at which shards begin.
    """

    def __init__(self, spec: LayoutSpec) -> None:
        steps = zip(spec.bounds, spec.bounds[1:], strict=False)
        if len(spec.bounds) < 2 or spec.bounds[0] or not all(a < b for a, b in steps):
            raise ConfigurationError(
                f"a layout of shards that begin at the slots {', '.join(map(str, spec.bounds))}: "
                "there must be at least one shard, from slot 0 on, and at least one slot for each"
            )
        self.spec = spec
        self.vectors = tuple(_vectors(spec.parameters))
        if self.bytes > MOST_BYTES:
            raise ConfigurationError(
                f"the model has {self.bytes} bytes of parameters, and at most {MOST_BYTES} can be "
                "laid out"
            )
        self._parts = [self._parts_of(self.slots_of(shard)) for shard in range(spec.shards)]

    @classmethod
    def of(
        cls, parameters: Iterable[ParameterSpec], *, servers: int, slots: int = DEFAULT_SLOTS
    ) -> Layout:
        """Returns the layout of parameters that are given in the module's order.

        Each of `servers` servers has one shard, and the shards are equal but for a slot.
        """
        return cls(LayoutSpec(_ordered(parameters), equal_bounds(max(slots, servers), servers)))

    def divided(self, bounds: tuple[int, ...]) -> Layout:
        """Returns the layout of the same parameters with other shards.

        Args:
            bounds: the slots at which shards begin, and the number of slots.
        """
        if bounds == self.spec.bounds:
            return self
        return Layout(LayoutSpec(self.spec.parameters, bounds))

    def grown(self, parameters: Iterable[ParameterSpec]) -> Layout:
        """Returns the layout with those of these parameters added that it does not have."""
        mine = self.spec.parameters
        names, addition = {each.name for each in mine}, mine[-1].addition + 1
        added = [replace(each, addition=addition) for each in parameters if each.name not in names]
        if not added:
            return self
        return Layout(LayoutSpec((*mine, *_ordered(added)), self.spec.bounds))

    def known_to(self, other: Layout) -> Layout:
        """Returns the layout before the first addition of which another model lacks a parameter."""
        mine, names = self.spec.parameters, {each.name for each in other.spec.parameters}
        lacks = min((each.addition for each in mine if each.name not in names), default=0)
        if not lacks:
            return self
        known = tuple(each for each in mine if each.addition < lacks)
        return Layout(LayoutSpec(known, self.spec.bounds))

    @cached_property
    def bytes(self) -> int:
        """Bytes of all vectors: what one full push or pull carries."""
        return sum(vector.length * vector.item_size for vector in self.vectors)

    @cached_property
    def elements(self) -> int:
        """How many numbers the parameters hold, padding not counted."""
        return sum(math.prod(parameter.shape) for parameter in self.spec.parameters)

    def slots_of(self, shard: int) -> range:
        return range(self.spec.bounds[shard], self.spec.bounds[shard + 1])

    def parts(self, shard: int) -> tuple[Part, ...]:
        """Returns the shard's part of each vector, in the vectors' order; a part may be empty."""
        return self._parts[shard]

    def segments(self, shard: int) -> tuple[Segment, ...]:
        """Returns the shard's segments: its parts, divided where a parameter group ends."""
        return tuple(
            Segment(part.vector, max(start, part.start), min(stop, part.stop), group)
            for part in self.parts(shard)
            for group, start, stop in part.vector.groups
            if max(start, part.start) < min(stop, part.stop)
        )

    def ranges(self, positions: Iterable[int], shard: int) -> tuple[Range, ...]:
        """Returns the elements of parameters in a shard's part, with the padding behind each."""
        wanted = frozenset(positions)
        return tuple(
            (number, *found)
            for number, part in enumerate(self.parts(shard))
            for placed in part.vector.placed
            if placed.position in wanted and (found := placed.within(part.start, part.stop))
        )

    def check_same(self, other: Layout, *, whose: str, others: str) -> None:
        pairs = zip_longest(self.spec.parameters, other.spec.parameters)
        for position, (mine, theirs) in enumerate(pairs):
            if mine != theirs:
                raise ModelMismatchError(
                    f"the models differ: parameter {position} is {_describe(mine)} at {whose} and "
                    f"{_describe(theirs)} at {others}; every worker must build the same model"
                )
        if self.spec != other.spec:
            raise ModelMismatchError(
                f"the layouts differ: {self.spec.slots} slots in {self.spec.shards} shards at "
                f"{whose}, {other.spec.slots} in {other.spec.shards} at {others}; start every "
                "task with the same cluster"
            )

    def _parts_of(self, slots: range) -> tuple[Part, ...]:
        parts: list[Part] = []
        for vector in self.vectors:
            step = ALIGNMENT // vector.item_size
            lines = vector.length // step
            start, stop = (lines * at // self.spec.slots * step for at in (slots.start, slots.stop))
            parts.append(Part(vector, start, stop))
        return tuple(parts)


def equal_bounds(slots: int, shards: int) -> tuple[int, ...]:
    """Returns the bounds of shards that are equal but for a slot."""
    if shards < 1:
        raise ConfigurationError(f"a layout over {shards} servers: there must be at least one")
    return tuple(shard * slots // shards for shard in range(shards + 1))


def _vectors(parameters: tuple[ParameterSpec, ...]) -> Iterator[Vector]:
    for key in dict.fromkeys((each.dtype, each.addition) for each in parameters):
        dtype, addition = key
        own = [(i, p) for i, p in enumerate(parameters) if (p.dtype, p.addition) == key]
        if dtype not in ITEM_SIZES:
            pairs = "; keep a complex one as pairs of real numbers, torch.view_as_real(value)"
            raise ConfigurationError(
                f"parameter {own[0][1].name!r} has dtype {dtype}, which no strategy trains, nor "
                f"one process under Trireme: it must be one of {', '.join(ITEM_SIZES)}"
                f"{pairs if dtype.startswith('complex') else ''}"
            )
        yield _vector(dtype, own, addition)


def _ordered(parameters: Iterable[ParameterSpec]) -> tuple[ParameterSpec, ...]:
    return tuple(sorted(parameters, key=lambda parameter: (parameter.dtype, parameter.group)))


def _vector(dtype: str, parameters: list[tuple[int, ParameterSpec]], addition: int) -> Vector:
    step = ALIGNMENT // ITEM_SIZES[dtype]
    placed: list[Placed] = []
    groups: list[tuple[int, int, int]] = []
    end = 0
    for position, parameter in parameters:
        start, size = end, math.prod(parameter.shape)
        end = start + -(-size // step) * step
        placed.append(Placed(parameter, position, start, start + size, end))
        begun = groups.pop()[1] if groups and groups[-1][0] == parameter.group else start
        groups.append((parameter.group, begun, end))
    return Vector(dtype, end, tuple(placed), tuple(groups), addition)


def _describe(parameter: ParameterSpec | None) -> str:
    if parameter is None:
        return "missing"
    shape = "x".join(str(size) for size in parameter.shape) or "scalar"
    return f"{parameter.name!r} ({shape} {parameter.dtype}, group {parameter.group})"
