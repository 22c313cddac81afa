"""Tensor parallelism: chooses the layers that are split over processes, and splits them.

A plan maps patterns of module names to how the layer's matrix is split:

    column   by output features: each process computes some of the outputs (Megatron's f)
    row      by input features: each process takes some inputs; the outputs are summed (g)
    gathered by output features, and all processes gather the outputs

Source: Shoeybi et al., Megatron-LM (2019), section 3: a column split and a row
split with an element-wise layer between them need one sum in each pass. Each head of an attention
stays whole in one process: the matrices of query, key and value are split into columns between
heads, and each process computes attention with its own heads.
`torch.distributed.tensor.parallel` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from trireme.parallel.config import Plan
from trireme.parallel.sharding import tied
from trireme.parallel.stages import Link, chain_of, is_chain

_ATTENTIONS = (
    (("query", "key", "value"), "output"),
    (("self.query", "self.key", "self.value"), "output.dense"),
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("q_lin", "k_lin", "v_lin"), "out_lin"),
)
"""The names of the layers that are split into columns, and of the layer behind them that is split
into rows: in the attention of Trireme, BERT, Llama, OPT and DistilBERT."""

_FUSED = ("c_attn", "qkv", "qkv_proj", "query_key_value", "in_proj_weight", "Wqkv")

_SIZES = ("head_size", "attention_head_size", "head_dim")
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_COUNTED = (*_COUNTS, *_KEY_COUNTS, "all_head_size")
"""The attributes in which attention modules of different libraries keep their number of heads, or
their width."""

_FEED_FORWARD = (
    (("expand",), "contract"),
    (("intermediate.dense",), "output.dense"),
    (("gate_proj", "up_proj"), "down_proj"),
)
"""The layers that are split into columns, and the row-split layer behind them, in feed-forward
blocks of Trireme, BERT and Llama."""

_ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Identity)


def tensor_parallel(module: nn.Module, mesh: DeviceMesh, plan: Plan | None = None) -> nn.Module:
    """Splits layers over the processes of a mesh; other layers are whole in each process."""
    size = mesh.size()
    chosen = derive(module, size) if plan is None else resolve(module, plan, size)
    if not chosen:
        one = _fused(module)
        why = f": {one} fuses query, key and value" if one else ""
        raise ConfigurationError(
            f"tensor parallelism: {type(module).__name__} has no linear layer that can be split "
            f"into {size}{why}: use --strategy fsdp, which shards any parameter, or fewer processes"
        )
    for attention in attentions(module):
        if attention.splits().items() <= chosen.items():
            attention.divide_heads(size)
    styles = {name: _STYLES[split]() for name, split in chosen.items()}
    return parallelize_module(module, mesh, styles)


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "gathered": partial(ColwiseParallel, output_layouts=Replicate()),
}


def resolve(module: nn.Module, plan: Plan, size: int) -> dict[str, str]:
    """Returns the split of each module that a plan names."""
    chosen: dict[str, str] = {}
    several = tied(module)
    for pattern, split in plan.items():
        if split not in _STYLES:
            raise ConfigurationError(
                f"tensor plan {pattern!r}: {split!r} is not a split: use one of "
                f"{', '.join(_STYLES)}"
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
        if attention.splits().items() <= chosen.items():
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
    """
    chosen: dict[str, str] = {}
    for attention in attentions(module):
        attention.check(size)
        chosen |= attention.splits()
    for name, part in module.named_modules():
        for columns, row in _FEED_FORWARD:
            if _linear_layers(part, (*columns, row)):
                chosen |= _splits(name, columns, row)
    several = tied(module)
    for chain in _chains(module):
        _pair(chain, size, chosen, several)
    for name, split in chosen.items():
        _check(name, module.get_submodule(name), split, size, several)
    return chosen


def _chains(module: nn.Module) -> list[list[Link]]:
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
    first: str | None = None  # a gathered layer, which becomes column if a row follows
    for name, layer in chain:
        if isinstance(layer, nn.Linear) and name not in chosen:
            whole = id(layer.weight) in several
            if first is not None and not whole:
                chosen |= {first: "column", name: "row"}
                first = None
            elif first is None and not whole and layer.out_features % size == 0:
                chosen[name] = "gathered"
                first = name
            else:
                first = None
        elif not isinstance(layer, _ELEMENTWISE):
            first = None


@dataclass(frozen=True)
class Attention:
    """One attention of a model."""

    name: str  # the name of the attention module
    module: nn.Module  # the attention module
    columns: tuple[str, ...]  # the paths in the module to the layers of query, key and value
    row: str  # the path to the layer behind the heads

    def splits(self) -> dict[str, str]:
        """Returns the split of each layer, `column` or `row`, by the layer's full name."""
        return _splits(self.name, self.columns, self.row)

    def check(self, size: int) -> None:
        """Checks that the heads can be divided evenly among processes."""
        for column in self.columns:
            width = _linear_layers(self.module, (column,))[0].out_features
            heads = self._heads(column, width)
            if heads is None:
                raise ConfigurationError(
                    f"tensor parallelism: {self._called} is attention, and does "
                    "not give its number of heads: add an attribute head_size, the width of one "
                    "head, or use --strategy fsdp"
                )
            if heads % size:
                raise ConfigurationError(
                    f"tensor parallelism: {self._called} has {heads} heads, which cannot be "
                    f"divided evenly among {size} processes: use a number that divides "
                    "it"
                )
            # A norm over the width of all heads: each process would hold only some of its inputs.
            split = {path.rpartition(".")[2] for path in (*self.columns, self.row)}
            for name, parameter in self._holder.named_parameters() if heads > 1 else ():
                if name.split(".")[0] not in split and parameter.shape == (width,):
                    raise ConfigurationError(
                        f"tensor parallelism: {self._called}'s {name} applies to all heads at "
                        f"once, and each of {size} processes holds only some of them: use "
                        "--strategy fsdp"
                    )

    def divide_heads(self, size: int) -> None:
        """Sets the module's number of heads to the number that one of `size` processes holds."""
        holder = self._holder
        for name in _COUNTED:
            count = getattr(holder, name, None)
            if isinstance(count, int):
                setattr(holder, name, count // size)

    @property
    def _called(self) -> str:
        return self.name or f"the {type(self.module).__name__}"

    @property
    def _holder(self) -> nn.Module:
        return self.module.get_submodule(self.columns[0].rpartition(".")[0])

    def _heads(self, column: str, width: int) -> int | None:
        holder = self._holder
        for name in _SIZES:
            size = getattr(holder, name, None)
            if isinstance(size, int) and size > 0:
                return width // size
        of_keys = _KEY_COUNTS if column != self.columns[0] else ()
        for name in (*of_keys, *_COUNTS):
            count = getattr(holder, name, None)
            if isinstance(count, int) and count > 0:
                return count
        return None


def attentions(module: nn.Module) -> Iterator[Attention]:
    """Yields each attention module of a model whose query, key and value are separate layers."""
    for name, part in module.named_modules():
        for columns, row in _ATTENTIONS:
            if _linear_layers(part, (*columns, row)):
                yield Attention(name, part, columns, row)


def _fused(module: nn.Module) -> str | None:
    for name, part in module.named_modules():
        for inner in _FUSED:
            if isinstance(getattr(part, inner, None), nn.Module | nn.Parameter):
                return f"{name}.{inner}" if name else inner
    return None


def _splits(block: str, columns: tuple[str, ...], row: str) -> dict[str, str]:
    prefix = f"{block}." if block else ""
    return {prefix + column: "column" for column in columns} | {prefix + row: "row"}


def _linear_layers(module: nn.Module, paths: tuple[str, ...]) -> list[nn.Linear]:
    """Returns the layers at the given paths; an empty list unless all of them are linear."""
    found: list[nn.Linear] = []
    for path in paths:
        layer: object = module
        for name in path.split("."):
            layer = getattr(layer, name, None)
        if not isinstance(layer, nn.Linear):
            return []
        found.append(layer)
    return found
