"""The rows of a model's sparse tables in a worker: fetched for a batch, and updated after it."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from trireme.errors import ConfigurationError
from trireme.ps.optimizers import members
from trireme.session.model.extension import Fetch
from trireme.tables.embedding import TableModule
from trireme.tables.job.requests import RowKeys, RowRequest, Rows, RowUpdates
from trireme.tables.job.table_extension import TableExtension
from trireme.tables.keys import Keys, sum_rows, unique
from trireme.tables.table_spec import SGD, Adagrad, Normal, Optimizer, SparseAdam, TableSpec


class LayerRows(TableExtension):
    """The rows that a worker computes with."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        places: dict[TableModule, int],
        follows: Iterable[int],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.specs = tuple(specs)
        self.looks_ahead = any(module.ids is not None for module in places)
        self._places = places
        self._follows = frozenset(follows)
        self._optimizer = optimizer
        self._fetch: Fetch | None = None
        self._taken: dict[int, list[tuple[Keys, torch.Tensor]]] = {}
        self._wanted: tuple[RowKeys, ...] = ()
        self._brought: dict[int, tuple[Keys, Rows]] = {}  # by table
        self._summed: dict[int, tuple[Keys, Rows]] | None = None  # of `_taken`, after backward
        self._updated = False
        for module in places:
            module.bind(self)

    def open(self, fetch: Fetch, step: int) -> str:
        self._fetch = fetch
        left = sorted(
            {self.specs[at].name for layer, at in self._places.items() if layer.left_rows}
        )
        if not left or step:
            return ""
        return (
            f"the sparse tables {', '.join(left)} begin anew, and the parameters where an earlier "
            "session of this program has left them: rows are in its table alone. Give both one "
            "run_dir, and this one a larger max_steps, to go on"
        )

    def close(self) -> None:
        self._fetch = None
        for module in self._places:
            module.left_rows |= self._updated

    def rows(self, module: TableModule, keys: Keys) -> torch.Tensor:
        """Returns the rows of distinct keys."""
        place = self._places[module]
        if self._fetch is None:
            raise ConfigurationError(
                f"the table {self.specs[place].name!r} is open inside the session only: compute "
                "with the model inside `with session:`"
            )
        found = self._brought_rows(place, keys) if module.training else None
        if found is None:
            (found,) = self._fetch(RowRequest(self.specs, wanted=[RowKeys(place, keys)]))
        rows = torch.from_numpy(found)
        if torch.is_grad_enabled() and module.trains:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(partial(self._take, place, keys))  # type: ignore[no-untyped-call]
        return rows

    def _take(self, place: int, keys: Keys, rows: torch.Tensor) -> None:
        taken = self._taken.setdefault(place, [])
        if not any(rows is known for _, known in taken):
            taken.append((keys, rows))
        self._summed = None

    def forget(self) -> None:
        for _, rows in itertools.chain.from_iterable(self._taken.values()):
            rows.grad = None
        self._taken.clear()
        self._summed = None

    def expect(self, data: Any) -> None:
        keys: dict[int, list[Keys]] = {}
        for module, place in self._places.items() if data is not None else ():
            if module.ids is not None:
                keys.setdefault(place, []).append(module.keys_ahead(module.ids(data)))
        self._wanted = tuple(
            RowKeys(place, found[0] if len(found) == 1 else unique(np.concatenate(found))[0])
            for place, found in sorted(keys.items())
        )

    def request(self) -> RowRequest:
        self._updated |= bool(self._taken)
        rate = float(members(self._optimizer)[0].param_groups[0]["lr"])
        updates = [
            RowUpdates(place, keys, gradients, rate if place in self._follows else None)
            for place, (keys, gradients) in self._gradients().items()
        ]
        return RowRequest(self.specs, updates, self._wanted)

    def bring(self, values: Sequence[Rows] | None) -> None:
        pairs = zip(self._wanted, values or (), strict=False)
        self._brought = {each.table: (each.keys, rows) for each, rows in pairs}

    def _brought_rows(self, place: int, keys: Keys) -> Rows | None:
        """Returns rows that the last push has brought; None unless it has brought all of them."""
        known, rows = self._brought.get(place, (None, None))
        if known is None or rows is None or not known.size:
            return None
        if np.array_equal(known, keys):
            return rows.copy()  # it may be asked for again
        order = np.argsort(known)
        places = order[np.minimum(np.searchsorted(known, keys, sorter=order), known.size - 1)]
        return rows[places] if np.array_equal(known[places], keys) else None

    def square(self) -> float:
        return sum(
            float(np.square(gradients, dtype=np.float64).sum())
            for _, gradients in self._gradients().values()
        )

    def scale(self, factor: float) -> None:
        for _, gradients in self._gradients().values():
            gradients *= gradients.dtype.type(factor)

    def _gradients(self) -> dict[int, tuple[Keys, Rows]]:
        """Returns the keys of this step, each once, and their gradients, by table."""
        if self._summed is not None:
            return self._summed
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


def rows_of_layers(
    layers: Mapping[str, TableModule], optimizer: torch.optim.Optimizer
) -> LayerRows:
    """Returns the rows of a model's layers, by their paths in it."""
    specs: dict[str, TableSpec] = {}
    places: dict[TableModule, int] = {}
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
    """Returns another seed for each table: else rows of the same key would begin alike."""
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
        "no row-wise form. Give one, such as Embedding(..., optimizer=trireme.tables.table_spec."
        "Adagrad(lr=0.1)); SGD without momentum, Adagrad and Adam without weight decay have one"
    )
