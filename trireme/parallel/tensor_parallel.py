"""Tensor parallelism: chooses the layers that are split over processes, and splits them.

A plan maps patterns of module names to how the layer's matrix is split:

    column   by output features: each process computes some of the outputs (Megatron's f)
    row      by input features: each process takes some inputs; the outputs are summed (g)
    gathered by output features, and all processes gather the outputs

Source: Shoeybi et al., Megatron-LM (2019), section 3. Each head of an attention stays whole in one
process. `torch.distributed.tensor.parallel` does the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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

_Block = tuple[tuple[str, ...], str]
"""The paths of the layers that are split into columns, and of the one behind them, into rows."""

_ATTENTIONS: tuple[_Block, ...] = (  # of Trireme, BERT, Llama, OPT and DistilBERT
    (("query", "key", "value"), "output"),
    (("self.query", "self.key", "self.value"), "output.dense"),
    (("q_proj", "k_proj", "v_proj"), "o_proj"),
    (("q_proj", "k_proj", "v_proj"), "out_proj"),
    (("q_lin", "k_lin", "v_lin"), "out_lin"),
)
_FEED_FORWARD: tuple[_Block, ...] = (  # of Trireme, BERT and Llama
    (("expand",), "contract"),
    (("intermediate.dense",), "output.dense"),
    (("gate_proj", "up_proj"), "down_proj"),
)

# The attributes in which attention modules of different libraries keep the width of a head, their
# numbers of heads, and their width.
_SIZES = ("head_size", "attention_head_size", "head_dim")
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_DIVIDED = (*_COUNTS, *_KEY_COUNTS, "all_head_size")

_ELEMENTWISE = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Identity)

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "column": ColwiseParallel,
    "row": RowwiseParallel,
    "gathered": partial(ColwiseParallel, output_layouts=Replicate()),
}


def tensor_parallel(module: nn.Module, mesh: DeviceMesh, plan: Plan | None = None) -> nn.Module:
    """Splits layers over the processes of a mesh; other layers are whole in each process."""
    size = mesh.size()
    chosen = derive(module, size) if plan is None else resolve(module, plan, size)
    if not chosen:
        raise ConfigurationError(
            f"tensor parallelism: {type(module).__name__} has no linear layer that can be split "
            f"into {size} (one that fuses query, key and value cannot): use --strategy fsdp, which "
            "shards any parameter, or fewer processes"
        )
    for attention in attentions(module):
        if attention.splits.items() <= chosen.items():
            attention.divide_heads(size)
    styles = {name: _STYLES[split]() for name, split in chosen.items()}
    return parallelize_module(module, mesh, styles)


def resolve(module: nn.Module, plan: Plan, size: int) -> dict[str, str]:
    """Returns the split of each module that a plan names."""
    chosen: dict[str, str] = {}
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
        chosen |= dict.fromkeys(matched, split)
    _check(module, chosen, size)
    for attention in attentions(module):
        if attention.splits.items() <= chosen.items():
            attention.check(size)
    return chosen


def derive(module: nn.Module, size: int) -> dict[str, str]:
    """Returns a plan for transformer blocks and chains of linear layers.

    In a chain (an `nn.Sequential`), a linear layer and the next linear layer become column and row
    where only element-wise layers lie between them. A remaining linear layer is gathered.
    Convolutions, recurrent layers, norms and embeddings stay whole.
    """
    chosen: dict[str, str] = {}
    for attention in attentions(module):
        attention.check(size)
        chosen |= attention.splits
    for name, _, block in _blocks(module, _FEED_FORWARD):
        chosen |= _splits(name, block)
    several = tied(module)
    for chain in _chains(module):
        _pair(chain, size, chosen, several)
    _check(module, chosen, size)
    return chosen


def _check(module: nn.Module, chosen: dict[str, str], size: int) -> None:
    several, whole = tied(module), "leave it out of the plan; it stays whole in every process"
    for name, split in chosen.items():
        layer = module.get_submodule(name)
        if isinstance(layer, nn.modules.conv._ConvNd):
            why = (
                " is a convolution, and torch computes convolutions with split channels wrongly: "
                "split the batch instead (--mesh dp=N), or leave it whole"
            )
        elif not isinstance(layer, nn.Linear):
            why = f" is a {type(layer).__name__}, and only nn.Linear layers can be split: {whole}"
        elif id(layer.weight) in several:
            why = f".weight is tied to another layer's, and cannot be split: {whole}"
        elif (features := layer.in_features if split == "row" else layer.out_features) % size:
            side = "input" if split == "row" else "output"
            why = (
                f" has {features} {side} features, which cannot be divided evenly among {size} "
                "processes"
            )
        else:
            continue
        raise ConfigurationError(f"tensor plan: {name}{why}")


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
    """One attention of a model, whose query, key and value are separate layers."""

    name: str
    module: nn.Module
    block: _Block

    @property
    def splits(self) -> dict[str, str]:
        """The split of each layer, `column` or `row`, by the layer's full name."""
        return _splits(self.name, self.block)

    def check(self, size: int) -> None:
        """Checks that the heads can be divided evenly among processes."""
        columns, row = self.block
        called = self.name or f"the {type(self.module).__name__}"
        for column in columns:
            width = _linear_layers(self.module, (column,))[0].out_features
            heads = self._heads(column, width)
            if heads is None:
                raise ConfigurationError(
                    f"tensor parallelism: {called} is attention, and does not give its number of "
                    "heads: add an attribute head_size, the width of one head, or use --strategy "
                    "fsdp"
                )
            if heads % size:
                raise ConfigurationError(
                    f"tensor parallelism: {called} has {heads} heads, which cannot be divided "
                    f"evenly among {size} processes: use a number that divides it"
                )
            # A norm over the width of all heads: each process would hold only some of its inputs.
            split = {path.rpartition(".")[2] for path in (*columns, row)}
            for name, parameter in self._holder.named_parameters() if heads > 1 else ():
                if name.split(".")[0] not in split and parameter.shape == (width,):
                    raise ConfigurationError(
                        f"tensor parallelism: {called}'s {name} applies to all heads at once, and "
                        f"each of {size} processes holds only some of them: use --strategy fsdp"
                    )

    def divide_heads(self, size: int) -> None:
        """Sets the module's number of heads to the number that one of `size` processes holds."""
        holder = self._holder
        for name in _DIVIDED:
            count = getattr(holder, name, None)
            if isinstance(count, int):
                setattr(holder, name, count // size)

    @property
    def _holder(self) -> nn.Module:
        return self.module.get_submodule(self.block[0][0].rpartition(".")[0])

    def _heads(self, column: str, width: int) -> int | None:
        of_keys = _KEY_COUNTS if column != self.block[0][0] else ()
        for name in (*_SIZES, *of_keys, *_COUNTS):
            number = getattr(self._holder, name, None)
            if isinstance(number, int) and number > 0:
                return width // number if name in _SIZES else number
        return None


def attentions(module: nn.Module) -> Iterator[Attention]:
    """Yields each attention module of a model."""
    for name, part, block in _blocks(module, _ATTENTIONS):
        yield Attention(name, part, block)


def _blocks(module: nn.Module, known: Sequence[_Block]) -> Iterator[tuple[str, nn.Module, _Block]]:
    for name, part in module.named_modules():
        for columns, row in known:
            if _linear_layers(part, (*columns, row)):
                yield name, part, (columns, row)


def _splits(name: str, block: _Block) -> dict[str, str]:
    columns, row = block
    prefix = f"{name}." if name else ""
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
