"""The state of the user's optimizer, by the names of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trireme.errors import Rejected
from trireme.ps.joint_optimizer import members
from trireme.ps.optimizers import OPTIMIZERS, name_of

__all__ = ["export_state", "named_state", "restore_state", "state_names"]


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


def _copy(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def restore_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    tensors: Mapping[str, torch.Tensor],
    part: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _copy,
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
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.rpartition("/")
        if name in index:
            state.setdefault(index[name], {})[entry] = part(parameters[name], tensor)
    _check_complete(optimizer, state)
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def _check_complete(
    optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, torch.Tensor]]
) -> None:
    """Checks that parameters which have state have all the state that the optimizer needs."""
    groups = [
        (each, group)
        for each in members(optimizer)
        for group in each.param_groups
        for _ in group["params"]
    ]
    for index, entries in state.items():
        owner, group = groups[index]
        known = OPTIMIZERS.get(name_of(owner) or "")
        missing = known.needs(group) - entries.keys() if known is not None else None
        if missing:
            raise Rejected(
                f"the checkpoint has no {min(missing)!r}, from which {type(owner).__name__} "
                "would go on: it is another optimizer's; go on with the same optimizer, or choose "
                "another run directory"
            )
