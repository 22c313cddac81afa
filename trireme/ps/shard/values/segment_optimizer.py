"""`torch.optim` over the flat segments of one shard, instead of over the model's tensors.

Element-wise arithmetic does not see the difference. A segment is updated in one piece as long as
all of its parameters have had the same updates. Where an update has no gradient for some of them,
torch would leave these alone, with step counters of their own: then the segment is divided into its
parameters, which keep their state apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trireme.errors import ConfigurationError, Rejected, UnsupportedOptimizerError
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout, Segment
from trireme.ps.messages import GroupSpec, OptimizerSpec
from trireme.ps.optimizers import OPTIMIZERS, WIDE, mismatch
from trireme.ps.shard.values.direct_steps import Bound, DirectSteps, direct_steps
from trireme.ps.shard.values.piece import Piece
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.snapshot_messages import TensorSpec

_LEAST_EPS = 1e-12
"""An `eps` of at least this hides what is lost where denormal numbers count as zero: the square
root of the smallest normal float32 is 1.1e-19, and 1e-12 plus that is 1e-12."""


def load_optimizers() -> None:
    """Imports what torch imports when the first optimizer of a process is made.

    It takes seconds, and ten times as many on a busy machine. A server that did it when the first
    worker shows its model would answer nobody meanwhile, and be given up.
    """
    torch.optim.SGD([torch.zeros(1)], lr=0.0)


class SegmentOptimizer:
    """The optimizers of one shard's part: each updates the segments of its parameter groups."""

    def __init__(self, spec: OptimizerSpec, layout: Layout, shard: int, values: PartBuffer) -> None:
        names = dict.fromkeys(spec.names or (spec.name,))
        if unknown := [name for name in names if OPTIMIZERS.find(name) is None]:
            raise UnsupportedOptimizerError(
                f"this parameter server has no optimizer {unknown[0]!r}: it has "
                f"{', '.join(OPTIMIZERS)}, and those of packages that are installed beside it"
            )
        if reason := mismatch(spec, spec.groups):
            raise ConfigurationError(reason)
        pieces = [
            Piece(place, segment, segment.start, segment.stop, values.segments[place], positions)
            for place, segment in enumerate(layout.segments(shard))
            for positions in [_positions(segment)]
        ]
        beyond = [p.segment.group for p in pieces if p.segment.group >= len(spec.groups)]
        if beyond:
            raise ConfigurationError(
                f"a parameter is of group {beyond[0]}, and the optimizer has {len(spec.groups)}"
            )
        self._optimizers: list[_TorchOptimizer] = []
        for name in names:
            own = [piece for piece in pieces if spec.names[piece.segment.group] == name]
            if own:  # a model may be smaller than its shards
                self._optimizers.append(_TorchOptimizer(name, spec, layout, own))
        self._flushes = self._may_flush()

    def step(
        self, gradients: PartBuffer, divisor: float = 1.0, absent: tuple[int, ...] = ()
    ) -> None:
        """Updates the values in place by gradients, divided by `divisor`.

        Where a gradient has become zero, moments decay into denormal numbers, for which kernels
        take nearly twice as long on many processors. They count as zero here, which moves no value
        by more than 1e-30.

        Args:
            absent: the positions of the parameters that have no gradient and are left out: neither
                their values nor their state change.
        """
        torch.set_flush_denormal(self._flushes)
        try:
            for optimizer in self._optimizers:
                optimizer.step(gradients, divisor, absent)
        finally:
            torch.set_flush_denormal(False)

    def set_hyper(self, groups: Sequence[GroupSpec]) -> None:
        for optimizer in self._optimizers:
            optimizer.set_hyper(groups)
        self._flushes = self._may_flush()

    def export(self) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Returns the state: live tensors, to be copied by whoever keeps them.

        Tensors of a piece's length are ranges of a flat vector. Anything of one element (a step
        counter) is a scalar of its group, for the same range.
        """
        return [entry for optimizer in self._optimizers for entry in optimizer.export()]

    def restore(self, state: Tensors) -> None:
        """Replaces the state by ranges of flat vectors, however they are divided."""
        for optimizer in self._optimizers:
            optimizer.restore(state)

    def _may_flush(self) -> bool:
        """Returns whether denormal numbers may count as zero: not if one may be a divisor."""
        return all(optimizer.may_flush for optimizer in self._optimizers)


class _TorchOptimizer:
    """One optimizer of `torch.optim`, over pieces of its parameter groups."""

    def __init__(self, name: str, spec: OptimizerSpec, layout: Layout, pieces: list[Piece]) -> None:
        self._name = name
        self._entry = OPTIMIZERS.load(name)
        # By the whole model's dtypes: the number of servers must not change how one computes.
        dtypes = {vector.dtype for vector in layout.vectors}
        self._fused = bool(self._entry.fused) and dtypes <= self._entry.fused
        wide = dtypes <= set(WIDE)
        self._direct = direct_steps(name, wide=wide) if self._fused else DirectSteps()
        self._whole = pieces
        self.pieces = pieces
        self._groups = sorted({piece.segment.group for piece in pieces})
        made = [{"params": self._tensors(i), **spec.groups[i].values} for i in self._groups]
        make: Callable[..., torch.optim.Optimizer] = self._entry.make
        # Adagrad takes the accumulator's first value from its own arguments, not from a group's.
        defaults = spec.groups[spec.names.index(name)].values
        options = {"fused": True} if self._fused else self._entry.options
        try:
            self._optimizer = make(made, **{**defaults, **options})
        except (ValueError, TypeError, RuntimeError) as error:
            raise ConfigurationError(f"{name}: {error}") from error

    def _tensors(self, group: int) -> list[torch.Tensor]:
        return [piece.values for piece in self.pieces if piece.segment.group == group]

    @property
    def may_flush(self) -> bool:
        """Whether denormal numbers may count as zero: not if the optimizer may divide by them."""
        groups = self._optimizer.param_groups
        tolerant = all(group.get("eps", 1.0) >= _LEAST_EPS for group in groups)
        return tolerant and self._entry.flushes

    # -- a step ----------------------------------------------------------------------------------

    def step(self, gradients: PartBuffer, divisor: float, absent: tuple[int, ...]) -> None:
        if self._direct.step(gradients, divisor, absent):
            return
        if divisor != 1.0:
            for piece in self._whole:
                gradients.segments[piece.place].div_(divisor)
        self._step_at_length(gradients, absent)
        self._direct.bind(absent, self._bound(absent))

    def _step_at_length(self, gradients: PartBuffer, absent: tuple[int, ...]) -> None:
        """Steps as torch does, which makes the state."""
        gone = frozenset(absent)
        if any(p.positions & gone and p.positions - gone for p in self.pieces):
            self._divide(gone)
        present = [piece for piece in self.pieces if not piece.positions & gone]
        # Torch's fused SGD takes either no piece for new, or all of them.
        fresh = [piece for piece in present if not self._state_of(piece)]
        begun = [piece for piece in present if self._state_of(piece)]
        for chosen in filter(None, (fresh, begun)):
            for piece in self.pieces:
                piece.values.grad = None
            for piece in chosen:
                piece.values.grad = piece.gradient(gradients)
            self._optimizer.step()

    def _bound(self, absent: tuple[int, ...]) -> list[Bound]:
        """Returns the pieces that a step without gradients of some parameters updates."""
        gone, found = frozenset(absent), list[Bound]()
        for index, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            own = (piece for piece in self.pieces if piece.segment.group == index)
            if pieces := [piece for piece in own if not piece.positions & gone]:
                found.append((group, pieces, [self._state_of(piece) for piece in pieces]))
        return found

    # -- pieces ----------------------------------------------------------------------------------

    def _divide(self, gone: frozenset[int]) -> None:
        """Divides pieces of which some parameters are gone, with their state, into parameters."""
        pieces: list[Piece] = []
        for piece in self.pieces:
            if not piece.positions & gone:
                pieces.append(piece)
                continue
            had = self._optimizer.state.pop(piece.values, {})
            for each in piece.parameters():
                pieces.append(each)
                if had:
                    low, high = each.start - piece.start, each.stop - piece.start
                    self._optimizer.state[each.values] = {
                        name: _divided(value, low, high) for name, value in had.items()
                    }
        self._replace(pieces)

    def _replace(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        for index, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            group["params"] = self._tensors(index)
        self._direct.clear()

    # -- hyper-parameters and state --------------------------------------------------------------

    def set_hyper(self, groups: Sequence[GroupSpec]) -> None:
        for index, target in zip(self._groups, self._optimizer.param_groups, strict=True):
            target.update(groups[index].values)
        self._direct.refresh()

    def export(self) -> list[tuple[TensorSpec, torch.Tensor]]:
        return [
            (
                TensorSpec(
                    key=f"state/{name}",
                    dtype=str(value.dtype).removeprefix("torch."),
                    vector=piece.segment.vector.name,
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
        """Replaces the state of its pieces.

        A segment is one piece again where all of its parameters have the same kinds of state and
        the same counters.
        """
        hyper = dict(zip(self._groups, self._optimizer.param_groups, strict=True))
        restored: list[tuple[Piece, dict[str, torch.Tensor]]] = []
        for segment in self._whole:
            own = segment.of(state)
            parts = [*segment.parameters()]
            alike = all(_kinds(part.of(own)) == _kinds(parts[0].of(own)) for part in parts[1:])
            restored += ((piece, piece.joined(own)) for piece in ([segment] if alike else parts))
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

    def _state_of(self, piece: Piece) -> Mapping[str, torch.Tensor]:
        state: Mapping[str, Any] = self._optimizer.state.get(piece.values, {})
        return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _positions(segment: Segment) -> frozenset[int]:
    found = (p for p in segment.vector.placed if p.within(segment.start, segment.stop))
    return frozenset(placed.position for placed in found)


def _kinds(state: Tensors) -> dict[str, float | None]:
    """Returns the kinds of a state, with the numbers of those that are counters."""
    return {spec.key: value.item() if spec.group >= 0 else None for spec, value in state}


def _divided(value: Any, low: int, high: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone() if value.dim() == 0 else value[low:high]
