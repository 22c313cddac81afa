"""The registry of optimizers that a parameter server can run, by name and hyper-parameters.

They compute each element by itself, as most of `torch.optim` do, so that they work on
flat vectors as on the model's tensors. No code is ever sent. The state of the user's optimizer goes
by the names of the parameters.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from trireme.errors import ConfigurationError, Rejected, UnsupportedOptimizerError
from trireme.plugins import Plugins
from trireme.ps.layout import ITEM_SIZES
from trireme.ps.messages import GroupSpec, OptimizerSpec

Hyper = float | int | bool | None | tuple[float, ...]


class Entry:
    """One optimizer of the registry.

    Args:
        make: the class, such as torch's.
        hyper: the names of the hyper-parameters that a group may set, separated by spaces.
        keeps: the state without which it cannot go on, by torch's names.
        keeps_if: the same for state that it keeps only where a hyper-parameter asks for it.
        fused: the dtypes for which torch has a fused CPU kernel that can be trusted.
        flushes: whether denormal numbers may count as zero: not where one goes by their signs, or
            divides by what is nearly as small.
    """

    def __init__(
        self,
        make: type[torch.optim.Optimizer],
        hyper: str,
        keeps: str = "",
        keeps_if: Mapping[str, str] | None = None,
        fused: Iterable[str] = (),
        *,
        flushes: bool = True,
    ) -> None:
        self.make, self.flushes = make, flushes
        self.hyper, self.fused = frozenset(hyper.split()), frozenset(fused)
        self.keeps, self.keeps_if = frozenset(keeps.split()), keeps_if or {}

    def needs(self, hyper: Mapping[str, Any]) -> frozenset[str]:
        """Returns the state without which a group of these hyper-parameters cannot go on."""
        return self.keeps | {state for name, state in self.keeps_if.items() if hyper.get(name)}

    @property
    def options(self) -> dict[str, bool]:
        """The arguments by which torch's class computes tensor by tensor; others need none."""
        return {"foreach": False} if "foreach" in inspect.signature(self.make).parameters else {}


WIDE = ("float32", "float64")
"""The dtypes in which a sum can be divided by a float32 on the way as precisely as before."""

_AMSGRAD = {"amsgrad": "max_exp_avg_sq"}

SGD = Entry(
    # Of narrow types torch 2.13's kernel changes only what is left over of its vectors.
    torch.optim.SGD,
    "lr momentum dampening weight_decay nesterov maximize",
    fused=WIDE,
)
Adam = Entry(
    torch.optim.Adam,
    "lr betas eps weight_decay amsgrad maximize decoupled_weight_decay",
    "step exp_avg exp_avg_sq",
    _AMSGRAD,
    ITEM_SIZES,
)
AdamW = Entry(
    torch.optim.AdamW,
    "lr betas eps weight_decay amsgrad maximize",
    "step exp_avg exp_avg_sq",
    _AMSGRAD,
    ITEM_SIZES,
)
Adagrad = Entry(
    torch.optim.Adagrad,
    "lr lr_decay weight_decay initial_accumulator_value eps maximize",
    "step sum",
    fused=ITEM_SIZES,
)
RMSprop = Entry(
    torch.optim.RMSprop,
    "lr alpha eps weight_decay momentum centered maximize",
    "step square_avg",
    {"momentum": "momentum_buffer", "centered": "grad_avg"},
)
Adadelta = Entry(
    torch.optim.Adadelta, "lr rho eps weight_decay maximize", "step square_avg acc_delta"
)
Adamax = Entry(
    torch.optim.Adamax, "lr betas eps weight_decay maximize", "step exp_avg exp_inf", flushes=False
)
NAdam = Entry(
    torch.optim.NAdam,
    "lr betas eps weight_decay momentum_decay decoupled_weight_decay maximize",
    "step mu_product exp_avg exp_avg_sq",
)
RAdam = Entry(
    torch.optim.RAdam,
    "lr betas eps weight_decay decoupled_weight_decay maximize",
    "step exp_avg exp_avg_sq",
)
ASGD = Entry(torch.optim.ASGD, "lr lambd alpha t0 weight_decay maximize", "step eta mu ax")
Rprop = Entry(
    torch.optim.Rprop, "lr etas step_sizes maximize", "step prev step_size", flushes=False
)

OPTIMIZERS = Plugins("trireme.optimizers", "optimizer", Entry)  # by the names of their classes


def groups_of(optimizer: torch.optim.Optimizer, name: str) -> tuple[GroupSpec, ...]:
    """Returns an optimizer's present hyper-parameters, group by group."""
    allowed = OPTIMIZERS.load(name).hyper
    return tuple(
        GroupSpec({key: _plain(value) for key, value in group.items() if key in allowed})
        for group in optimizer.param_groups
    )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Checks that an optimizer makes a step from gradients alone.

    Raises:
        UnsupportedOptimizerError: it computes the loss itself, several times.
    """
    if any(isinstance(each, torch.optim.LBFGS) for each in members(optimizer)):
        raise UnsupportedOptimizerError(
            "LBFGS computes the loss several times a step, and a step of a job computes it once, "
            "with servers and without: use an optimizer whose step needs no closure"
        )


def name_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns the registry's name of an optimizer; None where it has none.

    A subclass has the name of its base class if it computes its steps in the same way: if it
    overrides neither `step` nor `_init_group`.
    """
    kind = type(optimizer)
    for base in kind.__mro__:
        found = OPTIMIZERS.find(base.__name__)
        if found is not None and found.make is base:
            same = all(_code(kind, name) is _code(base, name) for name in ("step", "_init_group"))
            return base.__name__ if same else None
    return None


def _code(kind: type, method: str) -> Any:
    """Returns a method's own function, which torch wraps when the first optimizer is made.

    It is None where the class has no such method: `_init_group` is a convention of torch's own.
    """
    found = getattr(kind, method, None)
    return found and inspect.unwrap(found)


def spec_of(optimizer: torch.optim.Optimizer) -> OptimizerSpec:
    """Returns an optimizer, or several as one, as registry names and numbers.

    Raises:
        UnsupportedOptimizerError: the registry has no optimizer that computes as it does.
    """
    check_optimizer(optimizer)
    if isinstance(optimizer, JointOptimizer):
        return join([spec_of(each) for each in optimizer.optimizers])
    name = name_of(optimizer)
    if name is None:
        shown = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
        sparse = isinstance(optimizer, torch.optim.SparseAdam)
        raise UnsupportedOptimizerError(
            f"the parameter server has no optimizer {shown}: it has torch.optim's "
            f"{', '.join(OPTIMIZERS)}, and classes derived from them that leave `step` as it is. "
            f"{_SPARSE if sparse else _ELSEWHERE}"
        )
    groups = groups_of(optimizer, name)
    check_entry(optimizer, OPTIMIZERS.load(name), groups)
    return OptimizerSpec(name, groups)


def check_entry(
    optimizer: torch.optim.Optimizer, entry: Entry, groups: Sequence[GroupSpec]
) -> None:
    """Checks that servers would compute as another package's optimizer does, and can save it."""
    if entry.make.__module__.startswith("torch.optim"):
        return
    name = entry.make.__name__
    arguments = inspect.signature(entry.make).parameters
    for key in arguments.keys() - entry.hyper - {"params"}:
        argument = arguments[key]
        for given in (group[key] for group in optimizer.param_groups if key in group):
            if given != argument.default:
                raise UnsupportedOptimizerError(
                    f"{name}'s {key} is {given!r}, and servers would take {argument.default!r}: "
                    f"its entry does not name {key!r} among its hyper-parameters"
                )
    tried = torch.zeros(2, requires_grad=True)
    tried.grad = torch.ones(2)
    trial = entry.make([tried], **dict[str, Any](groups[0].values))
    trial.step()
    for key, value in trial.state[tried].items():
        tensor = isinstance(value, torch.Tensor)
        why = state_mismatch(key, value, (2,)) if tensor else f"is {value!r}, and no tensor"
        if why is not None and value is not None:
            raise UnsupportedOptimizerError(
                f"{name} keeps {key!r}, which {why}: servers keep tensors of the parameter's "
                f"shape, and single numbers as tensors named {', '.join(COUNTERS)}"
            )


_ELSEWHERE = (
    "Use one of them; or train without servers (under plain python, with --strategy allreduce, or "
    "with fsdp), or with --strategy averaging or diloco, where workers take any optimizer whose "
    "step needs no closure"
)

_SPARSE = (
    "For sparse gradients use trireme.Embedding, whose rows the servers keep and update, by the "
    "sparse form of Adam too"
)


def join(specs: Sequence[OptimizerSpec]) -> OptimizerSpec:
    """Returns several optimizers, at least one, as one, whose groups are theirs in this order."""
    if not specs:
        raise ValueError("no optimizers to join")
    groups = [
        GroupSpec(group.values, name)
        for spec in specs
        for group, name in zip(spec.groups, spec.names, strict=True)
    ]
    return OptimizerSpec(specs[0].name, tuple(groups))


def mismatch(spec: OptimizerSpec, groups: Sequence[GroupSpec]) -> str | None:
    """Returns why hyper-parameters are not those of an optimizer; None when they are."""
    if len(groups) != len(spec.groups):
        return f"there are {len(spec.groups)} parameter groups, and values for {len(groups)} came"
    for group, first, name in zip(groups, spec.groups, spec.names, strict=True):
        known = OPTIMIZERS.find(name)
        if known is None:
            return f"there is no optimizer {name!r} on a server"
        if group.optimizer not in ("", name):
            return f"a group is of {name}, and values for {group.optimizer} came"
        unknown = sorted(set(group.values) - known.hyper)
        if unknown:
            return f"{name} has no hyper-parameter {unknown[0]!r}"
        for key, value in group.values.items():
            if not is_sensible(key, value):
                return f"{name}'s {key} is {value!r}"
        if known.needs({**first.values, **group.values}) != known.needs(first.values):
            switched = " or ".join(known.keeps_if)
            return f"{name} keeps state from its first step on: {switched} cannot be switched"
    return None


_SWITCHES = {"nesterov", "maximize", "amsgrad", "centered", "decoupled_weight_decay"}
_PAIRS = {"betas", "etas", "step_sizes"}


def is_sensible(name: str, value: Hyper) -> bool:
    """Returns whether torch can compute with a hyper-parameter's value."""
    if name in _SWITCHES:
        return isinstance(value, bool)
    if name in _PAIRS:
        if not isinstance(value, tuple) or len(value) != 2 or not all(map(math.isfinite, value)):
            return False
        return name != "betas" or all(0 <= beta < 1 for beta in value)
    return isinstance(value, int | float) and math.isfinite(value)


def _plain(value: Any) -> Hyper:
    if isinstance(value, torch.Tensor):
        return float(value)
    if isinstance(value, (tuple, list)):
        return tuple(float(item) for item in value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise ConfigurationError(f"a hyper-parameter is {value!r}: only numbers can be sent")


# Several optimizers as one -----------------------------------------------------------------------


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, such as those of a generator and its discriminator.

    Each updates its own parameters, and a step is a step of one of them. The layout, checkpoints
    and messages contain the parameter groups of all of them, one after the other.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Not Optimizer.__init__: groups and state are those of the optimizers themselves.
        self.optimizers = tuple(optimizers)
        self.chosen = 0  # the position of the optimizer that `step` steps
        self.defaults: dict[str, Any] = {}
        seen: dict[int, int] = {}
        for index, optimizer in enumerate(self.optimizers):
            for parameter in _parameters(optimizer):
                first = seen.setdefault(id(parameter), index)
                if first != index:
                    raise ConfigurationError(
                        f"optimizers {first} and {index} have a parameter of shape "
                        f"{tuple(parameter.shape)} in common: give each parameter to one of them"
                    )

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.optimizers[self.chosen].step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state and groups of all optimizers, with parameters numbered in order."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for before, optimizer in self._placed():
            own = optimizer.state_dict()
            state |= {before + index: entries for index, entries in own["state"].items()}
            groups += [
                {**group, "params": [before + index for index in group["params"]]}
                for group in own["param_groups"]
            ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives each optimizer its part of what `state_dict` returned."""
        groups = iter(state_dict["param_groups"])
        for before, optimizer in self._placed():
            own = [next(groups) for _ in optimizer.param_groups]
            positions = [index for group in own for index in group["params"]]
            state = {
                index - before: state_dict["state"][index]
                for index in positions
                if index in state_dict["state"]
            }
            moved = [
                {**group, "params": [index - before for index in group["params"]]} for group in own
            ]
            optimizer.load_state_dict({"state": state, "param_groups": moved})

    def _placed(self) -> list[tuple[int, torch.optim.Optimizer]]:
        counts = [len(_parameters(optimizer)) for optimizer in self.optimizers]
        return list(zip(accumulate(counts, initial=0), self.optimizers, strict=False))


def members(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Returns the optimizers that one consists of: itself, unless it is several."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else (optimizer,)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# The state of an optimizer ----------------------------------------------------------------------


def state_names(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> list[str | None]:
    """Returns the parameters' names in the order in which the optimizer's state counts them.

    One that is not among `parameters`, because it is frozen, counts too, but has no state, and no
    name here.
    """
    by_identity = {id(parameter): name for name, parameter in parameters.items()}
    return [by_identity.get(id(p)) for group in optimizer.param_groups for p in group["params"]]


def named_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns an optimizer's state as `PARAMETER/STATE` -> tensor, as it lies there."""
    names = state_names(optimizer, parameters)
    state: dict[int, dict[str, Any]] = optimizer.state_dict()["state"]
    return {
        f"{names[index]}/{key}": torch.as_tensor(value).detach()
        for index, entries in state.items()
        if names[index] is not None
        for key, value in entries.items()
        if isinstance(value, (torch.Tensor, int, float))
    }


def export_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Returns copies of an optimizer's state as `PARAMETER/STATE` -> tensor, on the CPU."""
    state = named_state(optimizer, parameters)
    return {name: tensor.cpu().clone() for name, tensor in state.items()}


def restore_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda _, tensor: tensor.clone(),
) -> None:
    """Replaces an optimizer's state, on whatever device its parameters are.

    Args:
        optimizer: the optimizer.
        parameters: its parameters, by name; the state of others is ignored.
        tensors: by `PARAMETER/STATE`.
        part: returns what a parameter's optimizer keeps of a tensor of its state.

    Raises:
        Rejected: it is another optimizer's.
    """
    names = state_names(optimizer, parameters)
    index = {name: position for position, name in enumerate(names) if name}
    known = all(name_of(each) for each in members(optimizer))
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        if name in index:
            why = state_mismatch(entry, tensor, tuple(parameters[name].shape)) if known else None
            if why is not None:
                raise Rejected(
                    f"{entry!r} of parameter {name!r} {why} in the checkpoint: it is of another "
                    "model or optimizer; choose another run directory"
                )
            state.setdefault(index[name], {})[entry] = part(parameters[name], tensor)
    _check_complete(optimizer, state)
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


COUNTERS = ("step", "mu_product", "eta", "mu")  # of which a parameter has one number each


def state_mismatch(entry: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> str | None:
    """Returns why a tensor cannot be an entry of a registry optimizer's state; None if it can.

    Args:
        entry: the optimizer's name for it.
        tensor: the tensor.
        shape: the parameter's shape.
    """
    if entry in COUNTERS:
        if tensor.dim():
            return f"has shape {tuple(tensor.shape)}, and not one number,"
        number = float(tensor)
        return None if math.isfinite(number) and number >= 0 else f"is {number}"
    if tuple(tensor.shape) != shape:
        return f"has shape {tuple(tensor.shape)} instead of {shape}"
    return None if tensor.is_floating_point() else f"is of {tensor.dtype}"


def _check_complete(
    optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, torch.Tensor]]
) -> None:
    groups = [
        (each, group)
        for each in members(optimizer)
        for group in each.param_groups
        for _ in group["params"]
    ]
    for index, entries in state.items():
        owner, group = groups[index]
        known = OPTIMIZERS.find(name_of(owner) or "")
        missing = known.needs(group) - entries.keys() if known is not None else None
        if missing:
            raise Rejected(
                f"the checkpoint has no {min(missing)!r}, from which {type(owner).__name__} "
                "would go on: it is another optimizer's; go on with the same optimizer, or choose "
                "another run directory"
            )
