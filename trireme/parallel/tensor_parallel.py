"""Tensor parallelism: chooses the layers that are split over processes, and splits them.

A plan maps patterns of module names to how the layer's matrix is split:

    column   by output features: each process computes some of the outputs (Megatron's f)
    row      by input features: each process takes some inputs; the outputs are summed (g)
    gathered by output features, and all processes gather the outputs

Source: Shoeybi et al., Megatron-LM (2019), section 3: a column split and a row
split with an element-wise layer between them need one sum in each pass.
`torch.distributed.tensor.parallel` does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from trireme.errors import ConfigurationError
from trireme.parallel.attention_heads import attentions, fused, linear_layers
from trireme.parallel.config import Plan
from trireme.parallel.sharding import tied
from trireme.parallel.stages import Link, chain_of, is_chain

__all__ = ["SPLITS", "derive", "resolve", "tensor_parallel"]

SPLITS = ("column", "row", "gathered")

_FEED_FORWARD = (
    (("expand",), "contract"),
    (("intermediate.dense",), "output.dense"),
    (("gate_proj", "up_proj"), "down_proj"),
)
"""The layers that are split into columns, and the row-split layer behind them, in feed-forward
blocks of Trireme, BERT and Llama."""

_ELEMENTWISE = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.LeakyReLU,
    nn.ELU,
    nn.Identity,
)


def tensor_parallel(module: nn.Module, mesh: DeviceMesh, plan: Plan | None = None) -> nn.Module:
    """Splits layers over the processes of a mesh; other layers are whole in each process.

    Args:
        module: the module, which is changed in place.
        mesh: a mesh of one axis.
        plan: patterns of names; None derives a plan.

    Raises:
        ConfigurationError: a layer that a pattern names cannot be split, or no layer can.
    """
    size = mesh.size()
    chosen = derive(module, size) if plan is None else resolve(module, plan, size)
    if not chosen:
        one = fused(module)
        why = f": {one} fuses query, key and value" if one else ""
        raise ConfigurationError(
            f"tensor parallelism: {type(module).__name__} has no linear layer that can be split "
            f"into {size}{why}: use --strategy fsdp, which shards any parameter, or fewer processes"
        )
    for attention in attentions(module):
        if all(chosen.get(name) == split for name, split in attention.splits()):
            attention.divide_heads(size)
    styles = {name: _STYLES[split]() for name, split in chosen.items()}
    return parallelize_module(module, mesh, styles)


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "gathered": partial(ColwiseParallel, output_layouts=Replicate()),
}


def resolve(module: nn.Module, plan: Plan, size: int) -> dict[str, str]:
    """Returns the split of each module that a plan names.

    Raises:
        ConfigurationError: a pattern matches no module, or a module cannot be split in that way.
    """
    chosen: dict[str, str] = {}
    several = tied(module)
    for pattern, split in plan.items():
        if split not in SPLITS:
            raise ConfigurationError(
                f"tensor plan {pattern!r}: {split!r} is not a split: use one of {', '.join(SPLITS)}"
            )
        matched = [name for name, _ in module.named_modules() if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigurationError(
                f"tensor plan {pattern!r} matches no module of {type(module).__name__}"
            )
        for name in matched:
            _check(name, module.get_submodule(name), split, size, several)
            chosen[name] = split
    for attention in attentions(module):
        if all(chosen.get(name) == split for name, split in attention.splits()):
            attention.check(size)
    return chosen


def _check(name: str, layer: nn.Module, split: str, size: int, several: frozenset[int]) -> None:
    if isinstance(layer, nn.modules.conv._ConvNd):
        raise ConfigurationError(
            f"tensor plan: {name} is a convolution, and torch computes convolutions with "
            "split channels wrongly: split the batch instead (--mesh dp=N), or leave it whole"
        )
    if not isinstance(layer, nn.Linear):
        raise ConfigurationError(
            f"tensor plan: {name} is a {type(layer).__name__}, and only nn.Linear layers can be "
            "split: leave it out of the plan; it stays whole in every process"
        )
    if id(layer.weight) in several:
        raise ConfigurationError(
            f"tensor plan: {name}.weight is tied to another layer's, and cannot be split: "
            "leave it out of the plan; it stays whole in every process"
        )
    features = layer.in_features if split == "row" else layer.out_features
    if features % size:
        side = "input" if split == "row" else "output"
        raise ConfigurationError(
            f"tensor plan: {name} has {features} {side} features, which cannot be divided "
            f"evenly among {size} processes"
        )


def derive(module: nn.Module, size: int) -> dict[str, str]:
    """Returns a plan for transformer blocks and chains of linear layers.

    In a chain (an `nn.Sequential`), a linear layer and the next linear layer become column and row
    where only element-wise layers lie between them. A remaining linear layer is gathered.
    Convolutions, recurrent layers, norms and embeddings stay whole.

    Args:
        module: a model, or a pipeline stage.
        size: the number of processes.
    """
    chosen: dict[str, str] = {}
    for attention in attentions(module):
        attention.check(size)
        chosen |= attention.splits()
    for name, part in module.named_modules():
        for columns, row in _FEED_FORWARD:
            if linear_layers(part, (*columns, row)):
                prefix = f"{name}." if name else ""
                chosen |= {prefix + column: "column" for column in columns} | {prefix + row: "row"}
    several = tied(module)
    for chain in _chains(module):
        _pair(chain, size, chosen, several)
    for name, split in chosen.items():
        _check(name, module.get_submodule(name), split, size, several)
    return chosen


def _chains(module: nn.Module) -> list[list[Link]]:
    """Returns the chains of a model: lists of consecutive layers."""
    own = [chain_of(module)] if is_chain(module) else []
    children = own[0] if own else module.named_children()
    inner = [
        [(f"{name}.{deep}", layer) for deep, layer in chain]
        for name, child in children
        for chain in _chains(child)
    ]
    return own + inner


def _pair(chain: list[Link], size: int, chosen: dict[str, str], several: frozenset[int]) -> None:
    """Chooses the split of each linear layer of a chain."""
    waiting: tuple[str, nn.Linear] | None = None  # a layer that becomes column or gathered
    for name, layer in chain:
        if isinstance(layer, nn.Linear) and name not in chosen:
            if waiting is not None:
                whole = id(layer.weight) in several
                chosen[waiting[0]] = "gathered" if whole else "column"
                if not whole:
                    chosen[name] = "row"
                waiting = None
            elif layer.out_features % size == 0 and id(layer.weight) not in several:
                waiting = (name, layer)
        elif waiting is not None and not isinstance(layer, _ELEMENTWISE):
            chosen[waiting[0]] = "gathered"
            waiting = None
    if waiting is not None:
        chosen[waiting[0]] = "gathered"
