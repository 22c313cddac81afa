"""What a server does with its connections, seen without a network."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.ps.bench import ASYNC, SYNC, Bench, view
from trireme.cluster.view import ServerEntry, ShardEntry, View, WorkerEntry
from trireme.errors import FrameError, OutOfMemory
from trireme.ps.extra import Place
from trireme.ps.flat import PartBuffer, as_bytes
from trireme.ps.leader.decisions import Decided, Held
from trireme.ps.lending_messages import LendExtra, MemoryLent
from trireme.ps.messages import (
    Attach,
    Attached,
    GroupSpec,
    OptimizerSpec,
    Pull,
    PullExtra,
    PullReply,
    Push,
    PushReply,
    Refused,
    Share,
    Status,
)
from trireme.ps.replication.log import EVENTS
from trireme.ps.replication.messages import ConnectToLeader, ConnectToShard, Fill, Pulse, Replicate
from trireme.ps.replication.replicas import Peer
from trireme.ps.rule import Average, Rule
from trireme.ps.server.handler import ShardHandler
from trireme.ps.server.measures import Measures, Report
from trireme.ps.server.receive_buffer import ReceiveBuffer
from trireme.ps.shard.values.parameters import Values
from trireme.ps.shard.watch import Watch
from trireme.ps.snapshot_messages import Load, TensorSpec, WriteValues
from trireme.wire.connection import Incoming, SharedPayload
from trireme.wire.handshake import Identity
from trireme.wire.message import Message
from trireme.wire.service import Link

SIZES = {"float32": 4, "float16": 2, "float64": 8, "int32": 4, "uint8": 1, "int64": 8, "bool": 1}


@dataclass(eq=False)
class FakeLink:
    identity: Identity
    sent: list[Message] = field(default_factory=list)
    payloads: list[Sequence[Any]] = field(default_factory=list)
    closed: bool = False
    context: Any = None
    connection: Any = field(
        default_factory=lambda: SimpleNamespace(
            destination=None, lending=None, stream=SimpleNamespace(take_descriptor=lambda: None)
        )
    )
    opened_here: bool = True
    number: int = 0

    def offer(self, message: Message, payload: Sequence[Any] = (), *, sequence: int = 0) -> bool:
        self.sent.append(message)
        self.payloads.append(payload)
        return True

    def close(self) -> None:
        self.closed = True


class Server:
    """A handler, spoken to over links of the test's."""

    def __init__(
        self, index: int = 0, workers: Sequence[int] = (0, 1), handler: ShardHandler | None = None
    ) -> None:
        self.handler = handler or ShardHandler(index, now=lambda: 1.0)
        self.handler.view(view(1, *workers))

    def link(self, task: str, incarnation: int = 0, calls: str = "ps:0") -> FakeLink:
        link = FakeLink(Identity("job", task, incarnation, calls=calls))
        self.handler.authenticated(cast(Link, link))
        index, role = link.identity.index, link.identity.role
        if role != "ps":
            self.hear(link, ConnectToShard(self.handler.index, 1))
        elif index == 0:  # this server has connected to server 0
            self.handler.connected(cast(Link, link), Peer(self.handler.index, False, 0))
            assert link.sent.pop(0) == ConnectToLeader(self.handler.index, 1)
        elif calls == "ps:0":
            link.opened_here = False
            self.hear(link, ConnectToLeader(index, 1))
            assert link.closed or link.sent.pop(0) == Pulse()
        return link

    def hear(self, link: FakeLink, message: Message, payload: Sequence[memoryview] = ()) -> None:
        self.handler.received(cast(Link, link), Incoming(message, 1, payload, 0))


def test_the_connection_that_a_process_speaks_over_closes_the_one_before() -> None:
    server = Server()
    old, new = server.link("worker:0", 1), server.link("worker:0", 1)
    server.hear(old, Status())
    assert not old.closed, "nothing has come over the other yet"
    server.hear(new, Status())
    assert old.closed
    server.handler.closed(cast(Link, old), None)
    newest = server.link("worker:0", 1)
    server.hear(newest, Status())
    assert new.closed


def test_what_a_connection_brings_late_is_not_heard() -> None:
    """The network may bring what was sent over a connection after what came over the next."""
    server = Server()
    old, new = server.link("worker:0", 1), server.link("worker:0", 1)
    server.hear(new, Status())
    server.hear(old, Status())
    assert old.closed and not old.sent
    assert not new.closed
    server.handler.closed(cast(Link, new), None)
    late = server.link("worker:0", 1)
    server.hear(server.link("worker:0", 1), Status())
    server.hear(late, Status())
    assert late.closed and not late.sent


def test_a_connection_is_old_though_its_first_message_comes_after_that_of_the_next() -> None:
    """A request over it would be one that was answered long ago, such as to load values."""
    server = Server()
    old, new = (FakeLink(Identity("job", "worker:0", 1)) for _ in range(2))
    for link in (old, new):
        server.handler.authenticated(cast(Link, link))
    for link in (new, old):
        server.hear(link, ConnectToShard(0, 1))
    server.hear(new, Status())
    server.hear(old, Status())
    assert old.closed and not old.sent
    assert not new.closed


def test_other_processes_keep_their_connections() -> None:
    server = Server()
    links = [
        server.link("worker:0", 1),
        server.link("worker:0", 2),
        server.link("worker:1", 1),
        server.link("observer"),
        server.link("observer"),
    ]
    for link in links:
        server.hear(link, Status())
    assert not any(link.closed for link in links)


def test_a_server_repeats_its_last_word_over_a_new_connection() -> None:
    server = Server(1, workers=(0,))
    bench = Bench(SYNC, server=1, servers=2)
    (part,) = bench.layout.parts(1)
    worker, leader = server.link("worker:0", 1), server.link("ps:0")
    server.hear(worker, Attach(1, bench.layout.spec, bench.optimizer, SYNC))
    tensor = TensorSpec("values", "float32", "float32", part.start, part.stop)
    load = Load(1, 0, (tensor,), (), ())
    server.hear(worker, load, [memoryview(bytearray(part.bytes))])
    push = Push(1, 1, 0, 0, 1.0)
    server.hear(worker, push, worker.connection.destination(push, part.bytes))
    said = Held(0, ((0, 1, 1),))
    assert leader.sent == [said]
    assert server.link("ps:0").sent == [said]


def test_a_server_that_calls_the_coordinator_is_not_talked_to_as_a_server() -> None:
    """Server 0 hosts the coordinator of a job by hand, and the others are its members."""
    server = Server(workers=(0,))
    bench = Bench(SYNC, servers=2)
    (part,) = bench.layout.parts(0)
    worker, other = server.link("worker:0", 1), server.link("ps:1")
    member = server.link("ps:1", 1, calls="coordinator:0")  # it comes again after a disturbance
    server.hear(worker, Attach(1, bench.layout.spec, bench.optimizer, SYNC))
    tensor = TensorSpec("values", "float32", "float32", part.start, part.stop)
    load = Load(1, 0, (tensor,), (), ())
    server.hear(worker, load, [memoryview(bytearray(part.bytes))])
    push = Push(1, 1, 0, 0, 1.0)
    server.hear(worker, push, worker.connection.destination(push, part.bytes))
    server.hear(other, Held(0, ((0, 1, 1),)))
    assert {type(message) for message in other.sent} == {Decided}
    assert not member.sent


def test_a_server_takes_words_of_others_only_over_its_link_to_server_0() -> None:
    server = Server(1)
    link = server.link("ps:2")
    assert link.closed, "only shard 0 is spoken with"
    with pytest.raises(FrameError, match="ps:2 did not say which shard it asks"):
        server.hear(link, Held(0, ()))


def test_the_primary_of_shard_0_tells_the_others_that_it_lives_and_nobody_else_does() -> None:
    leader, other = Server(), Server(1)
    to_other, to_leader = leader.link("ps:1"), other.link("ps:0")
    worker = leader.link("worker:0", 1)
    for now in (1.0, 1.1, 1.6):
        leader.handler.tick(now)
        other.handler.tick(now)
    assert to_other.sent == [Pulse(), Pulse()] and not worker.sent and not to_leader.sent
    other.hear(to_leader, Pulse())
    for link in (to_other, worker):
        with pytest.raises(FrameError, match=f"{link.identity.task} is not the primary of shard 0"):
            leader.hear(link, Pulse())


def test_a_short_patience_has_more_pulses() -> None:
    server = Server(handler=ShardHandler(0, now=lambda: 1.0, patience=0.5))
    link = server.link("ps:1")
    for tenth in range(10):
        server.handler.tick(1.0 + tenth * 0.11)
    assert link.sent == [Pulse()] * 10


def test_only_messages_that_have_a_payload_bring_one() -> None:
    worker = Server().link("worker:0", 1)
    assert [view.nbytes for view in worker.connection.destination(Share("topic"), 7)] == [7]
    for message, length in ((Status(), 7), (Share("topic"), 1 << 40)):
        with pytest.raises(FrameError, match=f"has no payload of {length} bytes"):
            worker.connection.destination(message, length)


class Measured(Measures):
    def __init__(self) -> None:
        self.seconds = list[float]()

    def applied(self, seconds: float) -> None:
        self.seconds.append(seconds)


def test_a_server_tells_its_status_each_half_second_and_not_more_often() -> None:
    told, handler = list[Report](), ShardHandler(0)
    handler.on_report = told.append
    for now in (1.0, 1.4, 1.6):
        handler.tick(now)
    assert len(told) == 2


def test_a_step_is_measured_once_however_many_messages_come() -> None:
    clock, measures = itertools.count(1.0, 0.25), Measured()
    handler = ShardHandler(0, lambda: next(clock), measures)
    server = Server(workers=(0,), handler=handler)
    bench = Bench(SYNC)
    worker = server.link("worker:0", 1)
    server.hear(worker, Attach(1, bench.layout.spec, bench.optimizer, SYNC))
    (part,) = bench.layout.parts(0)
    spec = TensorSpec("values", "float32", "float32", part.start, part.stop)
    values = torch.full((part.length,), 100.0)
    server.hear(worker, Load(1, 0, (spec,), (), ()), [as_bytes(values)])
    server.hear(worker, Pull(1))
    assert not measures.seconds
    push = Push(1, 1, 0, 0, 1.0)
    gradient = worker.connection.destination(push, values.nbytes)
    notes = list[Any]()
    handler.note = lambda *note: notes.append(note)
    server.hear(worker, push, gradient)
    server.hear(worker, Status())
    assert handler.shard.state.step == 1
    assert [(*note[:1], *note[3:]) for note in notes] == [
        *(("apply", "", 1), ("Push", "worker:0", 0), ("Status", "worker:0", 0))
    ]
    seconds = notes[0][2] - notes[0][1]
    assert measures.seconds == [seconds] and seconds > 0
    handler.note = None
    push = Push(1, 2, 1, 1, 1.0)
    server.hear(worker, push, worker.connection.destination(push, values.nbytes))
    assert handler.shard.state.step == len(measures.seconds) == 2
    assert len(notes) == 3


def test_a_load_is_measured_before_it_is_received() -> None:
    """Of what may come besides values: whole numbers, and scalars, for whatever they hold."""
    server = Server(workers=(0,))
    bench = Bench(SYNC)
    worker = server.link("worker:0", 1)
    server.hear(worker, Attach(1, bench.layout.spec, bench.optimizer, SYNC))

    def room(*tensors: TensorSpec) -> int:
        load = Load(1, 0, tensors, (), ())
        length = sum(SIZES[spec.dtype] * (1 if spec.group >= 0 else 16) for spec in tensors)
        return sum(view.nbytes for view in worker.connection.destination(load, length))

    assert room(*(TensorSpec(name, name, "float32", 0, 16) for name in SIZES)) == 16 * 28
    assert room(*(TensorSpec(name, name, "float32", 0, 16, 0) for name in SIZES)) == 28
    scalars = [TensorSpec("state/step", "float64", "float32", 0, 16, 0)] * 1000
    assert room(*scalars) == 8000, "more than values take"
    for invalid in (TensorSpec("x", "str", "float32", 0, 16), TensorSpec("x", "bool", "x", 2, 1)):
        with pytest.raises(FrameError, match="a tensor of a load makes no sense: TensorSpec"):
            worker.connection.destination(Load(1, 0, (invalid,), (), ()), 16)


class ManyWorkers:
    """A server and the links of its workers, which pushes come over; all buffers are counted."""

    def __init__(self, rule: Rule, workers: int, patched: pytest.MonkeyPatch) -> None:
        self.made = list[PartBuffer]()
        new = ReceiveBuffer._new

        def counted(*said: Any) -> Any:
            made = new(*said)
            self.made.append(made[0])
            return made

        patched.setattr(ReceiveBuffer, "_new", counted)
        self.server, bench = Server(workers=range(workers)), Bench()
        self.links = [self.server.link(f"worker:{index}", 1) for index in range(workers)]
        for link in self.links:
            self.server.hear(link, Attach(1, bench.layout.spec, bench.optimizer, rule))
        load = Load(1, 0, (TensorSpec("values", "float32", "float32", 0, 16),), (), ())
        self.server.hear(self.links[0], load, [as_bytes(torch.zeros(16))])

    def push(self, worker: int, sequence: int, gradient: float) -> None:
        link, message = self.links[worker], Push(1, sequence, sequence - 1, sequence - 1, 1.0)
        (memory,) = link.connection.destination(message, 64)
        memory[:] = as_bytes(torch.full((16,), gradient))
        self.server.hear(link, message, link.context.views)

    @property
    def values(self) -> list[float]:
        values = self.server.handler.shard.state.values
        assert values is not None
        return values.buffer.vectors[0].tolist()


class Doubts(Watch):
    """Takes no gradient of 7, notes when values change, and has a digest of those of each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []

    def accepts(self, task: str, push: Push, gradients: PartBuffer) -> bool:
        return gradients.vectors[0][0].item() != 7.0

    def before_change(self, step: int, values: Values) -> None:
        self.seen.append(("before", step, values.buffer.vectors[0][0].item()))

    def after_change(self, step: int, values: Values) -> None:
        self.seen.append(("after", step, values.buffer.vectors[0][0].item()))

    def digest(self, values: Values, sent: Sequence[torch.Tensor]) -> int:
        return 100 + int(sent[0][0].item())


def test_a_watch_sees_each_change_and_refuses_what_is_not_as_it_was_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many, watch = ManyWorkers(ASYNC, 2, monkeypatch), Doubts()
    many.server.handler.shard.state.watch = watch
    many.push(0, 1, 7.0)
    assert many.links[0].closed and not watch.seen and many.values == [0.0] * 16
    many.server.handler.closed(cast(Link, many.links[0]), None)
    many.links[0] = many.server.link("worker:0", 1)
    many.push(0, 1, 1.0)  # it comes again
    assert watch.seen == [("before", 0, 0.0), ("after", 1, -1.0)]
    (answer,) = [each for each in many.links[0].sent if isinstance(each, PushReply)]
    assert answer.digest == 99
    many.server.hear(many.links[1], Pull(1, 0))
    (pulled,) = [each for each in many.links[1].sent if isinstance(each, PullReply)]
    assert pulled.digest == 99


def test_asynchronous_workers_use_one_receive_buffer_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And not one each: a thousand would take a thousand times the shard's memory."""
    many = ManyWorkers(ASYNC, 6, monkeypatch)
    for sequence in (1, 2):
        for worker in range(6):
            many.push(worker, sequence, 1.0)
    assert many.values == [-12.0] * 16 and len(many.made) == 1


def test_a_receive_buffer_is_not_given_out_while_a_round_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = ManyWorkers(SYNC, 6, monkeypatch)
    for sequence in (1, 2):
        for worker in range(6):
            many.push(worker, sequence, float(worker))
    assert many.values == [-5.0] * 16 and len(many.made) == 6


def test_a_push_that_is_repeated_takes_no_receive_buffer_from_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first is answered over the later connection, whose own buffer is free then."""
    many = ManyWorkers(SYNC, 2, monkeypatch)
    many.push(0, 1, 1.0)
    many.links[0] = many.server.link("worker:0", 1)
    many.push(0, 1, 7.0)
    many.push(1, 1, 3.0)
    assert many.values == [-2.0] * 16
    many.push(0, 2, 1.0)
    many.push(1, 2, 3.0)
    assert many.values == [-4.0] * 16 and len(many.made) == 3


def test_receive_buffers_are_freed_with_the_connections_of_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = ManyWorkers(SYNC, 6, monkeypatch)
    for worker in range(6):
        many.push(worker, 1, 1.0)
    there = [*map(weakref.ref, many.made)]
    many.made.clear()
    for link in many.links[1:]:
        many.server.handler.closed(cast(Link, link), None)
    assert sum(each() is not None for each in there) == 1


def test_answers_share_a_payload_as_long_as_the_values_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = ManyWorkers(SYNC, 3, monkeypatch)

    def answers() -> Sequence[Any]:
        for link in many.links:
            many.server.hear(link, Pull(1, 0))
        first, *others = [link.payloads[-1] for link in many.links]
        assert isinstance(first, SharedPayload) and all(each is first for each in others)
        return first

    shown = [answers()]
    for sequence in (1, 2):
        for worker in range(3):
            many.push(worker, sequence, 1.0)
        shown.append(many.links[0].payloads[-1])
        assert answers() is shown[-1]
    spec = TensorSpec("values", "float32", "float32", 0, 16)
    many.server.hear(many.links[0], WriteValues(1, (spec,)), [as_bytes(torch.ones(16))])
    shown.append(answers())
    assert many.values == [1.0] * 16
    assert len(set(map(id, shown))) == 4


def test_a_model_that_is_too_large_for_the_host_is_refused_by_its_size() -> None:
    """16 numbers, as many gradients and two moments: 256 bytes, and with an average 320."""
    adam = OptimizerSpec("Adam", (GroupSpec({"lr": 0.1}),))
    bench, average = Bench(optimizer=adam), Rule(average=Average(0.9))
    for room, rule, fits in ((255, ASYNC, False), (256, ASYNC, True), (319, average, False)):
        handler = ShardHandler(0, lambda: 1.0, memory=lambda room=room: room)  # type: ignore[misc]
        server = Server(workers=(0,), handler=handler)
        worker = server.link("worker:0", 1)
        server.hear(worker, Attach(1, bench.layout.spec, adam, rule))
        if fits:
            assert worker.sent == [Attached(False, 0, 1)]
            continue
        (refused,) = worker.sent
        assert isinstance(refused, Refused) and refused.code == "rejected"
        assert "optimizer's state, at ps:0 takes 0.0 GB" in refused.reason
        assert "use more servers" in refused.reason
        assert handler.shard.state.shown is None


def test_a_backup_with_too_little_memory_for_the_model_ends() -> None:
    """Its primary has taken the model: it cannot be refused any more."""
    handler = ShardHandler(1, lambda: 1.0, memory=lambda: 1)
    servers = tuple(ServerEntry(index, 1, f"address {index}") for index in range(2))
    handler.view(View(1, servers, (WorkerEntry(0, 1),), (ShardEntry(0, 1, 0, (1,)),)), 1)
    link, bench = FakeLink(Identity("job", "ps:0")), Bench()
    handler.connected(cast(Link, link), Peer(0, True, 0))
    attach = Attach(1, bench.layout.spec, bench.optimizer, ASYNC)
    view_comes = Fill(handler.replicas.view, b"", ())
    entry = Replicate(1, 1.0, 0, 1, event_kind=attach.kind, event=EVENTS.encode(attach), since=1)
    server = Server.__new__(Server)
    server.handler = handler
    server.hear(link, view_comes)
    with pytest.raises(OutOfMemory, match="at ps:1 takes"):
        server.hear(link, entry)


def test_extra_values_in_memory_that_was_not_lent_are_refused() -> None:
    server = Server()
    link, place = server.link("worker:0", 1), Place(0, 8)
    for request in (PullExtra(1, (place,)), Push(1, 1, 0, 0, 1.0, extra=(bytes(8), place))):
        with pytest.raises(FrameError, match="was not lent over its connection"):
            server.hear(link, request)
    server.hear(link, LendExtra(4096))
    assert link.sent == [MemoryLent(False)], "no descriptor has come along"
