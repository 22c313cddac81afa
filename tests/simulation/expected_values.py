"""What one copy of a shard should hold, kept by watching what its optimizer is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch

from tests.simulation.dealing import Dealing, Violation
from tests.simulation.schedule import KEYS, POISON
from trireme.cluster.view import View
from trireme.ps.extension import EXTRA
from trireme.ps.extra import bytes_in
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout, Part
from trireme.ps.messages import GroupSpec, OptimizerSpec, Push, Span
from trireme.ps.shard.push_table import Decided
from trireme.ps.shard.values.segment_optimizer import SegmentOptimizer
from trireme.ps.snapshot_messages import Load, TensorSpec

PushId = tuple[int, int, int, int]
"""A push by worker, incarnation, sequence, and the life of the job in which it was made."""

Vectors = tuple[np.ndarray[Any, np.dtype[Any]], ...]
"""One array for each flat vector, or for one server's part of each."""


BEGUN = 2
"""How many vectors a model has before a parameter is added."""

History = dict[int, tuple[Vectors, Vectors]]
"""The values, and the momentum, after each step."""


@dataclass(frozen=True, slots=True)
class Made:
    """A push as its worker made it: the gradient is that of all servers together."""

    push: Push
    spans: tuple[Span, ...]
    gradient: Vectors


class Account:
    """One copy of a shard, as it should be.

    Args:
        shard: the shard's number.
        where: names the copy in messages.
        momentum: SGD's.
        made: all pushes, in the order in which they were made.

    Attributes:
        step: the global step.
        loaded_in: the view in which its first values were loaded; 0 before.
        values, velocity: what the last step left: the parameters and the momentum.
        history: the same after each step.
        eras: the numbers, parts and histories of the shards that it has gone on from, and its own;
            a shard has a higher number than those that it goes on from.
        applied: the step that each applied push made or belongs to.
        verdicts: the first verdict on each push.
        refused: the pushes that could not be applied.
        view: the newest that the copy has taken.
        retired: the workers that train no more.
        clocks: decided pushes of each (worker, incarnation) that counts for the staleness bound.
        given: what the optimizer was given and is not yet explained, with what that left; None for
            an update that it, or a table, could not apply.
        rate: the learning rate that the optimizer has been told.
        used_rate: that of the last step which changed the values.
        dealing: where each example is; only that of shard 0 counts.
        inherited: by worker: how many updates are in the values that were loaded.
        rows: by key: the rows of the table, where there is one.
        rows_after: the same after each step.
    """

    def __init__(
        self, shard: int, where: str, momentum: float, made: Mapping[PushId, Made]
    ) -> None:
        self.shard = shard
        self.where = where
        self.step = self.loaded_in = 0
        self.values: Vectors | None = None
        self.velocity: Vectors = ()
        self.history: History = {}
        self.eras: list[tuple[tuple[int, int], Sequence[Part], History]] = []
        self.applied: dict[PushId, int] = {}
        self.verdicts: dict[PushId, Decided] = {}
        self.refused: set[PushId] = set()
        self.view = View(0, (), ())
        self.retired: set[int] = set()
        self.clocks: dict[tuple[int, int], int] = {}
        self.rate = self.used_rate = 1.0
        self.given: list[tuple[Vectors, Vectors, Vectors] | None] = []
        self.dealing = Dealing(())
        self.inherited: Mapping[int, int] = {}
        self.rows: dict[int, int] = {}
        self.rows_after: dict[int, dict[int, int]] = {}
        self.added: set[float] = set()
        self.fewest = 0  # vectors in a copy of this event, which may precede what it adds
        self._slots = (0, 0)
        self._parts: Sequence[Part] = ()
        self._momentum = momentum
        self._made = made
        self._indexed = 0
        self._by_bytes: dict[bytes, PushId] = {}

    def lay_out(self, layout: Layout) -> None:
        """Learns what lies where."""
        self._parts = layout.parts(self.shard)
        bounds = layout.spec.bounds
        self._slots = (
            bounds[self.shard] * 256 // bounds[-1],
            bounds[self.shard + 1] * 256 // bounds[-1],
        )
        self._indexed = 0
        self._by_bytes.clear()
        # One that begins without values comes behind shards of earlier generations, whose first
        # values are loaded again.
        generation, count = max((number for number, _, _ in self.eras), default=(0, 0))
        number = max(generation, self.view.generation), count + 1
        self.eras.append((number, self._parts, self.history))

    def grow(self, layout: Layout, values: Sequence[torch.Tensor]) -> None:
        """Parameters may have been added: they lie in vectors behind the others."""
        if self.values is None or len(values) == len(self.values):
            return
        added = tuple(tensor.numpy().copy() for tensor in values[len(self.values) :])
        zeros = tuple(np.zeros_like(each) for each in added)
        self.added = {float(value) for each in added for value in each}
        self.fewest = len(self.values)
        self.values, self.velocity = self.values + added, self.velocity + zeros
        self.given = [
            each and (each[0] + zeros, each[1] + added, each[2] + zeros) for each in self.given
        ]
        for step, (then, velocity) in self.history.items():
            self.history[step] = then + added, velocity + zeros
        self.lay_out(layout)

    @property
    def live(self) -> set[tuple[int, int]]:
        """The (worker, incarnation) pairs of the copy's view."""
        return {(entry.index, entry.incarnation) for entry in self.view.workers}

    def fail(self, what: str) -> None:
        """Reports a violation at this copy."""
        raise Violation(f"{self.where} at step {self.step}: {what}")

    def quiet(self) -> Account:
        """Returns a copy of all that outlives the shard when the shards are divided anew."""
        kept = Account(self.shard, self.where, self._momentum, self._made)
        kept.step, kept.values, kept.velocity = self.step, self.values, self.velocity
        kept.rate = kept.used_rate = self.rate
        kept.history, kept.eras, kept._parts = self.history, [*self.eras], self._parts
        kept.applied, kept.verdicts = dict(self.applied), dict(self.verdicts)
        kept.refused = set(self.refused)
        kept.view, kept.retired, kept.clocks = self.view, set(self.retired), dict(self.clocks)
        kept.dealing, kept.inherited = self.dealing.copy(), self.inherited
        kept.rows, kept._slots = dict(self.rows), self._slots
        return kept

    def go_on_from(self, before: Sequence[Account], layout: Layout) -> None:
        """Begins where other shards have stopped, in the order of their slots."""
        first = before[0]
        assert first.values is not None
        eras = {id(era[2]): era for account in before for era in account.eras}  # shared by siblings
        self.eras = sorted(eras.values(), key=lambda era: era[0])
        self.step = max(account.step for account in before)
        self.applied, self.verdicts = dict(first.applied), dict(first.verdicts)
        self.refused = set(first.refused)
        self.retired, self.clocks = set(first.retired), dict(first.clocks)
        self.view, self.dealing = first.view, first.dealing.copy()
        self.inherited = first.inherited
        self.rate = self.used_rate = first.rate
        self.lay_out(layout)
        bases = [part.start for part in first._parts]
        self.values, self.velocity = (
            tuple(
                np.concatenate([vectors[i] for vectors in each])[p.start - base : p.stop - base]
                for i, (p, base) in enumerate(zip(self._parts, bases, strict=True))
            )
            for each in ([a.values or () for a in before], [a.velocity for a in before])
        )
        self.history[self.step] = (self.values, self.velocity)
        self.rows = {
            key: count
            for account in before
            for key, count in account.rows.items()
            if self._has(key)
        }
        self.rows_after[self.step] = dict(self.rows)

    def _has(self, key: int) -> bool:
        """Returns whether the row of a key is this shard's."""
        return self._slots[0] <= _hash(key) >> 56 < self._slots[1]

    def same_as(self, other: Account) -> bool:
        """Returns whether another copy of the shard is in the same state."""
        mine, theirs = self.values or (), other.values or ()
        same = (self.step, self.applied, self.verdicts, len(mine)) == (
            other.step,
            other.applied,
            other.verdicts,
            len(theirs),
        )
        return same and all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))

    # -- what happens to the copy -----------------------------------------------------------------

    def take(self, view: View) -> None:
        """It takes a view."""
        before, self.view = self.live, view
        staying = self.live & before
        self.retired &= {worker for worker, _ in staying}

    def count(self, members: Sequence[tuple[int, int]]) -> None:
        """These workers count from now on: newcomers start at the slowest of those who stay."""
        start = min((self.clocks[w] for w in members if w in self.clocks), default=0)
        self.clocks = {who: self.clocks.get(who, start) for who in members}

    def decided(self, who: PushId) -> None:
        """A push is decided, whose worker may count."""
        if who[:2] in self.clocks:
            self.clocks[who[:2]] += 1

    def load(self, load: Load, tensors: Sequence[tuple[TensorSpec, torch.Tensor]]) -> None:
        """Values are loaded, perhaps in place of those of a chief that did not go on."""
        self.step, self.loaded_in = load.step, load.view
        self.inherited = {row.worker: row.applied for row in load.workers}
        self.dealing = Dealing(load.consumed)
        self.values = self._joined("values", tensors)
        self.velocity = self._joined("state/momentum_buffer", tensors)
        self.history.clear()
        self.history[load.step] = (self.values, self.velocity)
        self.rows = rows_in(tensors)
        self.rows_after = {self.step: dict(self.rows)}

    def part(self, vectors: Vectors) -> Vectors:
        """Returns this server's part of whole vectors."""
        pairs = zip_longest(vectors, self._parts)
        return tuple(np.zeros(p.length) if v is None else v[p.start : p.stop] for v, p in pairs)

    def give(self, gradients: Sequence[torch.Tensor], *, lacks: int = 0) -> None:
        """The optimizer is given a gradient: the values must change so, but of the last vectors."""
        given = tuple(gradient.numpy().copy() for gradient in gradients)
        if self.values is None:
            self.fail("an update came before there were values")
            return
        left = self.values[len(given) - lacks :], self.velocity[len(given) - lacks :]
        self.velocity = tuple(
            v * v.dtype.type(self._momentum) + g for v, g in zip(self.velocity, given, strict=True)
        )
        self.values = tuple(
            x - v * v.dtype.type(self.rate) for x, v in zip(self.values, self.velocity, strict=True)
        )
        if lacks:
            self.values = self.values[:-lacks] + left[0]
            self.velocity = self.velocity[:-lacks] + left[1]
        self.given.append((given, self.values, self.velocity))
        self.used_rate = self.rate

    def refuse_poison(self) -> None:
        """An update is about to be applied: raises if none can be, at the present learning rate."""
        if self.rate == POISON:
            self.given.append(None)
            raise ValueError("poison")

    def identify(self, given: Vectors) -> PushId:
        """Returns whose push a gradient is."""
        for who in islice(self._made, self._indexed, None):
            gradient = self._made[who].gradient
            if len(gradient) <= len(
                self._parts
            ):  # else of parameters that are yet to be added here
                self._by_bytes[_as_bytes(self.part(gradient))] = who
        self._indexed = len(self._made)
        who = self._by_bytes.get(_as_bytes(given))
        if who is None:
            raise Violation(f"{self.where} at step {self.step}: nobody has pushed what was applied")
        return who

    def advance(self, *, given: bool, steps: int = 1) -> Vectors:
        """One more update is complete.

        Args:
            given: whether the optimizer was given something for it.
            steps: how many steps it makes.

        Returns:
            What it was given; nothing if not.
        """
        gradient: Vectors = ()
        values, velocity = self.history[self.step]
        if given:
            if not self.given:
                self.fail("a step is said to be complete, and nothing was applied")
            gradient, values, velocity = self.given.pop(0) or ((), values, velocity)
        self.step += steps
        self.history[self.step] = (values, velocity)
        self.rows_after[self.step] = dict(self.rows)
        return gradient

    def apply(self, who: PushId) -> None:
        """A push turns out to be in the values of the present step."""
        if who in self.applied:
            self.fail(f"push {who} was applied twice: at steps {self.applied[who]} and {self.step}")
        self.applied[who] = self.step
        push = self._made[who].push
        keys, counts = extra_of(push) if push.weight > 0 else ((), ())
        for key, count in zip(keys, counts, strict=True):
            if self._has(key):
                self.rows[key] = self.rows.get(key, 0) + count
        self.rows_after[self.step] = dict(self.rows)

    # -- what the copy says -----------------------------------------------------------------------

    def check_values(self, payload: Sequence[torch.Tensor]) -> None:
        """Checks that an answer carries the present values."""
        assert self.values is not None
        if not BEGUN <= len(payload) <= len(self.values):
            self.fail(f"an answer carries {len(payload)} vectors")
        for told, expected in zip(payload, self.values, strict=False):
            if not np.array_equal(told.numpy(), expected):
                self.fail("an answer carries other values than the updates applied so far make")

    def check_rows(self, told: bytes) -> None:
        """Checks that an answer carries the present rows of this shard's among all keys."""
        mine = [self.rows.get(key, 0) for key in KEYS if self._has(key)]
        if np.frombuffer(told, np.int64).tolist() != mine:
            self.fail(f"an answer carries the rows {np.frombuffer(told, np.int64)}, not {mine}")

    def check_snapshot(self, step: int, tensors: Sequence[tuple[TensorSpec, torch.Tensor]]) -> None:
        """Checks that a copy is that of its step."""
        if step not in self.history:
            self.fail(f"a copy says that it is of step {step}, which never was")
        values, velocity = self.history[step]
        copied = self._joined("values", tensors)
        if not any(each.any() for each in copied[self.fewest :]):
            values = values[: self.fewest] + copied[self.fewest :]
        if not all(np.array_equal(c, v) for c, v in zip(copied, values, strict=True)):
            self.fail(f"the values in a copy are not those of step {step}")
        if any(spec.key.startswith(EXTRA) for spec, _ in tensors):
            expected = {key: count for key, count in self.rows_after.get(step, {}).items()}
            if rows_in(tensors) != expected:
                self.fail(f"the rows in a copy are {rows_in(tensors)}, at step {step} {expected}")
        copied = self._joined("state/momentum_buffer", tensors)
        if self._momentum and not all(
            np.array_equal(c, v) for c, v in zip(copied, velocity, strict=True)
        ):
            self.fail(f"the optimizer's state in a copy is not that of step {step}")

    def shown_at(self, slot: tuple[int, int, int], step: int) -> bytes | None:
        """Returns the values in a range of a vector after a step; None where that never was.

        Args:
            slot: which vector, and the elements of it.
            step: the global step.
        """
        which, start, stop = slot
        for _, parts, history in reversed(self.eras):
            if which >= len(parts):
                continue
            part = parts[which]
            if part.start <= start and stop <= part.stop and step in history:
                values = history[step][0][which][start - part.start : stop - part.start]
                return bytes(values.tobytes())
        return None

    def decided_at(self, step: int) -> set[PushId]:
        """Returns the pushes that are in the values of a step."""
        return {who for who, made in self.applied.items() if made <= step}

    def _joined(self, key: str, tensors: Sequence[tuple[TensorSpec, torch.Tensor]]) -> Vectors:
        """Returns this part of every vector, put together from ranges; zero where none is given."""
        joined = []
        for part in self._parts:
            whole = np.zeros(part.length, dtype=part.vector.dtype)
            for spec, tensor in tensors:
                low, high = max(spec.start, part.start), min(spec.stop, part.stop)
                if spec.key == key and spec.vector == part.vector.name and low < high:
                    source = tensor.numpy()[low - spec.start : high - spec.start]
                    whole[low - part.start : high - part.start] = source
            joined.append(whole)
        return tuple(joined)


class Watched(SegmentOptimizer):
    """An optimizer that shows an account what it is given.

    Args:
        account: of its server.
        spec, layout, server, values: as for `SegmentOptimizer`.
    """

    def __init__(
        self, account: Account, spec: OptimizerSpec, layout: Layout, server: int, values: PartBuffer
    ) -> None:
        super().__init__(spec, layout, server, values)
        self._account, self._layout, self._vectors = account, layout, values.vectors

    def step(
        self, gradients: PartBuffer, divisor: float = 1.0, absent: tuple[int, ...] = ()
    ) -> None:
        """Updates the values in place by gradients, divided by `divisor`."""
        self._account.refuse_poison()
        self._account.grow(self._layout, self._vectors)
        lacks = sum(vector.placed[0].position in absent for vector in self._layout.vectors)
        self._account.give([vector / divisor for vector in gradients.vectors], lacks=lacks)
        super().step(gradients, divisor, absent)

    def set_hyper(self, groups: Sequence[GroupSpec]) -> None:
        """Takes new hyper-parameters, group by group."""
        rate = groups[0].values["lr"]
        assert isinstance(rate, float)
        self._account.rate = rate
        super().set_hyper(groups)


def rows_in(tensors: Sequence[tuple[TensorSpec, torch.Tensor]]) -> dict[int, int]:
    """Returns the rows of the table among tensors, by key."""
    rows: dict[int, int] = {}
    keys: list[int] = []
    for spec, tensor in tensors:
        if spec.key == EXTRA + "keys":
            keys = tensor.tolist()
        elif spec.key == EXTRA + "rows":
            rows |= dict(zip(keys, tensor.tolist(), strict=True))
    return rows


def extra_of(push: Push) -> tuple[list[int], list[int]]:
    """Returns the keys and the counts of the rows that a push updates."""
    if not push.extra:
        return [], []
    _, keys, counts, *_ = bytes_in(push.extra)  # after a header
    return np.frombuffer(keys, np.int64).tolist(), np.frombuffer(counts, np.int64).tolist()


def _hash(key: int) -> int:
    """Returns the hash of a key: SplitMix64, as tables spread their keys by it."""
    mask = (1 << 64) - 1
    value = (key + 0x9E3779B97F4A7C15) & mask
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
    return value ^ value >> 31


def _as_bytes(vectors: Vectors) -> bytes:
    return b"".join(vector.tobytes() for vector in vectors)
