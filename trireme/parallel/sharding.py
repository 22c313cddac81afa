"""Shards parameters (FSDP), and converts between whole tensors and a process's shards."""

from __future__ import annotations

import traceback
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trireme.errors import ConfigurationError
from trireme.session.model.module_names import called_modules
from trireme.tensors import bytes_of, is_dtensor, local_part, map_tensors, tensors_in


def copies(tensor: torch.Tensor, processes: int) -> int:
    """Returns the number of processes that hold each element of a tensor."""
    shards = 1
    if is_dtensor(tensor):
        for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
            if not placement.is_replicate():  # also a strided shard, which is not a `Shard`
                shards *= size
    return processes // shards


def fully_sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shards the parameters of a module over a mesh, with a group for each child with parameters.

    While one child computes, the parameters of the next are gathered. Source: Zhao et al., PyTorch
    FSDP (VLDB 2023); Rajbhandari et al., ZeRO (SC 2020), stage 3.
    """
    from torch.distributed.fsdp import fully_shard  # loads slowly

    for one in module.modules():
        if getattr(one, "inplace", False):
            one.inplace = False  # type: ignore[assignment]
    roots = [root for root in called_modules(module) if any(True for _ in root.parameters())]
    _refuse_tied(module, roots)
    _refuse_sparse(module)
    # Numbers without dimensions have no shards: each process keeps them, and averages gradients.
    numbers = {parameter for parameter in module.parameters() if not parameter.dim()}
    for root in roots:
        for unit in (*_units(root, tied(root)), root):
            unit.register_forward_hook(_flatten_output)
            # A root too, so that what a program writes between two steps goes to the shards.
            fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=numbers)
            unit.register_forward_hook(_restore_output)
    return module


def load_whole_tensors(module: nn.Module, loaded: dict[nn.Parameter, tuple[int, int]]) -> None:
    """Lets `load_state_dict` take whole tensors for parameters with shards.

    Args:
        module: has the parameters, of its own and of its children.
        loaded: takes the checksum of each, and the version of the parameter that has its values.
    """

    def divide(one: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, parameter in one.named_parameters(recurse=False):
            value = state.get(prefix + name)
            if not is_dtensor(parameter) or not isinstance(value, torch.Tensor):
                continue
            if not is_dtensor(value) and not value.is_meta:
                with torch.inference_mode(False):
                    state[prefix + name] = local_part(
                        parameter, value.clone() if value.is_inference() else value
                    )
                loaded[parameter] = zlib.crc32(bytes_of(value).data), parameter._version + 1

    for one in module.modules():
        one.register_load_state_dict_pre_hook(divide)  # type: ignore[no-untyped-call]


def refused_average(error: BaseException) -> ConfigurationError | None:
    """Returns what to write in place of what torch's average of a whole model has refused."""
    places = traceback.extract_tb(error.__traceback__)
    if not any(Path(place.filename).name == "swa_utils.py" for place in places):
        return None
    return ConfigurationError(
        "torch.optim.swa_utils averages whole parameters, and under fsdp, tensor or a mesh each "
        "process has parts of them: leave AveragedModel out. Session(ema=0.99) averages the parts, "
        f"evaluates the average and saves it ({' '.join(str(error).split())})"
    )


def _refuse_sparse(module: nn.Module) -> None:
    for name, one in module.named_modules():
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse:
            raise ConfigurationError(
                f"fsdp: {name or type(one).__name__} has sparse gradients, which cannot be divided "
                "into shards: make the embedding with sparse=False"
            )


def _refuse_tied(module: nn.Module, roots: Sequence[nn.Module]) -> None:
    owners = Counter(id(parameter) for root in roots for parameter in root.parameters())
    for name, parameter in module.named_parameters():
        if owners[id(parameter)] > 1:
            raise ConfigurationError(
                f"fsdp: {name} is a parameter of two modules that are called separately, and "
                "would become two when it is sharded: untie it, give the model its own "
                "forward, or use --strategy allreduce"
            )


class _OriginalOutput:
    """A module's output, which travels beside its tensors."""

    def __init__(self, output: Any) -> None:
        self.output = output


def _flatten_output(module: nn.Module, args: object, output: Any) -> Any:
    """Returns an output in the form that FSDP can hook: a tuple of its tensors, none a view.

    FSDP attaches hooks to the tensors that a unit returns, and finds them only in tuples, lists and
    dicts. A view that is changed in place afterwards would silently lose its hook, and gradients
    would be wrong.
    """
    if isinstance(output, torch.Tensor):
        return _own(output)
    return (*(_own(tensor) for tensor in tensors_in(output)), _OriginalOutput(output))


def _restore_output(module: nn.Module, args: object, output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output
    *tensors, original = output
    following = iter(tensors)
    return map_tensors(original.output, lambda _: next(following))


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor._is_view() else tensor


def tied(module: nn.Module) -> frozenset[int]:
    """Returns the identities of the parameters that have several names in a module."""
    owners = Counter(
        id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False)
    )
    return frozenset(parameter for parameter, count in owners.items() if count > 1)


def _units(module: nn.Module, several: frozenset[int]) -> Sequence[nn.Module]:
    """Returns the submodules that get a group of their own: children with parameters.

    A tied parameter belongs to the group of the whole model. A child that has one gets no group;
    its children without tied parameters do.
    """
    found: list[nn.Module] = []
    for child in module.children():
        # The inner modules of a pipeline stage that only hold part of a name are never called.
        if (
            isinstance(child, nn.Sequential)
            or called_modules(child) != [child]
            or any(id(parameter) in several for parameter in child.parameters())
        ):
            found += _units(child, several)
        elif any(True for _ in child.parameters()) and not isinstance(child, nn.ParameterList):
            found.append(child)
    return found
