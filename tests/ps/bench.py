"""One shard by hand: events in, instructions out. The model is one vector of 16 numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from trireme.cluster.view import View, WorkerEntry
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.leader.leader import Leader
from trireme.ps.messages import (
    Applied,
    Attach,
    Drain,
    FromServer,
    GroupSpec,
    Lease,
    Leased,
    OptimizerSpec,
    ParameterSpec,
    Pull,
    PullReply,
    Push,
    PushReply,
    Retire,
    Span,
    Status,
    StopJob,
    WorkerProgress,
)
from trireme.ps.rule import Rule
from trireme.ps.shard.instructions import Instruction, Reply, Send
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.shard import Shard
from trireme.ps.snapshot_messages import Load, Snapshot, TakeSnapshot, TensorSpec
from trireme.wire.message import Message

PARAMETER = ParameterSpec("w", (16,), "float32", 0)
SGD = OptimizerSpec("SGD", (GroupSpec({"lr": 1.0}),))
ASYNC = Rule(aggregate=1, staleness=None)
SYNC = Rule(aggregate=0, staleness=0)
ELEMENTS = 16

Told = list[tuple[object, Message]]
"""To which route or server, and what."""


def view(number: int, *workers: int | tuple[int, int]) -> View:
    """Workers by index, of their first start; or (index, incarnation)."""
    entries = (WorkerEntry(*(w if isinstance(w, tuple) else (w, 1))) for w in workers)
    return View(number, (), tuple(entries))


def told(instructions: Sequence[Instruction]) -> Told:
    """The messages alone; `ps:1` for what goes to another server."""
    return [
        (i.route, i.message) if isinstance(i, Reply) else (f"ps:{i.shard}", i.message)
        for i in instructions
    ]


def sent(instructions: Sequence[Instruction]) -> list[tuple[int, Message]]:
    """What goes to other servers."""
    return [(i.shard, i.message) for i in instructions if isinstance(i, Send)]


def payload_of(instructions: Sequence[Instruction], route: object) -> list[float]:
    """The first number of each tensor that goes to a route."""
    (reply,) = (i for i in instructions if isinstance(i, Reply) and i.route == route)
    return [tensor[0].item() for tensor in reply.payload]


class Bench:
    """A shard, and what is said to it.

    Args:
        rule: by which it goes.
        workers: of view 1.
        server, servers: which one it is, of how many; each holds all 16 numbers.
        loaded: whether values are there: all 100.
    """

    def __init__(
        self,
        rule: Rule = ASYNC,
        *,
        workers: Sequence[int] = (0, 1),
        server: int = 0,
        servers: int = 1,
        optimizer: OptimizerSpec = SGD,
        loaded: bool = True,
        shard: type[Shard] = Shard,
    ) -> None:
        self.now = 10.0
        self.rule = rule
        self.optimizer = optimizer
        self.servers = servers
        self.layout = Layout.of([PARAMETER], servers=servers, slots=servers)
        self.shard = shard(server)
        self.view_number = 0
        self.view(*workers)
        if loaded:
            self.attach(workers[0])
            self.load(workers[0])

    # -- what happens to it -----------------------------------------------------------------------

    def view(self, *workers: int | tuple[int, int]) -> list[Instruction]:
        self.view_number += 1
        return self.shard.view(self.now, view(self.view_number, *workers))

    def attach(self, worker: int = 0, **changed: Any) -> list[Instruction]:
        who = Participant(changed.pop("worker", worker), changed.pop("incarnation", 1))
        fields = {
            "view": self.view_number,
            "layout": self.layout.spec,
            "optimizer": self.optimizer,
            "rule": self.rule,
        }
        request = Attach(**{**fields, **changed})
        return self.shard.request(self.now, f"attach {worker}", who, request)

    def load(
        self,
        worker: int = 0,
        *,
        value: float = 100.0,
        step: int = 0,
        workers: tuple[WorkerProgress, ...] = (),
        consumed: tuple[Span, ...] = (),
        count: int | None = None,
        incarnation: int = 1,
        **changed: Any,
    ) -> list[Instruction]:
        (part,) = self.layout.parts(self.shard.number)
        length = part.length if count is None else count
        spec = TensorSpec("values", "float32", "float32", part.start, part.start + length)
        fields = {"view": self.view_number, **changed}
        request = Load(step=step, tensors=(spec,), workers=workers, consumed=consumed, **fields)
        who, tensors = Participant(worker, incarnation), [(spec, torch.full((length,), value))]
        return self.shard.request(self.now, f"load {worker}", who, request, tensors)

    def pull(
        self, worker: int = 0, route: object = None, incarnation: int = 1, **changed: Any
    ) -> list[Instruction]:
        who, pull = Participant(worker, incarnation), Pull(**{"view": self.view_number, **changed})
        return self.shard.request(self.now, route or f"pull {worker}", who, pull)

    def push(
        self,
        worker: int = 0,
        sequence: int = 1,
        value: float = 1.0,
        *,
        pulled: int | None = None,
        route: object = None,
        incarnation: int = 1,
        **changed: Any,
    ) -> list[Instruction]:
        """A gradient of equal numbers, computed from the present step's values."""
        fields = {
            "view": self.view_number,
            "acknowledged": sequence - 1,
            "pulled": self.shard.state.step if pulled is None else pulled,
            "weight": 1.0,
            **changed,
        }
        who, push = Participant(worker, incarnation), Push(sequence=sequence, **fields)
        gradients = PartBuffer(self.layout, self.shard.number)
        for vector in gradients.vectors:
            vector.fill_(value)
        return self.shard.request(
            self.now, route or f"push {worker}.{sequence}", who, push, gradients
        )

    def lease(
        self, worker: int = 0, *, count: int = 1, incarnation: int = 1, **changed: Any
    ) -> tuple[Span, ...]:
        return self.leased(worker, count=count, incarnation=incarnation, **changed).spans

    def leased(
        self, worker: int = 0, *, count: int = 1, incarnation: int = 1, **changed: Any
    ) -> Leased:
        fields = {"view": self.view_number, "batch": 4, **changed}
        request = Lease(dataset="d", size=100, count=count, **fields)
        who = Participant(worker, incarnation)
        ((_, answer),) = told(self.shard.request(self.now, "lease", who, request))
        assert isinstance(answer, Leased), answer
        return answer

    def retire(self, worker: int) -> list[Instruction]:
        return self.shard.request(self.now, f"retire {worker}", Participant(worker, 1), Retire())

    def stop(self) -> list[Instruction]:
        return self.shard.request(self.now, "stop", Participant(0, 0), StopJob("enough"))

    def drain(self, worker: int = 0, route: str = "drain") -> list[Instruction]:
        return self.shard.request(self.now, route, Participant(worker, 1), Drain())

    def snapshot(
        self, token: int = 7, *, worker: int = 0, state: bool = False, **changed: Any
    ) -> list[Instruction]:
        request, who = TakeSnapshot(token, state, **changed), Participant(worker, 1)
        return self.shard.request(self.now, f"snapshot {token}", who, request)

    def hear(self, server: int, message: FromServer) -> list[Instruction]:
        """What another shard says, and what follows at once."""
        out = self.shard.heard(self.now, server, message)
        while self.shard.due:
            out += self.shard.go_on()
        return out

    # -- how it is then ---------------------------------------------------------------------------

    @property
    def value(self) -> float:
        """The number that all of the values are."""
        out = self.shard.request(
            self.now,
            "look",
            Participant(self.first, self.incarnation),
            Pull(self.view_number, False),
        )
        (reply,) = (i for i in out if isinstance(i, Reply))
        assert isinstance(reply.message, PullReply), reply
        (vector,) = reply.payload
        assert (vector == vector[0]).all()
        return float(vector[0])

    @property
    def leader(self) -> Leader:
        """The leader, where the shard has it."""
        assert self.shard.state.leader is not None
        return self.shard.state.leader

    @property
    def first(self) -> int:
        return min(self.shard.state.participants.incarnations)

    @property
    def incarnation(self) -> int:
        return self.shard.state.participants.incarnations[self.first]

    @property
    def table(self) -> tuple[WorkerProgress, ...]:
        ((_, status),) = told(self.shard.request(self.now, "status", Participant(0, 0), Status()))
        return status.workers  # type: ignore[attr-defined, no-any-return]

    @property
    def counters(self) -> dict[str, float]:
        ((_, status),) = told(self.shard.request(self.now, "status", Participant(0, 0), Status()))
        return status.counters  # type: ignore[attr-defined, no-any-return]


def applied(
    step: int, *, at: int | None = None, staleness: int = 0, stop: bool = False
) -> PushReply:
    """The answer to an update that made `step`, with the values of step `at`."""
    return PushReply(Applied(step), step if at is None else at, staleness, stop)


def snapshot_of(instructions: Sequence[Instruction]) -> tuple[Snapshot, list[float]]:
    """A copy: what it says, and the first number of each of its tensors."""
    (reply,) = (i for i in instructions if isinstance(i, Reply) and isinstance(i.message, Snapshot))
    assert isinstance(reply.message, Snapshot)
    return reply.message, [tensor[0].item() for tensor in reply.payload]
