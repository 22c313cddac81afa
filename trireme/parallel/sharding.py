"""Between whole tensors, which people and checkpoints name, and the part a process holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trireme.errors import ConfigurationError
from trireme.parallel.local import called, is_shared
from trireme.parallel.structure import map_tensors, tensors_in

__all__ = ["copies", "fully_sharded", "take", "tied", "whole"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all of a tensor on the CPU; every process that shares it must ask."""
    full = tensor.full_tensor() if is_shared(tensor) else tensor
    return full.detach().cpu()


@torch.no_grad()
def take(target: torch.Tensor, full: torch.Tensor) -> None:
    """Fills the part that this process holds of `target` from the whole tensor."""
    if not is_shared(target):
        target.copy_(full)
        return
    from torch.distributed.tensor import distribute_tensor  # loads slowly

    full = full.to(device=target.device, dtype=target.dtype)
    placed = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
    target.to_local().copy_(placed.to_local())


def copies(tensor: torch.Tensor, processes: int) -> int:
    """Returns how many of `processes` processes hold each element of a tensor.

    Args:
        tensor: of one pipeline stage.
        processes: how many hold that stage.
    """
    shards = 1
    if is_shared(tensor):
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            if not placement.is_replicate():  # a shard, or a shard of shards, which is no `Shard`
                shards *= size
    return processes // shards


def fully_sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cuts the parameters of a module over a mesh, one group a child that has some of its own.

    So while one child computes, the next one's parameters come. Source: Zhao et al., PyTorch
    FSDP (VLDB 2023); Rajbhandari et al., ZeRO (SC 2020), stage 3.

    Args:
        module: changed in place.
        mesh: one axis: shards; two: replicas of shards.
    """
    from torch.distributed.fsdp import fully_shard  # loads slowly

    for one in module.modules():
        if getattr(one, "inplace", False):
            one.inplace = False  # type: ignore[assignment]
    roots = [root for root in called(module) if any(True for _ in root.parameters())]
    _refuse_tied(module, roots)
    for root in roots:
        for unit in (*_units(root, tied(root)), root):
            unit.register_forward_hook(_laid_open)
            fully_shard(unit, mesh=mesh)
            unit.register_forward_hook(_put_together)
    return module


def _refuse_tied(module: nn.Module, roots: Sequence[nn.Module]) -> None:
    """A parameter that two modules have, which a program calls one by one, would be two."""
    owner: dict[int, int] = {}
    for place, root in enumerate(roots):
        for parameter in root.parameters():
            if owner.setdefault(id(parameter), place) != place:
                name = next(n for n, p in module.named_parameters() if p is parameter)
                raise ConfigurationError(
                    f"fsdp: {name} is a parameter of two modules that are called one by one, and "
                    "cut it would be two: untie it, give the model a forward of its own, or use "
                    "--strategy allreduce"
                )


class _Held:
    """An output whose tensors are beside it."""

    def __init__(self, output: Any) -> None:
        self.output = output


def _laid_open(module: nn.Module, args: object, output: Any) -> Any:
    """Returns an output as FSDP sees it: its tensors in a tuple, none of which is a view.

    FSDP hangs on to what a unit returns, and knows tuples, lists and dicts alone. Whoever changes a
    view of something else in place would cut it off from that unnoticed, and have wrong gradients.
    """
    if isinstance(output, torch.Tensor):
        return _own(output)
    return (*(_own(tensor) for tensor in tensors_in(output)), _Held(output))


def _put_together(module: nn.Module, args: object, output: Any) -> Any:
    """Returns the output as the module gave it, with the tensors that FSDP hangs on to."""
    if isinstance(output, torch.Tensor):
        return output
    *tensors, held = output
    following = iter(tensors)
    return map_tensors(held.output, lambda _: next(following))


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor._is_view() else tensor


def tied(module: nn.Module) -> frozenset[int]:
    """Returns which parameters have several names in a module, by identity."""
    owners = Counter(
        id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)
    )
    return frozenset(parameter for parameter, count in owners.items() if count > 1)


def _units(module: nn.Module, several: frozenset[int]) -> Sequence[nn.Module]:
    """Returns the parts worth a group of their own: children with parameters.

    A parameter that is tied belongs to the whole model's group, for whoever uses it first and
    last: of a child that has one, the children get groups, as far as they have none.
    """
    found: list[nn.Module] = []
    for child in module.children():
        # Of a pipeline stage, what only stands for a part of a name is never called itself.
        if (
            isinstance(child, nn.Sequential)
            or called(child) != [child]
            or any(id(parameter) in several for parameter in child.parameters())
        ):
            found += _units(child, several)
        elif any(True for _ in child.parameters()) and not isinstance(child, nn.ParameterList):
            found.append(child)
    return found
