"""Between whole tensors, which people and checkpoints name, and the part a process holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from trireme.parallel.local import called

__all__ = ["copies", "fully_sharded", "take", "whole"]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all of a tensor on the CPU; every process that shares it must ask."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().cpu()


@torch.no_grad()
def take(target: torch.Tensor, full: torch.Tensor) -> None:
    """Fills the part that this process holds of `target` from the whole tensor."""
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
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
    if isinstance(tensor, DTensor):
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
    for one in module.modules():
        if getattr(one, "inplace", False):
            one.inplace = False  # type: ignore[assignment]
    for root in called(module):
        _shard(root, mesh)
    return module


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts the parameters of a module that is called, unit by unit."""
    if not any(True for _ in module.parameters()):
        return
    for unit in (*_units(module), module):
        # FSDP hangs on to what a unit returns. Whoever changes a view of something else in place
        # would cut it off from that unnoticed, and have wrong gradients.
        unit.register_forward_hook(_own)
        fully_shard(unit, mesh=mesh)


def _own(module: nn.Module, args: object, output: Any) -> Any:
    """Returns an output that is no view."""
    if isinstance(output, torch.Tensor):
        return output.clone() if output._is_view() else output
    if isinstance(output, dict):
        return {key: _own(module, args, value) for key, value in output.items()}
    if type(output) in (tuple, list):
        return type(output)(_own(module, args, value) for value in output)
    return output


def _units(module: nn.Module) -> Sequence[nn.Module]:
    """Returns the children worth a group of their own: those with parameters."""
    found: list[nn.Module] = []
    for child in module.children():
        # Of a pipeline stage, what only stands for a part of a name is never called itself.
        if isinstance(child, nn.Sequential) or called(child) != [child]:
            found += _units(child)
        elif any(True for _ in child.parameters()) and not isinstance(child, nn.ParameterList):
            found.append(child)
    return found
