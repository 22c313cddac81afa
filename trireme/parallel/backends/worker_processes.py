"""The processes of one worker in a job with parameter servers, which rank 0 represents.

Rank 0 sums the gradients of all processes, pushes and pulls as any worker does, and broadcasts the
values. The other processes make the same calls. With several replicas in the worker, the pushed
update is of the examples of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Unpack

import msgspec
import torch

from trireme.parallel.model_part import MeshPart
from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.ps.messages import Leased, LeaseFields, OptimizerSpec, PushFields, Span
from trireme.ps.results import PushResult
from trireme.ps.rule import Rule
from trireme.ps.snapshot import ModelState
from trireme.session.backends.base import Backend, FirstState
from trireme.session.backends.together import Processes
from trireme.session.model.training_setup import TrainingSetup

_WEIGHS = 1e-6
"""Weights below this are those of replicas without examples: no number of examples is as small."""

_Positions = Sequence[tuple[int, int]]


class _Answer(msgspec.Struct, frozen=True):
    """The answer of the servers, which rank 0 broadcasts."""

    step: int
    stop: bool
    result: PushResult | None = None


class _Share(msgspec.Struct, frozen=True):
    """What one process adds to a step; `stop` is why it requests the end of the job."""

    weight: float
    examples: tuple[Span, ...] = ()
    stop: str | None = None


class WorkerProcesses(Processes):
    """Sums the gradients of a worker's processes in rank 0, and broadcasts values to them.

    Where each process holds the whole model, the gradients in the flat vectors are the mean over
    all processes already.
    """

    def __init__(self, group: TorchProcessGroup, setup: TrainingSetup) -> None:
        assert setup.part is None or isinstance(setup.part, MeshPart)
        self.group: TorchProcessGroup = group
        self.flat = setup.flat
        self.trains_locally = setup.outer is not None
        self._replicas = group.mesh.replicas
        self._part: MeshPart | None = setup.part
        # A replica without examples has left out a batch: then the update of all is left out, as
        # its gradient is in the mean.
        self._skips = setup.settings.options.nan == "skip"
        self._position = {name: position for position, name in enumerate(self.flat.parameters)}
        self._undealt: dict[str, list[Span]] = {}  # leased; less than a batch each
        self._left_out: dict[str, list[tuple[int, int]]] = {}  # the servers do not know of them yet

    def unite(
        self, weight: float, examples: Sequence[Span], stop: str | None = None
    ) -> tuple[float, Sequence[Span], list[str]]:
        if self._replicas == 1:
            return weight, examples, []
        mine = _Share(weight, tuple(examples), stop)
        data = self.group.gather(msgspec.msgpack.encode(mine))
        if not self.group.is_chief:
            return weight, examples, []
        shares = [msgspec.msgpack.decode(each, type=_Share) for each in data]
        replicas = [shares[rank] for rank in self.group.reporting_ranks]
        skipped = self._skips and any(one.weight == 0 for one in replicas)
        total = sum(one.weight for one in replicas)
        return (
            0.0 if skipped or total < _WEIGHS else total,
            [span for one in replicas for span in one.examples],
            [one.stop for one in shares if one.stop is not None],
        )

    def gather(self) -> None:
        """As `Processes.gather`; parameters without a gradient everywhere have none in rank 0."""
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

    def spread(self, step: int, stop: bool, result: PushResult | None) -> None:
        self.group.broadcast(msgspec.msgpack.encode(_Answer(step, stop, result)))
        self._spread_values()

    def receive(self) -> _Answer:
        """Returns what rank 0 spreads, and takes over the values."""
        answer = msgspec.msgpack.decode(self.group.broadcast(None), type=_Answer)
        self._spread_values()
        return answer

    def _spread_values(self) -> None:
        for vector in self.flat.values:
            self.group.broadcast_tensor(vector)
        self.flat.values_received()
        if self._part is not None:
            self._part.fill({n: p.detach() for n, p in self.flat.parameters.items()})

    def deal(
        self, ask: Callable[..., Leased], dataset: str, batch: int, count: int, fields: LeaseFields
    ) -> Leased:
        replicas = self._replicas
        left_out = self._left_out.setdefault(dataset, [])
        left_out += self.all_left_out(fields.pop("left_out", ()))
        spans = [*_cut(self._undealt.pop(dataset, []), batch)] if count else []
        leased = Leased(())
        while len(spans) < replicas:  # examples of lost workers may come in short spans
            fields["left_out"] = self._left_out.pop(dataset, ())
            leased = ask(batch * replicas, count, **fields)
            fields["lacks"] = ()
            if not leased.spans:  # no more are left
                break
            for span in leased.spans:
                if span.start < span.stop:
                    spans += _cut([span], batch)
                else:  # the worker has no examples in this round
                    spans = _filled(spans, replicas) + [span] * replicas
        if not leased.spans:
            spans = _filled(spans, replicas)
        dealt = len(spans) // replicas * replicas
        if count:
            self._undealt[dataset] = spans[dealt:]
        finished = leased.finished and not dealt
        leased = Leased(tuple(spans[:dealt]), finished, leased.epoch, leased.awaited)
        self.group.broadcast(msgspec.msgpack.encode(leased))
        return self._own(leased)

    def dealt(self) -> Leased:
        """Returns what rank 0 deals to this process."""
        return self._own(msgspec.msgpack.decode(self.group.broadcast(None), type=Leased))

    def _own(self, leased: Leased) -> Leased:
        spans = leased.spans[self.group.replica :: self._replicas]
        return msgspec.structs.replace(leased, spans=spans)

    def all_left_out(self, mine: _Positions) -> _Positions:
        """Returns, in rank 0, the positions that the programs of all replicas have left out."""
        if self._replicas == 1:
            return mine
        everyones = self.group.gather(msgspec.msgpack.encode(mine))
        kind = list[tuple[int, int]]
        return [span for data in everyones for span in msgspec.msgpack.decode(data, type=kind)]


class WorkerProcess(Backend):
    """Any other process than rank 0; it has no connection, and makes the same calls."""

    step: int = 0
    stopping: bool = False

    def __init__(self, processes: WorkerProcesses) -> None:
        self.group = processes.group
        self._processes = processes
        self._wants_stop: str | None = None

    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        self._receive()

    def push(self, weight: float, **fields: Unpack[PushFields]) -> None:
        self._processes.gather()
        self._processes.unite(weight, fields.get("examples", ()), self._wants_stop)
        self._wants_stop = None

    def wait(self) -> PushResult | None:
        return self._receive().result

    def complete(self) -> PushResult | None:
        return self.wait() if self._processes.trains_locally else None

    def _receive(self) -> _Answer:
        answer = self._processes.receive()
        self.step, self.stopping = answer.step, answer.stop
        return answer

    def lease(
        self, dataset: str, size: int, batch: int, count: int, **fields: Unpack[LeaseFields]
    ) -> Leased:
        self._processes.all_left_out(fields.get("left_out", ()))
        return self._processes.dealt()

    def stop(self, reason: str) -> int:
        """Passes the request to rank 0 with the next step."""
        self._wants_stop = reason
        return self.step + 1

    def end(self) -> None:
        self.stopping = True

    def drain(self) -> int:
        return self._receive().step

    def snapshot(self, *, state: bool) -> ModelState:
        """Returns the present values; only rank 0 copies a consistent step of the servers."""
        parameters = self._processes.flat.parameters
        return ModelState(self.step, {n: p.detach().cpu().clone() for n, p in parameters.items()})


def _filled(pieces: list[Span], replicas: int) -> list[Span]:
    lacks = -len(pieces) % replicas
    return pieces + [Span(each.dataset, each.stop, each.stop) for each in pieces[-1:]] * lacks


def _cut(spans: Iterable[Span], batch: int) -> Iterator[Span]:
    for span in spans:
        for start in range(span.start, span.stop, batch):
            yield Span(span.dataset, start, min(start + batch, span.stop))
