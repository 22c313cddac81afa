"""Server-side optimizers: built from a registry name and numbers, never from code.

An optimizer here is `torch.optim`'s own, over the flat segments of one server instead of over the
model's tensors: element-wise arithmetic does not see the difference. Fused kernels are used where
torch has them for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trireme.errors import ConfigurationError, Rejected, UnsupportedOptimizerError
from trireme.ps.dense import PartBuffer, dtype_of
from trireme.ps.kernels import DIRECT, Kernel
from trireme.ps.layout import ITEM_SIZES, Layout, Segment
from trireme.ps.messages import GroupSpec, OptimizerSpec, TensorSpec

__all__ = [
    "OPTIMIZERS",
    "PartOptimizer",
    "SegmentOptimizer",
    "check_optimizer",
    "groups_of",
    "misfit",
    "spec_of",
]

_Direct = tuple[Kernel, dict[str, Any], list[int]]
"""A group's kernel, its hyper-parameters, and which segments it is of."""

Hyper = float | int | bool | None | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One optimizer of the registry.

    Attributes:
        make: torch's class.
        hyper: the hyper-parameters that a group may set.
        keeps: the state without which it cannot go on, by torch's names.
        keeps_if: the same for state that it keeps only where a hyper-parameter asks for it.
        fused: the dtypes for which torch has a fused CPU kernel that can be trusted.
    """

    make: type[torch.optim.Optimizer]
    hyper: frozenset[str]
    keeps: frozenset[str]
    keeps_if: Mapping[str, str]
    fused: frozenset[str]

    def needs(self, hyper: Mapping[str, Any]) -> frozenset[str]:
        """Returns the state without which a group of these hyper-parameters cannot go on."""
        return self.keeps | {state for name, state in self.keeps_if.items() if hyper.get(name)}


def _entry(
    make: type[torch.optim.Optimizer],
    hyper: str,
    keeps: str = "",
    keeps_if: Mapping[str, str] | None = None,
    fused: Iterable[str] = (),
) -> _Entry:
    names = frozenset(hyper.split()), frozenset(keeps.split())
    return _Entry(make, *names, keeps_if or {}, frozenset(fused))


_LEAST_EPS = 1e-12
"""An `eps` of at least this hides what is lost where denormal numbers count as zero: the square
root of the smallest normal float32 is 1.1e-19, and 1e-12 plus that is 1e-12."""

_WIDE = ("float32", "float64")
_AMSGRAD = {"amsgrad": "max_exp_avg_sq"}

OPTIMIZERS: Mapping[str, _Entry] = {
    "SGD": _entry(
        # Of narrow types torch 2.13's kernel changes only what is left over of its vectors.
        torch.optim.SGD,
        "lr momentum dampening weight_decay nesterov maximize",
        fused=_WIDE,
    ),
    "Adam": _entry(
        torch.optim.Adam,
        "lr betas eps weight_decay amsgrad maximize decoupled_weight_decay",
        "step exp_avg exp_avg_sq",
        _AMSGRAD,
        ITEM_SIZES,
    ),
    "AdamW": _entry(
        torch.optim.AdamW,
        "lr betas eps weight_decay amsgrad maximize",
        "step exp_avg exp_avg_sq",
        _AMSGRAD,
        ITEM_SIZES,
    ),
    "Adagrad": _entry(
        torch.optim.Adagrad,
        "lr lr_decay weight_decay initial_accumulator_value eps maximize",
        "step sum",
        fused=ITEM_SIZES,
    ),
    "RMSprop": _entry(
        torch.optim.RMSprop,
        "lr alpha eps weight_decay momentum centered maximize",
        "step square_avg",
        {"momentum": "momentum_buffer", "centered": "grad_avg"},
    ),
    "Adadelta": _entry(
        torch.optim.Adadelta, "lr rho eps weight_decay maximize", "step square_avg acc_delta"
    ),
}
"""Every optimizer that a parameter server can run, by the name of its class in `torch.optim`."""


def groups_of(optimizer: torch.optim.Optimizer, name: str) -> tuple[GroupSpec, ...]:
    """Returns an optimizer's present hyper-parameters, group by group."""
    allowed = OPTIMIZERS[name].hyper
    return tuple(
        GroupSpec({key: _plain(value) for key, value in group.items() if key in allowed})
        for group in optimizer.param_groups
    )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Checks that an optimizer makes a step from gradients alone.

    Raises:
        UnsupportedOptimizerError: it computes the loss itself, several times.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedOptimizerError(
            "LBFGS computes the loss several times a step, and a step of a job computes it once, "
            "with servers and without: use an optimizer whose step needs no closure"
        )


def spec_of(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Returns an optimizer as a registry name and numbers.

    Raises:
        UnsupportedOptimizerError: the registry has no optimizer of exactly this class.
    """
    check_optimizer(optimizer)
    name = type(optimizer).__name__
    entry = OPTIMIZERS.get(name)
    if entry is None or entry.make is not type(optimizer):
        module = type(optimizer).__module__
        raise UnsupportedOptimizerError(
            f"the parameter server has no optimizer {module}.{name}: it has torch.optim's "
            f"{', '.join(OPTIMIZERS)}. Use one of them, or train without servers"
        )
    return OptimizerSpec(name, groups_of(optimizer, name))


def misfit(spec: OptimizerSpec, groups: Sequence[GroupSpec]) -> str | None:
    """Returns why hyper-parameters are not those of an optimizer; None when they are."""
    if len(groups) != len(spec.groups):
        return f"there are {len(spec.groups)} parameter groups, and values for {len(groups)} came"
    entry = OPTIMIZERS.get(spec.name)
    if entry is None:
        return f"there is no optimizer {spec.name!r} on a server"
    for group, first in zip(groups, spec.groups, strict=True):
        unknown = sorted(set(group.values) - entry.hyper)
        if unknown:
            return f"{spec.name} has no hyper-parameter {unknown[0]!r}"
        if entry.needs({**first.values, **group.values}) != entry.needs(first.values):
            switched = " or ".join(entry.keeps_if)
            return f"{spec.name} keeps state from its first step on: {switched} cannot be switched"
    return None


class PartOptimizer(Protocol):
    """What a shard asks of an optimizer over one server's part."""

    def step(self, gradients: PartBuffer, divisor: float = 1.0) -> None:
        """Updates the values in place by gradients, divided by `divisor`.

        Where that is not 1 the gradients themselves may be divided.
        """

    def set_hyper(self, groups: Sequence[GroupSpec]) -> None:
        """Takes new hyper-parameters, group by group."""

    def export(self) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Returns the state: live tensors, to be copied by whoever keeps them."""

    def restore(self, state: Sequence[tuple[TensorSpec, torch.Tensor]]) -> None:
        """Replaces the state."""


class SegmentOptimizer:
    """A `torch.optim` optimizer over the segments of one server's part.

    Args:
        spec: which optimizer, with which hyper-parameters.
        layout: what lies where.
        server: whose part.
        values: the values that are updated in place.

    Raises:
        UnsupportedOptimizerError: the registry has no such optimizer.
        ConfigurationError: a hyper-parameter is unknown or out of its range.
    """

    def __init__(
        self, spec: OptimizerSpec, layout: Layout, server: int, values: PartBuffer
    ) -> None:
        entry = OPTIMIZERS.get(spec.name)
        if entry is None:
            raise UnsupportedOptimizerError(
                f"this parameter server has no optimizer {spec.name!r}: it has "
                f"{', '.join(OPTIMIZERS)}"
            )
        self._entry = entry
        # By the whole model's dtypes: the number of servers must not change how one computes.
        self._fused = bool(entry.fused) and {v.dtype for v in layout.vectors} <= entry.fused
        self._wide = {v.dtype for v in layout.vectors} <= set(_WIDE)
        self._divisor = torch.tensor(1.0)  # the last one
        self._segments = layout.segments(server)
        self._tensors = values.segments
        self._direct: list[_Direct] | None = None
        self._optimizer = self._build(spec)
        self._flushes = self._may_flush()

    def _build(self, spec: OptimizerSpec) -> torch.optim.Optimizer | None:
        groups: list[dict[str, Any]] = []
        self._groups: list[int] = []
        for index, group in enumerate(spec.groups):
            unknown = sorted(set(group.values) - self._entry.hyper)
            if unknown:
                raise ConfigurationError(
                    f"{spec.name} has no hyper-parameter {unknown[0]!r}: it has "
                    f"{', '.join(sorted(self._entry.hyper))}"
                )
            tensors = [
                tensor
                for segment, tensor in zip(self._segments, self._tensors, strict=True)
                if segment.group == index
            ]
            if tensors:
                groups.append({"params": tensors, **group.values})
                self._groups.append(index)
        if not groups:
            return None  # this server holds nothing: a model smaller than its servers
        make: Callable[..., torch.optim.Optimizer] = self._entry.make
        # Adagrad takes the accumulator's first value from its own arguments, not from a group's.
        defaults = dict(spec.groups[0].values)
        options = {"fused": True} if self._fused else {"foreach": False}
        try:
            return make(groups, **defaults, **options)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ConfigurationError(f"{spec.name}: {error}") from error

    def step(self, gradients: PartBuffer, divisor: float = 1.0) -> None:
        """Updates the values in place by gradients, divided by `divisor`.

        Where that is not 1 the gradients themselves are divided: by the fused kernel on its way,
        which spares a pass over memory, where it does that as precisely. Only quotients too small
        to be normal count as zero there.

        Once there is state to work on, the fused kernel is called without the bookkeeping of
        `Optimizer.step`, which takes longer than the kernel does for a small model.

        Where a gradient has become zero, moments decay into denormal numbers, for which kernels
        take nearly twice as long on many processors. They count as zero here, which moves no value
        by more than 1e-30.
        """
        if self._optimizer is None:
            return
        scale = None if divisor == 1.0 or self._direct is None else self._scale(divisor)
        if divisor != 1.0 and scale is None:
            for vector in gradients.vectors:
                vector.div_(divisor)
        torch.set_flush_denormal(self._flushes)
        try:
            if self._direct is None:
                self._step_at_length(gradients)
            else:
                at = gradients.segments.__getitem__
                for kernel, group, positions in self._direct:
                    kernel(group, list(map(at, positions)), scale)
        finally:
            torch.set_flush_denormal(False)

    def _may_flush(self) -> bool:
        """Returns whether denormal numbers may count as zero: not where one may divide by them."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return all(group.get("eps", 1.0) >= _LEAST_EPS for group in groups)

    def _step_at_length(self, gradients: PartBuffer) -> None:
        """Steps as torch does; then there may be state to work on."""
        assert self._optimizer is not None
        for tensor, gradient in zip(self._tensors, gradients.segments, strict=True):
            tensor.grad = gradient
        self._optimizer.step()
        self._direct = self._find_direct()

    def _scale(self, divisor: float) -> torch.Tensor | None:
        """Returns a divisor for the kernels, which take a float32; None where that is not enough.

        Of narrow types they round the quotient later than `div_` does.
        """
        if self._divisor.item() != divisor:
            self._divisor = torch.tensor(divisor, dtype=torch.float32)
        return self._divisor if self._wide and self._divisor.item() == divisor else None

    def _find_direct(self) -> list[_Direct] | None:
        """Returns how to update each group directly; None where there is no way."""
        assert self._optimizer is not None
        bind = DIRECT.get(type(self._optimizer).__name__)
        if bind is None or not self._fused:
            return None
        at = {id(tensor): position for position, tensor in enumerate(self._tensors)}
        direct: list[_Direct] = []
        for group in self._optimizer.param_groups:
            states = [self._state_of(tensor) for tensor in group["params"]]
            positions = [at[id(tensor)] for tensor in group["params"]]
            direct.append((bind(group["params"], states), group, positions))
        return direct

    def set_hyper(self, groups: Sequence[GroupSpec]) -> None:
        """Takes new hyper-parameters, group by group.

        Raises:
            ConfigurationError: a name that this optimizer does not have, or a group too few.
        """
        if self._optimizer is None:
            return
        for index, target in zip(self._groups, self._optimizer.param_groups, strict=True):
            if index >= len(groups) or not set(groups[index].values) <= self._entry.hyper:
                raise ConfigurationError(
                    f"the pushed hyper-parameters do not fit group {index} of "
                    f"{type(self._optimizer).__name__}"
                )
            had = bool(target.get("momentum"))
            target.update(groups[index].values)
            if had != bool(target.get("momentum")):
                self._direct = None  # torch makes the buffers, or leaves them aside
        self._flushes = self._may_flush()

    def export(self) -> list[tuple[TensorSpec, torch.Tensor]]:
        """Returns the state: live tensors, to be copied by whoever keeps them.

        Tensors of a segment's length are ranges of a flat vector; anything of one element (a step
        counter) is a scalar of its vector and group.
        """
        state: list[tuple[TensorSpec, torch.Tensor]] = []
        for segment, tensor in zip(self._segments, self._tensors, strict=True):
            for name, value in self._state_of(tensor).items():
                if not isinstance(value, torch.Tensor):
                    continue
                scalar = value.dim() == 0
                spec = TensorSpec(
                    key=f"state/{name}",
                    dtype=str(value.dtype).removeprefix("torch."),
                    vector=segment.vector.dtype,
                    start=0 if scalar else segment.start,
                    stop=0 if scalar else segment.stop,
                    group=segment.group if scalar else -1,
                )
                state.append((spec, value))
        return state

    def restore(self, state: Sequence[tuple[TensorSpec, torch.Tensor]]) -> None:
        """Replaces the state by ranges of flat vectors, however they are cut.

        Raises:
            Rejected: the state is another optimizer's: something that this one needs is missing.
        """
        if self._optimizer is None:
            return
        hyper = dict(zip(self._groups, self._optimizer.param_groups, strict=True))
        for segment, tensor in zip(self._segments, self._tensors, strict=True):
            restored = _state_within(segment, state)
            missing = sorted(self._entry.needs(hyper[segment.group]) - restored.keys())
            if restored and missing:
                name = type(self._optimizer).__name__
                raise Rejected(
                    f"the optimizer's state to load has no {missing[0]!r}, which {name} keeps: it "
                    "is another optimizer's"
                )
            if restored:
                self._optimizer.state[tensor] = restored
        self._direct = None  # it was bound to the state that was there before

    def _state_of(self, tensor: torch.Tensor) -> Mapping[str, Any]:
        if self._optimizer is None or tensor not in self._optimizer.state:
            return {}
        state: Mapping[str, Any] = self._optimizer.state[tensor]
        return state


def _state_within(
    segment: Segment, state: Sequence[tuple[TensorSpec, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Returns one segment's state, put together from ranges of its flat vector, by name."""
    found: dict[str, torch.Tensor] = {}
    for spec, value in state:
        name = spec.key.removeprefix("state/")
        if spec.vector != segment.vector.dtype:
            continue
        if spec.group == segment.group:
            found[name] = value.reshape(()).clone()
        low, high = max(spec.start, segment.start), min(spec.stop, segment.stop)
        if spec.group < 0 and low < high:
            if name not in found:
                length = segment.stop - segment.start
                found[name] = torch.zeros(length, dtype=dtype_of(spec.dtype))
            target = found[name][low - segment.start : high - segment.start]
            target.copy_(value[low - spec.start : high - spec.start])
    return found


def _plain(value: Any) -> Hyper:
    if isinstance(value, torch.Tensor):
        return float(value)
    if isinstance(value, (tuple, list)):
        return tuple(float(item) for item in value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise ConfigurationError(f"a hyper-parameter is {value!r}: only numbers can be sent")
