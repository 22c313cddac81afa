"""A sparse table in one process: rows by key, made when they are needed, and their updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from trireme.errors import Rejected
from trireme.tables import row_index, row_optimizers
from trireme.tables.bags import gather as gather_rows
from trireme.tables.bags import sum_bags
from trireme.tables.block import Block
from trireme.tables.initializers import FirstValues
from trireme.tables.keys import SLOTS, Counts, Keys, plain, slots_of, split, sum_rows, unique
from trireme.tables.row_index import Addresses, RecentSearches, RowIndex
from trireme.tables.row_optimizers import initial_state, row_optimizer
from trireme.tables.row_storage import RowStorage, headers
from trireme.tables.row_values import begin, gather, search_and_gather, write_marks, write_records
from trireme.tables.table_spec import FLOATS, MOST_STEPS, Optimizer, TableSpec, changed

Rows = npt.NDArray[Any]  # rows, of the dtype of a table and of shape (n, width)

BLOCK_BYTES = 1 << 24  # the most bytes of an exported block, unless one row is larger


class Statistics(NamedTuple):
    """What a table holds."""

    rows: int  # the keys with rows
    waiting: int  # the keys that were touched too seldom to have rows
    bytes: int  # that the table has allocated
    dropped: int  # how many keys were dropped in this process, waiting ones included


class Table:
    """Rows of numbers by 64-bit key.

    A table computes and nothing else: it reads no clock and no file. The same operations in the
    same order give the same rows, bit for bit, on every machine, and whatever part of the keys the
    table holds: a row depends only on the operations on its key. One thread at a time may use a
    table; kernels run without the GIL. `optimizer` has the present hyper-parameters.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.optimizer = spec.optimizer
        self._first = FirstValues.of(spec.initializer, spec.dtype)
        self._state = row_optimizer(spec.optimizer).state(spec.width)
        payload = (spec.width + self._state) * spec.item_size
        self._rows = RowIndex(RowStorage(payload))
        self._waiting = RowIndex(RowStorage(0))
        self._recent = RecentSearches()
        self._dropped = 0
        self._entry_bytes = 24 + payload  # of an exported row

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def statistics(self) -> Statistics:
        """What the table holds by now."""
        indices = (self._rows, self._waiting)
        return Statistics(
            rows=len(self._rows),
            waiting=len(self._waiting),
            bytes=sum(each.bytes + each.storage.bytes for each in indices),
            dropped=self._dropped,
        )

    def bytes_by_slot(self) -> Counts:
        """Returns how many bytes `export` takes for each slot: int64 of shape (SLOTS,)."""
        return self._rows.storage.counts * self._entry_bytes + self._waiting.storage.counts * 24

    def pull(self, keys: Keys) -> Rows:
        """Returns the rows of keys, which may repeat; first values without one. Changes no row."""
        keys = self._checked_keys(keys)
        out = np.empty((keys.size, self.spec.width), self.spec.dtype)
        addresses, missing = self._recent.find(keys), 0
        if addresses is None:
            addresses = np.empty(keys.size, np.uint64)
            missing = search_and_gather(keys, self._rows.places, addresses, out, self._first)
        else:
            gather(addresses, keys, out, self._first)
        if not missing:
            self._recent.keep(keys, addresses)
        return out

    def push(
        self, keys: Keys, updates: Rows, *, step: int, hyper: Mapping[str, float] | None = None
    ) -> None:
        """Applies updates to the rows of keys, and makes the rows of those that are admitted.

        An update is a touch of its key. The touch number `admit_after` makes the row, and its
        update is the first that is applied to it; those of earlier touches are only counted. Each
        key is there once: `unique` and `sum_rows` make them so. The global `step` is from 1 on, and
        `hyper` has hyper-parameters that have changed since the last push. Where an argument is
        wrong, the table is full, or there is no memory for new rows, nothing has changed.

        Raises:
            Rejected: keys, updates or step are not as they should be, or a slot is full.
            ConfigurationError: the optimizer has no such hyper-parameter, or not of this value.
            MemoryError: there is no memory for new rows.
        """
        keys = self._checked_keys(keys)
        shape = (keys.size, self.spec.width)
        if updates.dtype != self.spec.dtype or updates.shape != shape:
            raise Rejected(
                f"{self._name}: updates are of {updates.dtype} and of shape {updates.shape}; for "
                f"{keys.size} keys they should be of {self.spec.dtype} and of shape {shape}"
            )
        self._check_step(step)
        updates = plain(updates)
        optimizer = changed(self.optimizer, hyper) if hyper else self.optimizer
        known = self._recent.find(keys)
        addresses, missing = self._rows.find(keys) if known is None else (known, 0)
        if missing:
            self._admit(keys, addresses, step, optimizer)
            if self.spec.admit_after > 1:
                have_rows = np.flatnonzero(addresses)
                addresses, updates = addresses[have_rows], updates[have_rows]
        self.optimizer = optimizer
        row_optimizers.apply(optimizer, addresses, updates, step)

    def check_room(self, keys: Keys) -> None:
        """Raises Rejected where a slot has no room for those of some keys that have no row."""
        indices = (self._rows, self._waiting) if self.spec.admit_after > 1 else (self._rows,)
        for each in indices:
            if int(each.storage.counts.max()) + keys.size > row_index.MOST_RECORDS:
                addresses, _ = each.find(keys)
                each.check_room(keys[addresses == 0])

    def drop_unused(self, step: int) -> int:
        """Drops keys that no update touched in the last `drop_after` steps; returns how many."""
        self._check_step(step)
        if not self.spec.drop_after:
            return 0
        oldest = step - self.spec.drop_after + 1
        dropped = self._rows.drop(oldest) + self._waiting.drop(oldest)
        self._dropped += dropped
        self._recent.clear()
        return dropped

    def _admit(self, keys: Keys, addresses: Addresses, step: int, optimizer: Optimizer) -> None:
        """Counts a touch of keys without rows; makes rows and writes their addresses."""
        absent = np.flatnonzero(addresses == 0)
        found, _ = self._waiting.find(keys[absent])
        known, touches = np.flatnonzero(found), np.zeros(absent.size, np.int64)
        touches[known] = headers(found[known])[2]
        ready = touches + 1 >= self.spec.admit_after
        admitted, rest = absent[ready], absent[~ready]
        self._rows.reserve(keys[admitted])
        self._waiting.reserve(keys[rest[touches[~ready] == 0]])
        waiting, _ = self._waiting.add(keys[rest], np.zeros(rest.size, np.uint64))
        write_marks(waiting, np.full(rest.size, step), touches[~ready] + 1)
        self._waiting.remove(keys[admitted])
        marks = touches[ready].astype(np.uint64)  # the update counts its own touch
        addresses[admitted] = self._make(keys[admitted], marks, optimizer)

    def _make(self, keys: Keys, marks: npt.NDArray[np.uint64], optimizer: Optimizer) -> Addresses:
        addresses, fresh = self._rows.add(keys, marks)
        initial = np.full(self._state, initial_state(optimizer), self.spec.dtype)
        begin(addresses, keys, fresh, self.spec.width, initial, self._first)
        return addresses

    def block(self, **arrays: npt.NDArray[Any]) -> Block:
        """Returns a block of this table with some arrays; the others are empty."""
        spec = self.spec
        rows = np.empty((0, spec.width), spec.dtype)
        states = np.empty((0, self._state), spec.dtype)
        return Block(optimizer=self.optimizer, **{"rows": rows, "states": states, **arrays})

    def export(
        self, *, slots: Iterable[int] = range(SLOTS), block_bytes: int = BLOCK_BYTES
    ) -> Iterator[Block]:
        """Yields what the table holds of some slots, block by block: first rows, then other keys.

        A table of the same specification that loads all blocks in this order continues as this
        one, bit for bit. The table must not change meanwhile.
        """
        slots, most = list(slots), max(1, block_bytes // self._entry_bytes)
        for addresses in self._rows.storage.records(slots, most):
            named = dict(zip(("keys", "steps", "touches"), headers(addresses), strict=True))
            width = self.spec.width
            records = np.empty((addresses.size, width + self._state), self.spec.dtype)
            gather(addresses, named["keys"], records, self._first)
            rows, states = map(plain, (records[:, :width], records[:, width:]))
            yield self.block(rows=rows, states=states, **named)
        for addresses in self._waiting.storage.records(slots, max(1, block_bytes // 24)):
            names = ("waiting_keys", "waiting_steps", "waiting_touches")
            yield self.block(**dict(zip(names, headers(addresses), strict=True)))

    def load(self, block: Block) -> None:
        """Takes a block over: sets its rows and waiting keys.

        What the block has of a key replaces what the table has of it. A block of another kind of
        table is Rejected, and nothing has changed.
        """
        block.check(self.block())
        block = block.plain()
        self._rows.reserve(block.keys)
        self._waiting.reserve(block.waiting_keys)
        self._recent.clear()
        self.optimizer = block.optimizer
        for index, loaded in ((self._rows, block.waiting_keys), (self._waiting, block.keys)):
            index.remove(loaded)
        self._rows.reserve(block.keys)  # removals may have given room back
        self._waiting.reserve(block.waiting_keys)
        addresses = self._make(block.keys, np.zeros(block.keys.size, np.uint64), self.optimizer)
        write_records(addresses, np.hstack([block.rows, block.states]))
        write_marks(addresses, block.steps, block.touches)
        waiting, _ = self._waiting.add(
            block.waiting_keys, np.zeros(block.waiting_keys.size, np.uint64)
        )
        write_marks(waiting, block.waiting_steps, block.waiting_touches)

    def remove(self, slots: Iterable[int]) -> None:
        """Forgets all of some slots, which are now elsewhere; they do not count as dropped."""
        self._recent.clear()
        for slot in slots:
            self._rows.clear(slot)
            self._waiting.clear(slot)

    @property
    def _name(self) -> str:
        return f"table {self.spec.name!r}"

    def _checked_keys(self, keys: Keys) -> Keys:
        if keys.dtype != np.int64 or keys.ndim != 1:
            raise Rejected(
                f"{self._name}: keys are of {keys.dtype} and of shape {keys.shape}; they should be "
                "of int64 and of shape (n,)"
            )
        return plain(keys)

    def _check_step(self, step: int) -> None:
        if not 1 <= step <= MOST_STEPS:
            raise Rejected(f"{self._name}: the step is {step}; it is from 1 to {MOST_STEPS}")


def prepare(spec: TableSpec) -> None:
    """Compiles the kernels of a table (7 s), or loads them from the cache (0.5 s)."""
    table = Table(replace(spec, width=1, admit_after=1, drop_after=1))
    keys, inverse = unique(np.arange(2))
    rows = table.pull(keys)
    for _ in range(2):  # the second time their records are known
        table.push(keys, rows, step=1)
        rows = table.pull(keys)
    for block in list(table.export()):
        table.load(block)
    table.drop_unused(2)
    slots_of(split(keys, np.zeros(SLOTS, np.int64), 1)[0])
    sum_rows(rows, inverse, 2)
    if spec.dtype in FLOATS:
        leaf, places = torch.from_numpy(rows).requires_grad_(), torch.from_numpy(inverse)
        with torch.enable_grad():
            bags = (sum_bags(leaf, places, places, weights) for weights in (None, leaf[:, 0]))
            for output in (gather_rows(leaf, places), *bags):
                output.sum().backward()  # type: ignore[no-untyped-call]
