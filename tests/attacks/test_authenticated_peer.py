"""A process that knows the job's secret says everything that it should not.

Wrong values in good messages, messages of other roles, in any order, over connections of every kind
of task: no message may end a server or the coordinator, nor keep it from serving who behaves. What
is said goes through the real catalog and the real handlers; only the network is not there.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from tests.ps.bench import ASYNC, SGD, SYNC, Bench
from trireme.cluster.coordinator import Coordinator
from trireme.cluster.messages import (
    CLUSTER_CATALOG,
    Heartbeat,
    HeartbeatHeard,
    JobOverHeard,
    Join,
    Joined,
    Leave,
    StatusQuery,
)
from trireme.cluster.state import Policy
from trireme.cluster.view import ServerEntry, View, WorkerEntry
from trireme.errors import FrameError
from trireme.ps.leader.decisions import Apply, Cut, Decided, Divide, Held, Measure, Stop
from trireme.ps.lending_messages import LendMemory
from trireme.ps.messages import (
    Applied,
    Attach,
    Attached,
    Collect,
    Drain,
    FromServer,
    FromWorker,
    GroupSpec,
    Lease,
    Leased,
    Pull,
    PullReply,
    Push,
    PushReply,
    Refused,
    Retire,
    ServerStatus,
    Share,
    Span,
    Status,
    StopJob,
    WorkerProgress,
)
from trireme.ps.replication.messages import (
    PS_CATALOG,
    PS_MESSAGES,
    ConnectToLeader,
    ConnectToShard,
    Fill,
    FillExtra,
    FollowPrimary,
    Pulse,
    Replicate,
    Replicated,
)
from trireme.ps.replication.replicas import Peer
from trireme.ps.rule import Average, Rule
from trireme.ps.server.handler import ShardHandler
from trireme.ps.snapshot_messages import Load, Loaded, TakeSnapshot, TensorSpec
from trireme.wire.connection import Incoming
from trireme.wire.handshake import Denied, Hello, Identity, ServerHandshake
from trireme.wire.message import Catalog, Message
from trireme.wire.service import Link

SECONDS = 10.0
"""A message that takes so long wedges a server, however busy the machine is."""

MESSAGES = 3000

TASKS = [
    *(("worker:1", 1), ("worker:1", 1), ("worker:1", 1), ("worker:2", 1), ("worker:0", 2)),
    *(("worker:9", 1), ("ps:0", 0), ("ps:1", 0), ("stranger:0", 0), ("observer:0", 0)),
    ("coordinator:0", 0),
]


@dataclass(eq=False)
class FakeLink:
    identity: Identity
    opened_here: bool = False
    number: int = 0
    sent: list[Message] = field(default_factory=list)
    closed: bool = False
    departing: bool = False
    context: Any = None
    connection: Any = field(
        default_factory=lambda: SimpleNamespace(
            destination=None, lending=None, stream=SimpleNamespace(take_descriptor=lambda: None)
        )
    )

    def offer(self, message: Message, payload: Sequence[Any] = (), *, sequence: int = 0) -> bool:
        list(payload)
        msgspec.msgpack.encode(message)  # what cannot be sent would end the service too
        self.sent.append(message)
        return True

    def close(self) -> None:
        self.closed = True


class Victim:
    """A handler, and links to it that say bytes; whatever it raises but `FrameError` comes out."""

    def __init__(self, handler: Any, catalog: Catalog) -> None:
        self.handler = handler
        self.catalog = catalog
        self._links: list[FakeLink] = []

    def link(self, task: str, incarnation: int = 0, *, opened_here: bool = False) -> FakeLink:
        link = FakeLink(Identity("job", task, incarnation, calls="ps:0"), opened_here)
        self._links.append(link)
        self.handler.authenticated(cast(Link, link))
        if isinstance(self.handler, ShardHandler):
            self._open(link)
        return link

    def _open(self, link: FakeLink) -> None:
        """Says what the connection is for, as whoever behaves does first."""
        index, role = link.identity.index, link.identity.role
        if link.opened_here:
            self.handler.connected(cast(Link, link), Peer(self.handler.index, False, index))
            link.sent.clear()
            return
        speaks = role == "ps" and index and self.handler.index == 0
        opener = ConnectToLeader(index, 1) if speaks else ConnectToShard(self.handler.index, 1)
        self.handler.received(cast(Link, link), Incoming(opener, 0, (), 0))

    def hang_up(self, link: FakeLink) -> None:
        """The peer is gone."""
        link.closed = True
        self._tell_closed()

    def _tell_closed(self) -> None:
        for link in [link for link in self._links if link.closed]:
            self._links.remove(link)
            self.handler.closed(cast(Link, link), None)

    def say(self, link: FakeLink, kind: int, metadata: bytes, payload: bytes | int = 0) -> bool:
        """Says something; returns whether the link is still open then."""
        began = time.monotonic()
        try:
            message = self.catalog.decode(kind, metadata)
            views: Sequence[memoryview] = ()
            data = bytes(payload) if isinstance(payload, int) else payload
            if data:
                if link.connection.destination is None:
                    raise FrameError("no payload here")
                views = link.connection.destination(message, len(data))
                for target in views:
                    target[:] = data[: target.nbytes]
                    data = data[target.nbytes :]
            self.handler.received(cast(Link, link), Incoming(message, 1, views, 0))
        except FrameError:
            link.closed = True
        self._tell_closed()
        assert time.monotonic() - began < SECONDS, f"{kind} took too long"
        return not link.closed

    def ask(self, link: FakeLink, message: Message, payload: bytes | int = 0) -> Message:
        """Says something good; returns the last answer."""
        assert self.say(link, message.kind, self.catalog.encode(message), payload)
        return link.sent[-1]


INTEGERS = [0, 1, 2, 3, 15, 16, 17, -1, -2, 255, 1 << 16, 10**9, 1 << 31, 1 << 53, 1 << 62, 1 << 63]
ODD: list[Any] = [*INTEGERS, (1 << 64) - 1, 0.0, 1.5, -1.0, float("nan"), float("inf"), None, True]
ODD += [
    "",
    "w",
    "x" * 2000,
    "worker:1",
    "float32",
    "nonsense",
    "ä",
    b"",
    [],
    [[]],
    {},
    {"lr": None},
]
ODD += [[0, 0], [[1, 1]], [[1, 1], [1, 1]], [["d", 5, 2]], [["d", 0, 1 << 62]], {"lr": [1.0]}]


def mutated(rng: random.Random, value: Any, rate: float) -> Any:
    """Returns a value some of whose parts are others."""
    if rng.random() < rate:
        if isinstance(value, int) and rng.random() < 0.7:
            return rng.choice(INTEGERS)
        return rng.choice(ODD)
    if isinstance(value, list | tuple):
        made = [mutated(rng, each, rate) for each in value]
        if made and rng.random() < rate:
            made = rng.choice([made[:-1], made * 2, [*made, rng.choice(ODD)]])
        return made
    if isinstance(value, dict):
        return {key: mutated(rng, each, rate) for key, each in value.items()}
    return value


def fuzz(
    victim: Victim, rng: random.Random, templates: Sequence[Message], lengths: Sequence[int]
) -> None:
    """Says so many wrong things over links of every kind of task, and some right ones."""
    links: dict[tuple[str, int], FakeLink] = {}
    for _ in range(MESSAGES):
        who = rng.choice(TASKS)
        if who not in links or links[who].closed:
            links[who] = victim.link(*who)
        template = rng.choice(templates)
        rate = rng.choice([0.0, 0.05, 0.2, 0.5])
        body = mutated(rng, msgspec.to_builtins(template), rate)
        try:
            metadata = msgspec.msgpack.encode(body)
        except OverflowError:
            continue
        victim.say(links[who], template.kind, metadata, rng.choice(lengths))
        if rng.random() < 0.05:
            victim.hang_up(links[who])


# A parameter server ------------------------------------------------------------------------------


def view(number: int, *workers: int) -> View:
    """These workers, of their first start, and one server."""
    server = ServerEntry(0, 1, "tcp://127.0.0.1:1")
    return View(number, (server,), tuple(WorkerEntry(worker, 1) for worker in workers))


bench = Bench(ASYNC)
LAYOUT, NBYTES = bench.layout.spec, 64
VALUES = TensorSpec("values", "float32", "float32", 0, 16)


def server_templates(rule: Rule) -> list[Message]:
    push = Push(1, 1, 0, 0, 1.0, (GroupSpec({"lr": 0.5}),), (Span("d", 0, 4),))
    return [
        Attach(1, LAYOUT, SGD, rule),
        *[msgspec.structs.replace(push, sequence=sequence) for sequence in range(1, 6)],
        Pull(1),
        Lease(1, "d", 100, 4, 2, 1),
        Lease(1, "d", 100, 4, 10**9, 2),
        Drain(),
        Retire(),
        TakeSnapshot(1, True),
        Load(1, 0, (VALUES,), (WorkerProgress(1, 1, 1, 1, 0),), (Span("d", 0, 4),)),
        *(Share("topic"), Collect("topic")),
        LendMemory(4096, ((0, 64),), ((64, 64),)),
        Held(0, ((1, 1, 1),), ((1, 1),), ((1, 1, 1),), 1.0),
        Decided(0, (Apply(1, ((1, 1, 1),), 0.5), Cut(1, 1, 1)), 1),
        Decided(0, (Measure(0, ((1, 1, 1),)), Stop(1), Divide(1, 2)), 2),
        *(ConnectToShard(0, 1), ConnectToLeader(1, 1), FollowPrimary(0, 1, 0, 1, 1), Replicated(1)),
        Pulse(),
        Replicate(1, 0.0, 0, 1, push.kind, PS_CATALOG.encode(push)),
        Fill(view(1, 0), b"", (VALUES,)),
        FillExtra((0, 32), (VALUES,)),
        msgspec.structs.replace(push, absent=(0,)),
        Status(),
        *(Attached(True, 0, 1), PushReply(Applied(1), 1, 0, False), Leased(())),  # said by servers
    ]


RULES = {
    "async": ASYNC,
    "ssp": Rule(aggregate=1, staleness=1),
    "sync": SYNC,
    "clipped, averaged": Rule(0, 0, clip_norm=1.0, average=Average(0.9)),
    "int8": Rule(0, 0, codec="int8", every=4),
    "topk": Rule(1, None, codec="topk:0.5"),
}


class Clock:
    """Moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RULES)
def test_a_server_serves_on(name: str, seed: int) -> None:
    rule, clock = RULES[name], Clock()
    handler = ShardHandler(0, clock)
    handler.view(view(1, 0, 1, 2))
    victim = Victim(handler, PS_CATALOG)
    rng = random.Random(f"{name} {seed}")
    early = [m for m in server_templates(rule) if not isinstance(m, Attach | Load)]
    fuzz(victim, rng, early, [0, 0, NBYTES, 16])

    good = victim.link("worker:0", 1)
    assert victim.ask(good, Attach(1, LAYOUT, SGD, rule)) == Attached(False, 0, 1)
    assert victim.ask(good, Load(1, 0, (VALUES,), (), ()), NBYTES) == Loaded(0)
    packed = [16 + 4, 48, NBYTES]
    fuzz(victim, rng, server_templates(rule), [0, NBYTES, NBYTES, 1, 63, *packed])

    # Who misbehaved is out; a copy that somebody began and left is given up by time.
    handler.view(view(2, 0))
    clock.now += 100.0
    handler.tick(clock.now)
    train(victim, rule)


def train(victim: Victim, rule: Rule) -> None:
    """A worker that behaves is dealt examples, and its updates count."""
    good = victim.link("worker:0", 1)
    pulled = victim.ask(good, Pull(2))
    assert isinstance(pulled, PullReply)
    step = pulled.step
    for sequence in range(1, 4):
        leased = victim.ask(good, Lease(2, "good", 100, 4, 2, sequence))
        assert isinstance(leased, Leased) and len(leased.spans) == 2
        push = Push(2, sequence, sequence - 1, step, 1.0, None, leased.spans)
        size = {"int8": 20, "topk:0.5": 64}.get(rule.codec, NBYTES)
        reply = victim.ask(good, push, bytes(size))
        assert isinstance(reply, PushReply) and isinstance(reply.verdict, Applied), reply
        step = reply.step


@pytest.mark.parametrize(
    "wrong",
    [
        {"layout": msgspec.structs.replace(LAYOUT, bounds=(0,))},
        {"layout": msgspec.structs.replace(LAYOUT, bounds=tuple(range(1001)))},
        {"layout": msgspec.structs.replace(LAYOUT, bounds=(0, 0))},
        {"rule": Rule(codec="nonsense")},
        {"rule": Rule(codec="topk:nan")},
        {"rule": Rule(max_steps=-1)},
        {"optimizer": msgspec.structs.replace(SGD, name="LBFGS")},
        {"optimizer": msgspec.structs.replace(SGD, groups=())},
        {"optimizer": msgspec.structs.replace(SGD, groups=(GroupSpec({"lr": None}),))},
        {"optimizer": msgspec.structs.replace(SGD, groups=(GroupSpec({"lr": (1.0,)}),))},
        *(
            {
                "layout": msgspec.structs.replace(
                    LAYOUT, parameters=(msgspec.structs.replace(LAYOUT.parameters[0], **change),)
                )
            }
            for change in (
                {"shape": (1 << 47, 1 << 47)},
                {"shape": (1 << 44,)},
                {"dtype": "int64"},
                {"dtype": "nonsense"},
                {"group": 7},
            )
        ),
    ],
    ids=repr,
)
def test_what_cannot_be_trained_is_refused_and_keeps_nobody_out(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    zeros = torch.zeros

    def asked(length: int, **options: Any) -> torch.Tensor:
        assert length < 1 << 20, "memory is asked for, and a kernel may promise what it has not"
        return zeros(length, **options)

    monkeypatch.setattr(torch, "zeros", asked)
    handler = ShardHandler(0, Clock())
    handler.view(view(1, 0, 1))
    victim = Victim(handler, PS_CATALOG)
    attach = Attach(1, LAYOUT, SGD, ASYNC)
    victim.ask(victim.link("worker:1", 1), msgspec.structs.replace(attach, **wrong))
    good = victim.link("worker:0", 1)
    assert victim.ask(good, Attach(1, LAYOUT, SGD, ASYNC)) == Attached(False, 0, 1)


@pytest.mark.parametrize(
    ("task", "incarnation", "said", "reason"),
    [
        ("observer:0", 0, Pull(1), "observer:0 may not say Pull: only a task of role worker may"),
        ("observer:0", 0, StopJob("because"), "observer:0 may not say StopJob: only a task of"),
        ("ps:1", 0, Drain(), "ps:1 may not say Drain: only a task of role worker may"),
        ("worker:1", 1, Held(0, ()), "worker:1 may not say Held: only a"),
        ("ps:0", 0, Decided(0, (), 1), "ps:0 may not speak as a server over this"),
        ("ps:7", 0, Attached(True, 0, 1), "a server is not asked Attached"),
    ],
)
def test_nobody_speaks_in_the_role_of_another(
    task: str, incarnation: int, said: Message, reason: str
) -> None:
    handler = ShardHandler(0, Clock())
    handler.view(view(1, 0, 1))
    victim = Victim(handler, PS_CATALOG)
    link = victim.link(task, incarnation)
    with pytest.raises(FrameError, match=reason):
        handler.received(cast(Link, link), Incoming(said, 1, (), 0))
    assert not victim.say(link, said.kind, PS_CATALOG.encode(said))


@pytest.mark.parametrize(
    ("task", "incarnation", "reason"),
    [
        ("worker:7", 1, "worker:7 is not in view 1"),
        ("worker:1", 2, "worker:1 was started anew: 1 has replaced 2"),
    ],
)
def test_who_is_not_in_the_job_is_fenced_off_whatever_it_says(
    task: str, incarnation: int, reason: str
) -> None:
    handler = ShardHandler(0, Clock())
    handler.view(view(1, 0, 1))
    victim = Victim(handler, PS_CATALOG)
    link = victim.link(task, incarnation)
    for said in (Attach(1, LAYOUT, SGD, ASYNC), Pull(1), Lease(1, "d", 100, 4, 1)):
        assert victim.ask(link, said) == Refused("fenced", reason, 1)


def test_an_update_counts_as_that_of_the_task_that_the_handshake_has_proven() -> None:
    """No message can name another worker, nor another start: it has no field for that."""
    handler = ShardHandler(0, Clock())
    handler.view(view(1, 0, 1))
    victim = Victim(handler, PS_CATALOG)
    links = [victim.link(f"worker:{worker}", 1) for worker in (0, 1)]
    for link in links:
        victim.ask(link, Attach(1, LAYOUT, SGD, ASYNC))
    victim.ask(links[0], Load(1, 0, (VALUES,), (), ()), NBYTES)
    pushed = victim.ask(links[1], Push(1, 1, 0, 0, 1.0), bytes(NBYTES))
    assert isinstance(pushed, PushReply) and pushed.verdict == Applied(1)
    status = victim.ask(victim.link("observer:0"), Status())
    assert isinstance(status, ServerStatus)
    assert status.workers == (WorkerProgress(0, 1, 0, 0, 0), WorkerProgress(1, 1, 1, 1, 0))
    named = {"worker", "incarnation", "server"}
    said = [kind for kind in PS_MESSAGES if issubclass(kind, (FromWorker, FromServer))]
    # A primary names the tasks whose events it replicates, and a replica says which start it is.
    between_replicas = {FollowPrimary, Replicate}
    claims = [kind for kind in said if named & set(kind.__struct_fields__)]
    assert set(claims) == between_replicas


def test_only_a_server_that_was_called_leads() -> None:
    handler = ShardHandler(1, Clock())
    handler.view(view(1, 0))
    victim = Victim(handler, PS_CATALOG)
    said = Decided(0, (), 1)
    impostor, leader = victim.link("ps:0"), victim.link("ps:0", opened_here=True)
    assert not victim.say(impostor, said.kind, PS_CATALOG.encode(said))
    assert victim.say(leader, said.kind, PS_CATALOG.encode(said))


@pytest.mark.parametrize("task", ["ps:abc", "ps:", "ps", "worker:-1", "worker:01", "worker:1 ", ""])
def test_a_task_without_a_name_is_denied(task: str) -> None:
    handshake = ServerHandshake("job", b"secret")
    hello = Hello("job", "", task, 0, bytes(32))
    assert handshake.answer(hello) == Denied("order")


# The coordinator ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_coordinator_serves_on(seed: int) -> None:
    coordinator = Coordinator(Policy(workers=2, servers=1))
    victim = Victim(coordinator, CLUSTER_CATALOG)
    good = victim.link("worker:0")
    assert isinstance(victim.ask(good, Join("worker", 0, 0, "h", 1, "")), Joined)
    templates: list[Message] = [
        *(Join("worker", 1, 0, "h", 1, ""), Join("worker", 1, 1, "h", 1, "")),
        *(Join("ps", 0, 0, "h", 1, "tcp://h:1"), Join("observer", 0, 0, "h", 1, "")),
        *(Heartbeat({"step": 1, "state": "training"}), JobOverHeard(), StatusQuery()),
        *(Leave("finished"), Joined(1, 1.0, 10.0), HeartbeatHeard()),
    ]
    fuzz(victim, random.Random(seed), templates, [0, 0, 0, 5])
    answer = victim.ask(victim.link("observer:0"), StatusQuery())
    assert len(msgspec.msgpack.encode(answer)) < 1 << 20
    assert isinstance(victim.ask(good, Heartbeat({})), HeartbeatHeard)
