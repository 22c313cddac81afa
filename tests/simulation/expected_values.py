"""What one server should hold, kept by watching what its optimizer is given. Plain numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trireme.cluster.view import View
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import Applied, GroupSpec, OptimizerSpec, Push, Span, Stale
from trireme.ps.shard.values.segment_optimizer import SegmentOptimizer
from trireme.ps.snapshot_messages import TensorSpec
from trireme.wire.handshake import Identity

PushId = tuple[int, int, int]
"""A push by worker, incarnation and sequence."""

Vectors = tuple[np.ndarray[Any, np.dtype[Any]], ...]
"""One array for each flat vector, or for one server's part of each."""


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass(frozen=True, slots=True)
class Made:
    """A push as its worker made it: the gradient is that of all servers together."""

    push: Push
    spans: tuple[Span, ...]
    gradient: Vectors


def push_id(identity: Identity, push: Push) -> PushId:
    """Returns what names a push that came over a connection of this identity."""
    return identity.index, identity.incarnation, push.sequence


class Account:
    """One server's part, as it should be.

    Attributes:
        step: the global step.
        values, velocity: what the last step left: the parameters and the momentum.
        history: the same after each step.
        applied: the step that each applied push made or belongs to.
        verdicts: the first verdict on each push.
        view: the newest that the server has taken.
        retired: the workers that train no more.
        clocks: decided pushes of each (worker, incarnation) of the view.
        given: what the optimizer was given and is not yet explained, with what that left.
        rate: the learning rate that the optimizer has been told.
        used_rate: that of the last step which changed the values.
    """

    def __init__(
        self, server: int, layout: Layout, momentum: float, made: Mapping[PushId, Made]
    ) -> None:
        self.server = server
        self.step = 0
        self.values: Vectors | None = None
        self.velocity: Vectors = ()
        self.history: dict[int, tuple[Vectors, Vectors]] = {}
        self.applied: dict[PushId, int] = {}
        self.verdicts: dict[PushId, Applied | Stale] = {}
        self.view = View(0, (), ())
        self.retired: set[int] = set()
        self.clocks: dict[tuple[int, int], int] = {}
        self.rate = self.used_rate = 1.0
        self.given: list[tuple[Vectors, Vectors, Vectors]] = []
        self._parts = layout.parts(server)
        self._momentum = momentum
        self._made = made
        self._by_bytes: dict[bytes, PushId] = {}

    @property
    def live(self) -> set[tuple[int, int]]:
        """The (worker, incarnation) pairs of the server's view."""
        return {(entry.index, entry.incarnation) for entry in self.view.workers}

    def fail(self, what: str) -> None:
        """Reports a violation at this server."""
        raise Violation(f"ps:{self.server} at step {self.step}: {what}")

    # -- what happens to the server ---------------------------------------------------------------

    def take(self, view: View) -> None:
        """The server takes a view: newcomers start at the slowest clock of those who stay."""
        before, self.view = self.live, view
        staying = self.live & before
        self.retired &= {worker for worker, _ in staying}
        start = min((self.clocks[who] for who in staying if who[0] not in self.retired), default=0)
        self.clocks = {who: self.clocks.get(who, start) for who in self.live}

    def load(self, step: int, tensors: Sequence[tuple[TensorSpec, torch.Tensor]]) -> None:
        """Values are loaded."""
        self.step = step
        self.values = self._joined("values", tensors)
        self.velocity = self._joined("state/momentum_buffer", tensors)
        self.history[step] = (self.values, self.velocity)

    def know(self, who: PushId, gradient: Vectors) -> None:
        """A worker has made a push; it may come here."""
        self._by_bytes[_as_bytes(self.part(gradient))] = who

    def part(self, vectors: Vectors) -> Vectors:
        """Returns this server's part of whole vectors."""
        return tuple(v[p.start : p.stop] for v, p in zip(vectors, self._parts, strict=True))

    def give(self, gradients: Sequence[torch.Tensor]) -> None:
        """The optimizer is given a gradient: the values must change so."""
        given = tuple(gradient.numpy().copy() for gradient in gradients)
        if self.values is None:
            self.fail("an update came before there were values")
            return
        self.velocity = tuple(
            v * v.dtype.type(self._momentum) + g for v, g in zip(self.velocity, given, strict=True)
        )
        self.values = tuple(
            x - v * v.dtype.type(self.rate) for x, v in zip(self.values, self.velocity, strict=True)
        )
        self.given.append((given, self.values, self.velocity))
        self.used_rate = self.rate

    def identify(self, given: Vectors) -> PushId:
        """Returns whose push a gradient is."""
        who = self._by_bytes.get(_as_bytes(given))
        if who is None:
            self.fail("something was applied that nobody has pushed")
            raise AssertionError
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
            gradient, values, velocity = self.given.pop(0)
        self.step += steps
        self.history[self.step] = (values, velocity)
        return gradient

    def apply(self, who: PushId) -> None:
        """A push turns out to be in the values of the present step."""
        if who in self.applied:
            self.fail(f"push {who} was applied twice: at steps {self.applied[who]} and {self.step}")
        self.applied[who] = self.step

    # -- what the server says ---------------------------------------------------------------------

    def check_values(self, payload: Sequence[torch.Tensor]) -> None:
        """Checks that an answer carries the present values."""
        assert self.values is not None
        for told, expected in zip(payload, self.values, strict=True):
            if not np.array_equal(told.numpy(), expected):
                self.fail("an answer carries other values than the updates applied so far make")

    def check_snapshot(self, step: int, tensors: Sequence[tuple[TensorSpec, torch.Tensor]]) -> None:
        """Checks that a copy is that of its step."""
        if step not in self.history:
            self.fail(f"a copy says that it is of step {step}, which never was")
        values, velocity = self.history[step]
        copied = self._joined("values", tensors)
        if not all(np.array_equal(c, v) for c, v in zip(copied, values, strict=True)):
            self.fail(f"the values in a copy are not those of step {step}")
        copied = self._joined("state/momentum_buffer", tensors)
        if self._momentum and not all(
            np.array_equal(c, v) for c, v in zip(copied, velocity, strict=True)
        ):
            self.fail(f"the optimizer's state in a copy is not that of step {step}")

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
                if spec.key == key and spec.vector == part.vector.dtype and low < high:
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
        self,
        account: Account,
        spec: OptimizerSpec,
        layout: Layout,
        server: int,
        values: PartBuffer,
    ) -> None:
        super().__init__(spec, layout, server, values)
        self._account = account

    def step(
        self, gradients: PartBuffer, divisor: float = 1.0, absent: tuple[int, ...] = ()
    ) -> None:
        """Updates the values in place by gradients, divided by `divisor`."""
        self._account.give([vector / divisor for vector in gradients.vectors])
        super().step(gradients, divisor, absent)

    def set_hyper(self, groups: Sequence[GroupSpec]) -> None:
        """Takes new hyper-parameters, group by group."""
        rate = groups[0].values["lr"]
        assert isinstance(rate, float)
        self._account.rate = rate
        super().set_hyper(groups)


def _as_bytes(vectors: Vectors) -> bytes:
    return b"".join(vector.tobytes() for vector in vectors)
