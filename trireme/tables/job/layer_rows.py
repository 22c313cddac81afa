"""The rows of a model's sparse tables in a worker: fetched for a batch, and updated after it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from trireme.errors import ConfigurationError
from trireme.ps.optimizers import members
from trireme.ps.row_messages import RowKeys, RowUpdates, data_of, raw
from trireme.ps.table_spec import (
    SGD,
    Adagrad,
    Initializer,
    Normal,
    Optimizer,
    SparseAdam,
    TableSpec,
)
from trireme.session.model.table_layer import Fetch, TableRows


class Layer(Protocol):
    """What rows need of a layer: see `trireme.tables.embedding.TableModule`."""

    table: str | None
    embedding_dim: int
    optimizer: Optimizer | None
    initializer: Initializer | None
    dtype: torch.dtype
    admit_after: int
    drop_after: int
    ids: Callable[[Any], torch.Tensor] | None
    training: bool
    trains: bool
    left_rows: bool

    def bind(self, source: Any) -> None:
        """Takes the rows from a source from now on; None for none."""

    def keys_ahead(self, ids: torch.Tensor) -> Any:
        """Returns the keys of the ids of the next batch."""


class LayerRows(TableRows):
    """The rows that a worker computes with.

    Attributes:
        specs: the same.
        wanted: the keys whose rows the next push is to bring.
        left: the tables whose modules were trained in an earlier session, which had their rows.
    """

    def __init__(
        self,
        specs: Sequence[TableSpec],
        places: dict[Layer, int],
        follows: Iterable[int],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.specs = tuple(specs)
        self._places = places
        self._follows = frozenset(follows)
        self._optimizer = optimizer
        self._fetch: Fetch | None = None
        self._taken: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        self.wanted: tuple[RowKeys, ...] = ()
        self._brought: dict[int, tuple[Any, Any]] = {}  # keys and rows, by table
        self._summed: dict[int, tuple[Any, Any]] | None = None  # of `_taken`, after backward
        self._updated = False
        self.left = sorted({specs[at].name for module, at in places.items() if module.left_rows})
        for module in places:
            module.bind(self)

    def open(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def close(self) -> None:
        self._fetch = None
        for module in self._places:
            module.left_rows |= self._updated

    def rows(self, module: Layer, keys: Any) -> torch.Tensor:
        """Returns the rows of distinct keys; see `RowSource`."""
        place = self._places[module]
        if self._fetch is None:
            raise ConfigurationError(
                f"the table {self.specs[place].name!r} is open inside the session only: compute "
                "with the model inside `with session:`"
            )
        found = self._brought_rows(place, keys) if module.training else None
        if found is None:
            (found,) = self._fetch([RowKeys(place, raw(keys))])
        rows = torch.from_numpy(np.require(found, self.specs[place].dtype, ["C", "W"]))
        if torch.is_grad_enabled() and module.trains:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(partial(self._take, place, keys))  # type: ignore[no-untyped-call]
        return rows

    def _take(self, place: int, keys: Any, rows: torch.Tensor) -> None:
        """Takes rows into the step; backward calls it when it has computed their gradients."""
        taken = self._taken.setdefault(place, [])
        if not any(rows is known for _, known in taken):
            taken.append((keys, rows))
        self._summed = None

    def forget(self) -> None:
        """Drops the gradients: those of the step before, or where they are not to be used."""
        for _, rows in itertools.chain.from_iterable(self._taken.values()):
            rows.grad = None
        self._taken.clear()
        self._summed = None

    @property
    def looks_ahead(self) -> bool:
        """Whether the ids of the next batch are known."""
        return any(module.ids is not None for module in self._places)

    def expect(self, data: Any) -> None:
        """Takes the next batch, whose rows the next push is to bring; None for none."""
        from trireme.tables.keys import unique

        keys: dict[int, list[Any]] = {}
        for module, place in self._places.items() if data is not None else ():
            if module.ids is not None:
                keys.setdefault(place, []).append(module.keys_ahead(module.ids(data)))
        self.wanted = tuple(
            RowKeys(place, raw(found[0] if len(found) == 1 else unique(np.concatenate(found))[0]))
            for place, found in sorted(keys.items())
        )

    def bring(self, rows: Sequence[Any]) -> None:
        """Takes the rows that a push has brought; none where it has brought none."""
        self._brought = {
            each.table: (np.frombuffer(data_of(each.keys), np.int64), found)
            for each, found in zip(self.wanted, rows, strict=False)
        }

    def _brought_rows(self, place: int, keys: Any) -> Any:
        """Returns rows that the last push has brought; None unless it has brought all of them."""
        known, rows = self._brought.get(place, (None, None))
        if known is None or not known.size:
            return None
        if np.array_equal(known, keys):
            return rows.copy()  # it may be asked for again
        order = np.argsort(known)
        places = order[np.minimum(np.searchsorted(known, keys, sorter=order), known.size - 1)]
        return rows[places] if np.array_equal(known[places], keys) else None

    def updates(self) -> tuple[RowUpdates, ...]:
        self._updated |= bool(self._taken)
        return tuple(
            RowUpdates(place, raw(keys), raw(gradients), self._rate(place))
            for place, (keys, gradients) in self._gradients().items()
        )

    def keys(self) -> dict[str, Any]:
        """Returns the keys of this step, each once, by the name of the table."""
        return {self.specs[place].name: keys for place, (keys, _) in self._gradients().items()}

    def pull(self, table: str, keys: Any) -> torch.Tensor:
        """Returns the rows of keys of a table, of shape (n, width); the session must be entered."""
        assert self._fetch is not None
        (place,) = (at for at, spec in enumerate(self.specs) if spec.name == table)
        (found,) = self._fetch([RowKeys(place, keys.tobytes())])
        return torch.from_numpy(np.array(found, self.specs[place].dtype))

    def square(self) -> float:
        """Returns the squared L2 norm of the gradients of this step."""
        return sum(
            float(np.square(gradients, dtype=np.float64).sum())
            for _, gradients in self._gradients().values()
        )

    def scale(self, factor: float) -> None:
        for _, gradients in self._gradients().values():
            gradients *= gradients.dtype.type(factor)

    def _gradients(self) -> dict[int, tuple[Any, Any]]:
        """Returns the keys of this step, each once, and their gradients, by table."""
        if self._summed is not None:
            return self._summed
        from trireme.tables.keys import sum_rows, unique

        self._summed = {}
        for place, taken in sorted(self._taken.items()):
            several = [
                (k, rows.grad.detach().numpy()) for k, rows in taken if rows.grad is not None
            ]
            keys = np.concatenate([keys for keys, _ in several])
            gradients = np.concatenate([gradients for _, gradients in several])
            if len(several) > 1:
                keys, inverse = unique(keys)
                gradients = sum_rows(np.ascontiguousarray(gradients), inverse, keys.size)
            self._summed[place] = keys, gradients
        return self._summed

    def _rate(self, place: int) -> float | None:
        if place not in self._follows:
            return None
        return float(members(self._optimizer)[0].param_groups[0]["lr"])


def rows_of_layers(layers: Mapping[str, Layer], optimizer: torch.optim.Optimizer) -> LayerRows:
    """Returns the rows of a model's layers, by their paths in it."""
    specs: dict[str, TableSpec] = {}
    places: dict[Layer, int] = {}
    follows = set()
    for path, module in layers.items():
        name = path if module.table is None else module.table
        if len(members(optimizer)) > 1:  # rows belong to none of them: each would update them
            raise ConfigurationError(
                f"the model has the sparse table {name!r}, and the program several optimizers: "
                "which of them updates the rows cannot be told yet. Give one optimizer, with a "
                "parameter group for each learning rate, or use torch.nn.Embedding"
            )
        spec = TableSpec(
            name,
            module.embedding_dim,
            module.optimizer or _row_optimizer(name, optimizer),
            str(module.dtype).removeprefix("torch."),
            module.initializer or Normal(seed=_seed_of(name)),
            module.admit_after,
            module.drop_after,
        )
        known = specs.setdefault(name, spec)
        if known != spec:
            raise ConfigurationError(
                f"two modules share the table {name!r} and differ: {known} and {spec}"
            )
        places[module] = list(specs).index(name)
        if module.optimizer is None:
            follows.add(places[module])
    return LayerRows([*specs.values()], places, follows, optimizer)


def _seed_of(table: str) -> int:
    """Returns the seed of a table's first values, another one for each name.

    With one seed for all, the user and the item of the same key would begin with the same row.
    """
    digest = hashlib.blake2b(str(table).encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _row_optimizer(table: str, optimizer: torch.optim.Optimizer) -> Optimizer:
    """Returns the row optimizer that equals the program's optimizer."""
    (only,) = members(optimizer)
    group = only.param_groups[0]
    kind, plain = type(only), not group.get("weight_decay") and not group.get("maximize")
    if plain:
        if kind is torch.optim.SGD and not group["momentum"]:
            return SGD(float(group["lr"]))
        if kind is torch.optim.Adagrad and not group["lr_decay"]:
            return Adagrad(float(group["lr"]), group["eps"], group["initial_accumulator_value"])
        lazy = kind is torch.optim.SparseAdam or (
            kind in (torch.optim.Adam, torch.optim.AdamW) and not group["amsgrad"]
        )
        if lazy:
            beta1, beta2 = group["betas"]
            return SparseAdam(float(group["lr"]), beta1, beta2, group["eps"])
    raise ConfigurationError(
        f"the table {table!r} needs an optimizer of its own: {kind.__name__} as it is set up has "
        "no row-wise form. Give one, such as Embedding(..., optimizer=trireme.ps.table_spec.Adagrad"
        "(lr=0.1)); SGD without momentum, Adagrad and Adam without weight decay have one"
    )
