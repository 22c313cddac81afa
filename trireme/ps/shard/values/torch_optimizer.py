"""One optimizer of `torch.optim` over flat segments, instead of over the model's tensors.

A segment is updated in one piece as long as all of its parameters have had the same updates. Where
an update has no gradient for some of them, torch would leave these alone, with step counters of
their own: then the segment is cut there, into pieces that keep their state apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch

from trireme.errors import ConfigurationError, Rejected, UnsupportedOptimizerError
from trireme.ps.flat import PartBuffer, dtype_of
from trireme.ps.layout import Layout, Range, Segment
from trireme.ps.messages import GroupSpec, OptimizerSpec
from trireme.ps.optimizers import OPTIMIZERS, WIDE, is_sensible
from trireme.ps.shard.values.fused_kernels import DIRECT, FusedKernel
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.snapshot_messages import TensorSpec

_LEAST_EPS = 1e-12
"""An `eps` of at least this hides what is lost where denormal numbers count as zero: the square
root of the smallest normal float32 is 1.1e-19, and 1e-12 plus that is 1e-12."""

_SWITCHES = ("momentum", "decoupled_weight_decay")
"""Hyper-parameters whose change requires another kernel. A change of `momentum` also makes torch
begin or cease to use its buffers."""

_MOST_CALLS = 64  # bindings of kernels that are kept, one for each set of absent parameters


@dataclass(slots=True, eq=False)
class _Piece:
    """Elements that are updated together, with state of their own."""

    place: int  # the position of its segment in the part
    segment: Segment  # that segment
    # its elements of the vector
    start: int
    stop: int
    values: torch.Tensor  # their values

    def gradient(self, gradients: PartBuffer) -> torch.Tensor:
        """Returns its gradient."""
        whole = gradients.segments[self.place]
        if self.stop - self.start == whole.numel():
            return whole
        return whole[self.start - self.segment.start : self.stop - self.segment.start]


@dataclass(slots=True, frozen=True, eq=False)
class _Call:
    """A kernel, bound to some pieces of one parameter group."""

    kernel: FusedKernel  # updates the pieces' values
    places: list[int]  # the positions of the pieces' segments
    pieces: list[_Piece]  # the pieces; none where they are whole segments


class TorchOptimizer:
    """One optimizer of `torch.optim`, over the segments of its parameter groups.

    Args:
        spec: all groups; those of other optimizers are ignored.
    """

    def __init__(
        self, name: str, spec: OptimizerSpec, layout: Layout, server: int, values: PartBuffer
    ) -> None:
        entry = OPTIMIZERS.find(name)
        if entry is None:
            raise UnsupportedOptimizerError(
                f"this parameter server has no optimizer {name!r}: it has {', '.join(OPTIMIZERS)}, "
                "and those of packages that are installed beside it"
            )
        self._name = name
        self._entry = entry
        # By the whole model's dtypes: the number of servers must not change how one computes.
        self._fused = bool(entry.fused) and {v.dtype for v in layout.vectors} <= entry.fused
        self._wide = {v.dtype for v in layout.vectors} <= set(WIDE)
        self._vectors = layout.vectors
        self._divisor = torch.tensor(1.0)  # the last one
        self._calls: dict[tuple[Range, ...], list[_Call]] = {}
        groups = {index: spec.groups[index] for index, n in enumerate(spec.names) if n == name}
        # the pieces that it updates; none where this server holds nothing of its groups
        self.pieces = [
            _Piece(place, segment, segment.start, segment.stop, values.segments[place])
            for place, segment in enumerate(layout.segments(server))
            if segment.group in groups
        ]
        self._segments = [(piece.place, piece.segment, piece.values) for piece in self.pieces]
        self._optimizer = self._build(groups)

    def _build(self, groups: Mapping[int, GroupSpec]) -> torch.optim.Optimizer | None:
        made: list[dict[str, Any]] = []
        self._groups: list[int] = []
        for index, group in groups.items():
            unknown = sorted(set(group.values) - self._entry.hyper)
            if unknown:
                raise ConfigurationError(
                    f"{self._name} has no hyper-parameter {unknown[0]!r}: it has "
                    f"{', '.join(sorted(self._entry.hyper))}"
                )
            for key, value in group.values.items():
                if not is_sensible(key, value):
                    raise ConfigurationError(f"{self._name}'s {key} is {value!r}")
            tensors = self._tensors(index)
            if tensors:
                made.append({"params": tensors, **group.values})
                self._groups.append(index)
        if not made:
            return None  # this server holds nothing: a model smaller than its servers
        make: Callable[..., torch.optim.Optimizer] = self._entry.make
        # Adagrad takes the accumulator's first value from its own arguments, not from a group's.
        defaults = dict(next(iter(groups.values())).values)
        options = {"fused": True} if self._fused else self._entry.options
        try:
            return make(made, **defaults, **options)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ConfigurationError(f"{self._name}: {error}") from error

    def _tensors(self, group: int) -> list[torch.Tensor]:
        return [piece.values for piece in self.pieces if piece.segment.group == group]

    @property
    def may_flush(self) -> bool:
        """Whether denormal numbers may count as zero: not if the optimizer may divide by them."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        tolerant = all(group.get("eps", 1.0) >= _LEAST_EPS for group in groups)
        return tolerant and self._entry.flushes

    # -- a step ----------------------------------------------------------------------------------

    def step(self, gradients: PartBuffer, divisor: float, gone: tuple[Range, ...]) -> None:
        """Updates all pieces except those in the ranges `gone`."""
        calls = self._calls.get(gone)
        scale = None
        if divisor != 1.0:
            scale = None if calls is None else self._scale(divisor)
            if scale is None:
                for place, *_ in self._segments:
                    gradients.segments[place].div_(divisor)
        if calls is None:
            self._step_at_length(gradients, gone)
            return
        at = gradients.segments.__getitem__
        for call in calls:
            if call.pieces:
                parts = [piece.gradient(gradients) for piece in call.pieces]
            else:
                parts = list(map(at, call.places))
            call.kernel.update(parts, scale)

    def _step_at_length(self, gradients: PartBuffer, gone: tuple[Range, ...]) -> None:
        """Steps as torch does, which makes the state."""
        assert self._optimizer is not None
        if gone:
            self._cut(gone)
        present = [
            piece
            for piece in self.pieces
            if not any(
                start <= piece.start and piece.stop <= stop
                for start, stop in self._of_vector(piece, gone)
            )
        ]
        # Torch's fused SGD takes either no piece for new, or all of them.
        fresh = [piece for piece in present if not self._state_of(piece)]
        begun = [piece for piece in present if self._state_of(piece)]
        for chosen in filter(None, (fresh, begun)):
            for piece in self.pieces:
                piece.values.grad = None
            for piece in chosen:
                piece.values.grad = piece.gradient(gradients)
            self._optimizer.step()
        self._bind(gone, present)

    def _scale(self, divisor: float) -> torch.Tensor | None:
        """Returns a divisor for the kernels, which take a float32; None where that is not precise.

        For narrow dtypes the kernels round the quotient later than `div_` does.
        """
        if self._divisor.item() != divisor:
            self._divisor = torch.tensor(divisor, dtype=torch.float32)
        return self._divisor if self._wide and self._divisor.item() == divisor else None

    def _bind(self, gone: tuple[Range, ...], present: Sequence[_Piece]) -> None:
        """Binds kernels that update these pieces directly from now on, where there are any."""
        assert self._optimizer is not None
        if self._name not in DIRECT or not self._fused:
            return
        if len(self._calls) >= _MOST_CALLS:
            self._calls.clear()
        calls = self._calls[gone] = []
        for index, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            pieces = [piece for piece in present if piece.segment.group == index]
            if pieces:
                states = [self._state_of(piece) for piece in pieces]
                values = [piece.values for piece in pieces]
                kernel = FusedKernel(self._name, group, values, states)
                whole = all(
                    (piece.start, piece.stop) == (piece.segment.start, piece.segment.stop)
                    for piece in pieces
                )
                places = [piece.place for piece in pieces]
                calls.append(_Call(kernel, places, [] if whole else pieces))

    # -- pieces ----------------------------------------------------------------------------------

    def _of_vector(self, piece: _Piece, ranges: Iterable[Range]) -> list[tuple[int, int]]:
        """Returns those of some ranges that are of a piece's vector."""
        vector = piece.segment.vector
        return [(start, stop) for at, start, stop in ranges if self._vectors[at] is vector]

    def _cut(self, ranges: tuple[Range, ...]) -> None:
        """Cuts pieces where ranges begin and end."""
        cut: list[_Piece] = []
        for piece in self.pieces:
            edges = {edge for pair in self._of_vector(piece, ranges) for edge in pair}
            within = sorted(edge for edge in edges if piece.start < edge < piece.stop)
            cut += self._divide(piece, within) if within else [piece]
        if len(cut) != len(self.pieces):
            self._replace(cut)

    def _divide(self, piece: _Piece, edges: Sequence[int]) -> list[_Piece]:
        """Divides a piece and its state at some elements."""
        assert self._optimizer is not None
        had = self._optimizer.state.pop(piece.values, {})
        pieces: list[_Piece] = []
        for start, stop in pairwise([piece.start, *edges, piece.stop]):
            low, high = start - piece.start, stop - piece.start
            values = piece.values[low:high]
            pieces.append(_Piece(piece.place, piece.segment, start, stop, values))
            if had:
                self._optimizer.state[values] = {
                    name: _divided(value, low, high) for name, value in had.items()
                }
        return pieces

    def _replace(self, pieces: list[_Piece]) -> None:
        """Replaces the pieces by others, which cover the same elements."""
        assert self._optimizer is not None
        self.pieces = pieces
        for index, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            group["params"] = self._tensors(index)
        self._calls.clear()

    # -- hyper-parameters and state --------------------------------------------------------------

    def set_hyper(self, groups: Sequence[GroupSpec]) -> None:
        """Takes new hyper-parameters of its groups."""
        assert self._optimizer is not None
        for index, target in zip(self._groups, self._optimizer.param_groups, strict=True):
            if index >= len(groups) or not set(groups[index].values) <= self._entry.hyper:
                raise ConfigurationError(
                    f"the pushed hyper-parameters do not fit group {index} of {self._name}"
                )
            had = [bool(target.get(name)) for name in _SWITCHES]
            target.update(groups[index].values)
            if had != [bool(target.get(name)) for name in _SWITCHES]:
                self._calls.clear()
        for call in chain.from_iterable(self._calls.values()):
            call.kernel.refresh()

    def export(self) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Returns the state of its pieces."""
        return [
            (
                TensorSpec(
                    key=f"state/{name}",
                    dtype=str(value.dtype).removeprefix("torch."),
                    vector=piece.segment.vector.dtype,
                    start=piece.start,
                    stop=piece.stop,
                    group=piece.segment.group if value.dim() == 0 else -1,
                ),
                value,
            )
            for piece in self.pieces
            for name, value in self._state_of(piece).items()
        ]

    def restore(self, state: Tensors) -> None:
        """Replaces the state of its pieces."""
        assert self._optimizer is not None
        restored: list[tuple[_Piece, dict[str, torch.Tensor]]] = []
        for place, segment, values in self._segments:
            for start, stop, found in _state_within(segment, state):
                own = values[start - segment.start : stop - segment.start]
                restored.append((_Piece(place, segment, start, stop, own), found))
        hyper = dict(zip(self._groups, self._optimizer.param_groups, strict=True))
        for piece, found in restored:
            missing = sorted(self._entry.needs(hyper[piece.segment.group]) - found.keys())
            if found and missing:
                raise Rejected(
                    f"the optimizer's state to load has no {missing[0]!r}, which {self._name} "
                    "keeps: it is another optimizer's"
                )
        self._optimizer.state.clear()
        for piece, found in restored:
            if found:
                self._optimizer.state[piece.values] = found
        self._replace([piece for piece, _ in restored])

    def _state_of(self, piece: _Piece) -> Mapping[str, torch.Tensor]:
        if self._optimizer is None or piece.values not in self._optimizer.state:
            return {}
        state: Mapping[str, Any] = self._optimizer.state[piece.values]
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _divided(value: Any, low: int, high: int) -> Any:
    """Returns a piece's share of a state: its elements, or a copy of a scalar."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.dim() == 0 else value[low:high]


def _state_within(
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
