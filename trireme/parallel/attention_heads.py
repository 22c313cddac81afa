"""Finds the attention layers of a model and their number of heads, for tensor parallelism.

Each head stays whole in one process: the matrices of query, key and value are split into columns
between heads, and each process computes attention with its own heads. Shoeybi et al., Megatron-LM
(2019), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from trireme.errors import ConfigurationError

__all__ = ["Attention", "attentions", "fused", "linear_layers"]

_LAYERS = (
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
_WIDTHS = ("all_head_size",)
"""The attributes in which attention modules of different libraries keep their number of heads."""


@dataclass(frozen=True)
class Attention:
    """One attention of a model.

    Attributes:
        name: the name of the attention module.
        module: the attention module.
        columns: the paths in the module to the layers of query, key and value.
        row: the path to the layer behind the heads.
    """

    name: str
    module: nn.Module
    columns: tuple[str, ...]
    row: str

    def splits(self) -> Iterator[tuple[str, str]]:
        """Yields the full name of each layer, with its split: `column` or `row`."""
        prefix = f"{self.name}." if self.name else ""
        for column in self.columns:
            yield prefix + column, "column"
        yield prefix + self.row, "row"

    def check(self, size: int) -> None:
        """Checks that the heads can be divided evenly among processes.

        Args:
            size: the number of processes.

        Raises:
            ConfigurationError: the number of heads is unknown, or is not a multiple of `size`, or a
                parameter applies to all heads at once.
        """
        for column in self.columns:
            width = linear_layers(self.module, (column,))[0].out_features
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
            self._check_whole(width, width // heads, size)

    def divide_heads(self, size: int) -> None:
        """Sets the module's number of heads to the number that one of `size` processes holds."""
        holder = self._holder
        for name in (*_COUNTS, *_KEY_COUNTS, *_WIDTHS):
            count = getattr(holder, name, None)
            if isinstance(count, int):
                setattr(holder, name, count // size)

    @property
    def _called(self) -> str:
        return self.name or f"the {type(self.module).__name__}"

    @property
    def _holder(self) -> nn.Module:
        """The module that computes with the heads: the parent of the query layer."""
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

    def _check_whole(self, width: int, head: int, size: int) -> None:
        """Refuses a norm over the width of all heads, of which each process holds only some."""
        if width == head:
            return
        split = {path.rpartition(".")[2] for path in (*self.columns, self.row)}
        for name, parameter in self._holder.named_parameters():
            if name.split(".")[0] not in split and parameter.shape == (width,):
                raise ConfigurationError(
                    f"tensor parallelism: {self._called}'s {name} applies to all heads at once, "
                    f"and each of {size} processes holds only some of them: use --strategy fsdp"
                )


def attentions(module: nn.Module) -> Iterator[Attention]:
    """Yields each attention module of a model whose query, key and value are separate layers."""
    for name, part in module.named_modules():
        for columns, row in _LAYERS:
            if linear_layers(part, (*columns, row)):
                yield Attention(name, part, columns, row)


def fused(module: nn.Module) -> str | None:
    """Returns the name of the first layer that fuses query, key and value; None for none."""
    for name, part in module.named_modules():
        for inner in _FUSED:
            if isinstance(getattr(part, inner, None), nn.Module | nn.Parameter):
                return f"{name}.{inner}" if name else inner
    return None


def linear_layers(module: nn.Module, paths: tuple[str, ...]) -> list[nn.Linear]:
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
