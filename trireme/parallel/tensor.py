"""Tensor parallelism: which layers are cut, and along which side.

A plan gives patterns of module names, and for each how its matrix is cut:

    column   by output features: the result is a part of them (Megatron's f)
    row      by input features: takes such a part, and the sum over the processes is the result (g)
    gathered by output features, and the parts are put together again

Source: Shoeybi et al., Megatron-LM (2019), section 3: a column and a row with something
element-wise between them need one sum a pass. `torch.distributed.tensor.parallel` does it.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

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
from trireme.parallel.config import Plan
from trireme.parallel.heads import attentions, fused, linear_layers
from trireme.parallel.sharding import tied

__all__ = ["CUTS", "derive", "resolve", "tensor_parallel"]

CUTS = ("column", "row", "gathered")

_FEED_FORWARD = (
    (("expand",), "contract"),
    (("intermediate.dense",), "output.dense"),
    (("gate_proj", "up_proj"), "down_proj"),
)
"""Columns, and the row behind them, in the feed-forward part of a block: Trireme's, BERT's and
Llama's."""

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
    """Cuts layers over the processes of a mesh; what no plan names stays whole in each.

    Args:
        module: changed in place.
        mesh: of one axis.
        plan: patterns of names; None derives one.

    Raises:
        ConfigurationError: a layer that a pattern names cannot be cut, or there is none to cut.
    """
    size = mesh.size()
    chosen = derive(module, size) if plan is None else resolve(module, plan, size)
    if not chosen:
        one = fused(module)
        why = f": {one} holds query, key and value as one" if one else ""
        raise ConfigurationError(
            f"tensor parallelism: {type(module).__name__} has no linear layer that can be cut "
            f"into {size}{why}: use --strategy fsdp, which cuts any parameter, or fewer processes"
        )
    for attention in attentions(module):
        if all(chosen.get(name) == cut for name, cut in attention.cuts()):
            attention.share(size)
    styles = {name: _STYLES[cut]() for name, cut in chosen.items()}
    return parallelize_module(module, mesh, styles)


def _column() -> ParallelStyle:
    return ColwiseParallel()


def _row() -> ParallelStyle:
    return RowwiseParallel()


def _gathered() -> ParallelStyle:
    return ColwiseParallel(output_layouts=Replicate())


_STYLES = {"column": _column, "row": _row, "gathered": _gathered}


def resolve(module: nn.Module, plan: Plan, size: int) -> dict[str, str]:
    """Returns the cut of each module that a plan names.

    Raises:
        ConfigurationError: a pattern matches nothing, or what it matches cannot be cut so.
    """
    chosen: dict[str, str] = {}
    several = tied(module)
    for pattern, cut in plan.items():
        if cut not in CUTS:
            raise ConfigurationError(
                f"tensor plan {pattern!r}: {cut!r} is no cut: there are {', '.join(CUTS)}"
            )
        matched = [name for name, _ in module.named_modules() if fnmatchcase(name, pattern)]
        if not matched:
            raise ConfigurationError(
                f"tensor plan {pattern!r} matches no module of {type(module).__name__}"
            )
        for name in matched:
            _check(name, module.get_submodule(name), cut, size, several)
            chosen[name] = cut
    for attention in attentions(module):
        if all(chosen.get(name) == cut for name, cut in attention.cuts()):
            attention.check(size)
    return chosen


def _check(name: str, layer: nn.Module, cut: str, size: int, several: frozenset[int]) -> None:
    if isinstance(layer, nn.modules.conv._ConvNd):
        raise ConfigurationError(
            f"tensor plan: {name} is a convolution, and torch computes convolutions with cut "
            "channels wrongly: cut the batch instead (--mesh dp=N), or leave it whole"
        )
    if not isinstance(layer, nn.Linear):
        raise ConfigurationError(
            f"tensor plan: {name} is a {type(layer).__name__}, and only nn.Linear layers can be "
            "cut: leave it out of the plan; it stays whole in every process"
        )
    if id(layer.weight) in several:
        raise ConfigurationError(
            f"tensor plan: {name}.weight is another layer's too, and cut it would be one no more: "
            "leave it out of the plan; it stays whole in every process"
        )
    features = layer.in_features if cut == "row" else layer.out_features
    if features % size:
        side = "input" if cut == "row" else "output"
        raise ConfigurationError(
            f"tensor plan: {name} has {features} {side} features, which {size} processes cannot "
            "share evenly"
        )


def derive(module: nn.Module, size: int) -> dict[str, str]:
    """Returns a plan for what is known: transformer blocks, and chains of linear layers.

    In a chain (an `nn.Sequential`), a linear layer, something element-wise and another linear
    layer become column and row. A last one that is left is gathered. Convolutions, recurrent
    layers, norms and embeddings stay whole.

    Args:
        module: a model, or a stage of one.
        size: over how many processes.
    """
    chosen: dict[str, str] = {}
    for attention in attentions(module):
        attention.check(size)
        chosen |= attention.cuts()
    for name, part in module.named_modules():
        for columns, row in _FEED_FORWARD:
            if linear_layers(part, (*columns, row)):
                prefix = f"{name}." if name else ""
                chosen |= {prefix + column: "column" for column in columns} | {prefix + row: "row"}
    several = tied(module)
    for chain in _chains(module):
        _pair(chain, size, chosen, several)
    for name, cut in chosen.items():
        _check(name, module.get_submodule(name), cut, size, several)
    return chosen


def _chains(module: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Returns the layers of a model that follow one upon the other, chain by chain."""
    if _is_chain(module):
        flat: list[tuple[str, nn.Module]] = []
        for name, child in _links(module):
            flat.append((name, child))
        inner = [
            [(f"{name}.{deep}", layer) for deep, layer in chain]
            for name, child in flat
            for chain in _chains(child)
        ]
        return [flat, *inner]
    return [
        [(f"{name}.{deep}", layer) for deep, layer in chain]
        for name, child in module.named_children()
        for chain in _chains(child)
    ]


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _links(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the links of a chain, those of chains inside it too."""
    links: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        if _is_chain(child):
            links += [(f"{name}.{deep}", layer) for deep, layer in _links(child)]
        else:
            links.append((name, child))
    return links


def _pair(
    chain: list[tuple[str, nn.Module]],
    size: int,
    chosen: dict[str, str],
    several: frozenset[int],
) -> None:
    """Gives each linear layer of a chain its cut."""
    waiting: tuple[str, nn.Linear] | None = None  # a column whose row has not come yet
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
