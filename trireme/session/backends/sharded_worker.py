"""A worker of several processes in a job with parameter servers: a leader represents them.

The leader, rank 0, sums the gradients of all processes, pushes and pulls as any worker does, and
broadcasts the values. The other processes make the same calls. With several replicas in the worker,
the pushed update is of the examples of all replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Unpack

import msgspec
import torch

from trireme.parallel.processes.process_group import ProcessGroup
from trireme.ps.messages import Leased, LeaseTerms, OptimizerSpec, Span
from trireme.ps.results import PushResult
from trireme.ps.rule import Rule
from trireme.ps.snapshot import ModelState, TableMark
from trireme.session.backends.base import Backend, FirstState
from trireme.session.backends.local_sgd import LocalSgd
from trireme.session.backends.parameter_server import ParameterServer
from trireme.session.model.training_setup import TrainingSetup

_WEIGHS = 1e-6
"""Weights below this are those of replicas without examples: no number of examples is as small."""


class _Told(msgspec.Struct, frozen=True):
    """The answer of the servers, which the leader broadcasts."""

    step: int
    stop: bool
    result: PushResult | None = None


class _Said(msgspec.Struct, frozen=True):
    """The report of one process to the leader about its step.

    Attributes:
        weight: the number of examples that the gradient of its replica is the mean of.
        examples: the positions of these examples.
        stop: why this process requests the end of the job; None if it does not.
    """

    weight: float
    examples: tuple[Span, ...] = ()
    stop: str | None = None


class Shards:
    """Sums the gradients of a worker's processes in the leader, and broadcasts values to them.

    Attributes:
        replicas: the number of batches that the worker computes at a time.
    """

    def __init__(self, group: ProcessGroup, setup: TrainingSetup) -> None:
        self.group = group
        self.setup = setup
        self.replicas = group.mesh.replicas
        self.flat = setup.flat
        self._part = setup.part
        # A replica without examples has left out a batch: then the update of all is left out, as
        # its gradient is in the mean.
        self._skips = setup.settings.options.nan == "skip"
        self._position = {name: position for position, name in enumerate(self.flat.parameters)}

    def unite(
        self, weight: float, examples: Sequence[Span], stop: str | None = None
    ) -> tuple[float, Sequence[Span], list[str]]:
        """Returns, in the leader, the weight and examples of all replicas, and requests to stop."""
        if self.replicas == 1:
            return weight, examples, []
        mine = _Said(weight, tuple(examples), stop)
        data = self.group.gather(msgspec.msgpack.encode(mine))
        if not self.group.is_chief:
            return weight, examples, []
        said = [msgspec.msgpack.decode(each, type=_Said) for each in data]
        replicas = [said[rank] for rank in self.group.reporting_ranks]
        skipped = self._skips and any(one.weight == 0 for one in replicas)
        total = sum(one.weight for one in replicas)
        return (
            0.0 if skipped or total < _WEIGHS else total,
            [span for one in replicas for span in one.examples],
            [one.stop for one in said if one.stop is not None],
        )

    def left_out(self, mine: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Returns, in the leader, the positions that the programs of all replicas have left out."""
        if self.replicas == 1:
            return mine
        said = self.group.gather(msgspec.msgpack.encode(mine))
        return [
            span
            for data in said
            for span in msgspec.msgpack.decode(data, type=list[tuple[int, int]])
        ]

    def own(self, told: Leased) -> Leased:
        """Returns the share of this process in what its worker has leased."""
        spans = told.spans[self.group.replica :: self.replicas]
        return msgspec.structs.replace(told, spans=spans)

    def gather(self) -> None:
        """Sums the gradients of all processes in the leader's flat vectors.

        Parameters without a gradient in every process have none in the leader afterwards.
        """
        if self._part is None:
            return
        flat, group = self.flat, self.group
        flat.restore_gradients()
        for vector in flat.gradients:
            vector.zero_()
        here = torch.zeros(len(flat.parameters))
        for name, gradient in self._part.whole_gradients():
            here[self._position[name]] = 1.0
            if group.rank in group.part_leaders():
                target = flat.parameters[name].grad
                assert target is not None
                target.copy_(gradient)
        for vector in flat.gradients:
            group.reduce_tensor(vector)
        if group.mesh.parts > 1:  # else every process has shares of all parameters
            group.reduce_tensor(here)
        for name, position in self._position.items():
            if not here[position]:
                flat.parameters[name].grad = None

    def spread(self, told: _Told | None = None) -> _Told:
        """Copies the values of rank 0 into every part; returns what the servers told rank 0."""
        data = self.group.broadcast(None if told is None else msgspec.msgpack.encode(told))
        for vector in self.flat.values:
            self.group.broadcast_tensor(vector)
        self.flat.values_received()
        if self._part is not None:
            self._part.fill({n: p.detach() for n, p in self.flat.parameters.items()})
        return msgspec.msgpack.decode(data, type=_Told) if told is None else told


class Leader(ParameterServer):
    """Rank 0, which has the connections to the servers."""

    group: ProcessGroup

    def __init__(self, shards: Shards, *others: Any) -> None:
        super().__init__(*others)
        self.group = shards.group
        self._shards = shards
        self._undealt: dict[str, list[Span]] = {}  # leased; less than a batch each
        self._left_out: dict[str, list[tuple[int, int]]] = {}  # by the programs; not told yet

    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        super().start(optimizer, rule, first)
        self._tell(None)

    def push(self, weight: float, *, examples: Sequence[Span] = (), **others: Any) -> None:
        self._shards.gather()
        weight, examples, reasons = self._shards.unite(weight, examples)
        for reason in reasons:
            self.stop(reason)
        super().push(weight, examples=examples, **others)

    def wait(self) -> PushResult | None:  # type: ignore[override]  # as `LocalSgd.wait`
        result = super().wait()
        self._tell(result)
        return result

    def lease(
        self, dataset: str, size: int, batch: int, count: int, **terms: Unpack[LeaseTerms]
    ) -> Leased:
        replicas = self._shards.replicas
        left_out = self._left_out.setdefault(dataset, [])
        left_out += self._shards.left_out(terms.pop("left_out", ()))
        spans = [*_cut(self._undealt.pop(dataset, []), batch)] if count else []
        told = Leased(())
        while len(spans) < replicas:  # examples of lost workers may come in short spans
            terms["left_out"] = self._left_out.pop(dataset, ())
            told = super().lease(dataset, size, batch * replicas, count, **terms)
            terms["lacks"] = ()
            if not told.spans:  # no more are left
                break
            for span in told.spans:
                if span.start < span.stop:
                    spans += _cut([span], batch)
                else:  # the worker has no examples in this round
                    spans = _filled(spans, replicas) + [span] * replicas
        if not told.spans:
            spans = _filled(spans, replicas)
        dealt = len(spans) // replicas * replicas
        if count:
            self._undealt[dataset] = spans[dealt:]
        finished = told.finished and not dealt
        told = Leased(tuple(spans[:dealt]), finished, told.epoch, told.awaited)
        self.group.broadcast(msgspec.msgpack.encode(told))
        return self._shards.own(told)

    def drain(self) -> int:
        step = super().drain()
        self._shards.spread(_Told(step, True))
        return step

    def _tell(self, result: PushResult | None) -> None:
        self._shards.spread(_Told(self.global_step, self.stopping, result))


class LocalSgdLeader(Leader, LocalSgd):
    """Rank 0 of a worker that trains locally between exchanges."""


class Follower(Backend):
    """Any other process of a worker; it has no connection, and makes the leader's calls."""

    group: ProcessGroup
    step: int = 0
    stopping: bool = False

    def __init__(self, shards: Shards) -> None:
        self.group = shards.group
        self._shards = shards
        self._wants_stop: str | None = None

    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        self._hear()

    def push(self, weight: float, *, examples: Sequence[Span] = (), **others: Any) -> None:
        self._shards.gather()
        self._shards.unite(weight, examples, self._wants_stop)
        self._wants_stop = None

    def wait(self) -> PushResult | None:
        return self._hear().result

    def complete(self) -> PushResult | None:
        trains_locally = self._shards.setup.outer is not None
        return self.wait() if trains_locally else None

    def _hear(self) -> _Told:
        told = self._shards.spread()
        self.step, self.stopping = told.step, told.stop
        return told

    def lease(
        self, dataset: str, size: int, batch: int, count: int, **terms: Unpack[LeaseTerms]
    ) -> Leased:
        self._shards.left_out(terms.get("left_out", ()))
        told = self.group.broadcast(None)
        return self._shards.own(msgspec.msgpack.decode(told, type=Leased))

    def stop(self, reason: str) -> int:
        """Passes the request to the leader with the next step.

        With a single replica the leader's own program makes the same request.
        """
        self._wants_stop = reason
        return self.step + 1

    def end(self) -> None:
        self.stopping = True

    def drain(self) -> int:
        return self._hear().step

    def snapshot(self, *, state: bool, since: TableMark | None = None) -> ModelState:
        """Returns the present values; only the leader copies a consistent step of the servers."""
        parameters = self._shards.flat.parameters
        return ModelState(self.step, {n: p.detach().cpu().clone() for n, p in parameters.items()})


def _filled(pieces: list[Span], replicas: int) -> list[Span]:
    """Returns pieces of which each replica has as many; the last ones may be empty."""
    lacks = -len(pieces) % replicas
    return pieces + [Span(each.dataset, each.stop, each.stop) for each in pieces[-1:]] * lacks


def _cut(spans: Iterable[Span], batch: int) -> Iterator[Span]:
    """Cuts spans into pieces of at most `batch` examples."""
    for span in spans:
        for start in range(span.start, span.stop, batch):
            yield Span(span.dataset, start, min(start + batch, span.stop))
