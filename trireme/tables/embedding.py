"""Embeddings whose rows lie in a sparse table, in the place of those of `torch.nn`.

Only the rows of a batch are at hand, each of them once. The parameter that autograd sees are these
rows; their gradients become the update of the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from trireme.errors import ConfigurationError
from trireme.session.model.extension import ExtensionLayer
from trireme.session.settings import Settings
from trireme.tables.table_spec import Initializer, Optimizer


def check_settings(settings: Settings) -> None:
    """Checks that sparse tables can be trained with the settings of a session."""
    strategy = settings.strategy.name
    for name, is_chosen in (
        (strategy, settings.rule.every is not None),
        ("prefetch", settings.prefetches),
        ("ema", settings.options.ema is not None),
        ("trireme graph", settings.task.draw is not None),
        ("--mesh" if settings.task.servers else f"the strategy {strategy}", settings.backend != ""),
    ):
        if is_chosen:
            raise ConfigurationError(
                f"sparse tables (trireme.Embedding, trireme.ps.connect) under {name} are not "
                "built yet: they work in one process, and with parameter servers (--ps) under "
                "async, ssp and sync"
            )


class TableModule(ExtensionLayer):
    """What `Embedding` and `EmbeddingBag` have in common: a table.

    Args:
        num_embeddings: the number of keys, from 0 on; None for any int64.
        embedding_dim: the number of columns.
        padding_idx: a key whose row is zero and does not change.
        table: the table's name; None for the module's path in the model. Modules of one name share
            one table, and must be alike.
        optimizer: updates the rows; None for that of the session, where a row-wise one equals it:
            SGD without momentum, Adagrad, Adam or SparseAdam, without weight decay.
        initializer: the first values of a row; None for normally distributed ones, as torch's, of a
            seed that follows from the table's name. Rows of two tables with the same initializer,
            its seed included, begin with the same values for the same key.
        dtype: `torch.float32` or `torch.float64`; None for torch's default dtype. `module.double()`
            and `float()` change it, before the session is entered.
        admit_after: at which touch a key gets a row: see `trireme.tables.table_spec.TableSpec`.
        drop_after: after how many steps without a touch a row is dropped; 0 for never.
        ids: batch -> the ids that the module looks up for it, as one tensor. Where it is given, the
            rows of the next batch come with the answer to a push. Otherwise they are requested when
            the module is called.

    Raises:
        ConfigurationError: an argument is out of range.
    """

    kind = "tables"

    def check_job(self, model: nn.Module, settings: Settings) -> None:
        check_settings(settings)
        if next(model.parameters(), None) is None:
            raise ConfigurationError(
                "the model has sparse tables (trireme.Embedding) and no parameter besides, and "
                "torch's optimizers need one: add it, such as a bias, "
                "self.bias = nn.Parameter(torch.zeros(1)). Programs of tables alone may use "
                "trireme.ps.connect"
            )

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        table: str | None = None,
        optimizer: Optimizer | None = None,
        initializer: Initializer | None = None,
        dtype: torch.dtype | None = None,
        admit_after: int = 1,
        drop_after: int = 0,
        ids: Callable[[Any], torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        if num_embeddings is not None and not _is_count(num_embeddings):
            raise ConfigurationError(
                f"num_embeddings={num_embeddings!r}: give an integer above 0, or None for any key"
            )
        if not _is_count(embedding_dim):
            raise ConfigurationError(f"embedding_dim={embedding_dim!r}: give an integer above 0")
        if ids is not None and not callable(ids):
            raise ConfigurationError(
                f"ids={ids!r}: give a function of a batch, such as lambda batch: batch[0]"
            )
        if padding_idx is not None and padding_idx < 0 and num_embeddings is not None:
            padding_idx += num_embeddings  # as torch.nn.Embedding
        ids_end = num_embeddings or 0
        if padding_idx is not None and ids_end and not 0 <= padding_idx < ids_end:
            raise ConfigurationError(f"padding_idx={padding_idx}: ids run from 0 to {ids_end - 1}")
        _check_dtype(dtype := dtype or torch.get_default_dtype())
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = padding_idx
        self.table = table
        self.optimizer = optimizer
        self.initializer = initializer
        self.dtype = dtype
        self.admit_after = admit_after
        self.drop_after = drop_after
        self.ids = ids
        self.trains = True
        self.left_rows = False  # in the table of a session that this module was trained in
        self._forget_session()

    def _forget_session(self) -> None:
        self._source: Any = None
        self._ahead: tuple[Any, Any, Any] | None = None  # ids, their keys, and places among these
        self._find = self._looked_up

    def bind(self, source: Any) -> None:
        """Takes the rows from a source from now on; a session calls it. None for none.

        `torch.compile` leaves the look-up out: it cannot trace it. Loading the compiler only for
        that would take a second in every program.
        """
        self._source = source
        if "torch._dynamo" in sys.modules:
            self._find = torch.compiler.disable(self._looked_up)  # type: ignore[no-untyped-call]

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Sets whether the rows are trained; otherwise no update changes them.

        The rows are no parameters of a module around this one: call it of this module itself.
        """
        self.trains = requires_grad
        return super().requires_grad_(requires_grad)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what `copy.deepcopy` and `pickle` copy: not the session, which has the rows."""
        mine = ("_source", "_ahead", "_find")
        return {name: value for name, value in vars(self).items() if name not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._forget_session()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Takes the dtype of `double()`, `float()` or `to(dtype)`; rows follow ids to a device."""
        found: torch.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        _check_dtype(found)
        if found != self.dtype and self._source is not None:
            raise ConfigurationError(
                f"the rows of this {type(self).__name__} are {self.dtype} in the session's table: "
                f"convert the model to {found} before the session is entered"
            )
        self.dtype = found
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def keys_ahead(self, ids: object) -> Any:
        """Returns each key of the next batch once, and keeps them until the module is called."""
        from trireme.tables.keys import unique  # needs numba

        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):
            what = f"a tensor of {ids.dtype}" if isinstance(ids, torch.Tensor) else repr(ids)
            raise ConfigurationError(
                f"ids= of {type(self).__name__} returns {what:.100}: it returns the ids that the "
                "module looks up for a batch, a tensor of int64 or int32"
            )
        flat = flat_ids(ids).copy()  # the program may change its batch
        self._ahead = flat, *unique(flat)
        return self._ahead[1]

    def _looked_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Returns the rows of a batch, the place of each id among them, and that of the padding."""
        if self._source is None:
            raise ConfigurationError(
                f"{type(self).__name__} has no table: a trireme.Session, or trireme.distribute, "
                "opens it for the model that it is given, and for no copy of it. Compute with that "
                "model, inside the session"
            )
        if ids.dtype not in (torch.int64, torch.int32):
            raise ConfigurationError(
                f"{type(self).__name__} is called with {ids.dtype}: ids are int64 or int32"
            )
        flat = flat_ids(ids)
        if self.num_embeddings is not None and flat.size:
            low, high = int(flat.min()), int(flat.max())
            if low < 0 or high >= self.num_embeddings:
                raise ConfigurationError(
                    f"{type(self).__name__} of {self.num_embeddings} rows is called with the id "
                    f"{low if low < 0 else high}: ids run from 0 to {self.num_embeddings - 1}"
                )
        if self._ahead is not None and np.array_equal(self._ahead[0], flat):
            keys, inverse = self._ahead[1:]
        else:
            from trireme.tables.keys import unique  # needs numba

            keys, inverse = unique(flat)
        rows = self._source.rows(self, keys)
        place: int | None = None
        if self.padding_idx is not None:
            found = np.flatnonzero(keys == self.padding_idx)
            if found.size:
                place = int(found[0])
                with torch.no_grad():
                    rows[place] = 0
        places = torch.from_numpy(inverse).to(ids.device).reshape(ids.shape)
        return rows.to(ids.device), places, place

    def extra_repr(self) -> str:
        """Returns what `repr` shows besides the name."""
        many = "any key" if self.num_embeddings is None else str(self.num_embeddings)
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{many}, {self.embedding_dim}{padding}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(
            f"dtype={dtype!r}: rows are torch.float32 or torch.float64. To compute in lower "
            'precision, leave the model in float32 and give the session precision="bfloat16", or '
            "use torch.autocast"
        )


def _by_kernels(rows: torch.Tensor) -> bool:
    return rows.device.type == "cpu" and not torch.compiler.is_compiling()


def flat_ids(ids: torch.Tensor) -> Any:
    """Returns ids as a contiguous array of int64, of shape (n,)."""
    return np.ascontiguousarray(ids.detach().cpu().reshape(-1).numpy(), np.int64)


class Embedding(TableModule):
    """An embedding in the place of `torch.nn.Embedding`, with its rows in a sparse table.

    See `TableModule` for the arguments.
    """

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the row of each id, int64 or int32, in a further dimension."""
        rows, places, padding = self._find(ids)
        if not _by_kernels(rows):
            return functional.embedding(places, rows, padding_idx=padding)
        from trireme.tables.bags import gather  # needs numba

        return gather(rows, places, padding)


class EmbeddingBag(TableModule):
    """A bag of embeddings in the place of `torch.nn.EmbeddingBag`, with rows in a sparse table.

    Its `mode` is `sum`, `mean` or `max` of the rows of a bag; with `include_last_offset` the
    offsets have one more entry, the number of ids. See `TableModule` for the other arguments.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        mode: Literal["sum", "mean", "max"] = "mean",
        include_last_offset: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, **arguments)
        if mode not in ("sum", "mean", "max"):
            raise ConfigurationError(f"mode={mode!r}: it must be sum, mean or max")
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns one row for each bag, of shape (bags, embedding_dim).

        Args:
            ids: int64 or int32: of shape (bags, n), or of shape (n,) with offsets.
            offsets: where each bag begins, of shape (bags,).
            per_sample_weights: a factor for each id, of its shape; for the mode `sum`.
        """
        rows, places, padding = self._find(ids)
        weights = per_sample_weights
        if self._summed_here(rows, places, weights):
            from trireme.tables.bags import sum_bags  # needs numba

            bounds = self._bounds(places, offsets)
            flat = None if weights is None else weights.reshape(-1)
            return sum_bags(rows, places.reshape(-1), bounds, flat, padding)
        return functional.embedding_bag(
            places,
            rows,
            None if offsets is None else offsets.to(places.dtype),
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )

    def _summed_here(
        self, rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor | None
    ) -> bool:
        """Returns whether `sum_bags` computes the sums: not where torch does more, or refuses."""
        if self.mode != "sum" or not _by_kernels(rows):
            return False
        if weights is None:
            return True
        plain = weights.dtype == rows.dtype and weights.shape == places.shape
        return plain and not weights.requires_grad

    def _bounds(self, places: torch.Tensor, offsets: torch.Tensor | None) -> torch.Tensor:
        """Returns where each bag begins, and where the last one ends, of shape (bags + 1,)."""
        if places.dim() == 2 and offsets is None:
            bags, entries = places.shape
            return torch.arange(bags + 1) * entries
        if places.dim() != 1 or offsets is None or offsets.dim() != 1:
            raise ConfigurationError(
                f"EmbeddingBag is called with ids of shape {tuple(places.shape)} and "
                f"{'no' if offsets is None else tuple(offsets.shape)} offsets: give ids of shape "
                "(bags, n), or of shape (n,) with offsets of shape (bags,)"
            )
        bounds, count = offsets.to(places), len(places)
        if not self.include_last_offset:
            bounds = torch.cat([bounds, bounds.new_tensor([count])])
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != count or (bounds.diff() < 0).any():
            raise ConfigurationError(
                f"EmbeddingBag is called with offsets that do not ascend from 0 to {count}, the "
                "number of ids (accumulate= splits offsets and no ids: give ids of shape (bags, n))"
            )
        return bounds
