"""A primary and its backup, whose messages come late; the primary dies at any moment.

The gradients are whole numbers and the learning rate is 1: a value counts the updates in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.cluster.view import ServerEntry, ShardEntry, View, WorkerEntry
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Applied,
    Attach,
    Duplicate,
    FencedVerdict,
    GroupSpec,
    OptimizerSpec,
    ParameterSpec,
    Push,
    PushReply,
)
from trireme.ps.replication.log import Lent, Tell
from trireme.ps.replication.messages import ConnectToShard, Fill, Replicate, Replicated
from trireme.ps.replication.replica import Replica, decoded
from trireme.ps.replication.replicas import Peer, Replicas
from trireme.ps.results import decided
from trireme.ps.rule import Rule
from trireme.ps.shard.instructions import Reply
from trireme.ps.shard.values.snapshot_tensors import tensors_from
from trireme.ps.snapshot_messages import Load, TensorSpec
from trireme.wire.handshake import Identity

SGD = OptimizerSpec("SGD", (GroupSpec({"lr": 1.0}),))
LAYOUT = Layout.of([ParameterSpec("w", (16,), "float32", 0)], servers=1, slots=1)
SERVERS = (ServerEntry(0, 1, "a"), ServerEntry(1, 1, "b"))
WORKERS = (WorkerEntry(0, 1), WorkerEntry(1, 1))
PAIR = View(1, SERVERS, WORKERS, (ShardEntry(0, 1, 0, (1,)),))
RULES = {"async": Rule(aggregate=1, staleness=None), "sync": Rule(aggregate=0, staleness=0)}


@dataclass(eq=False)
class Link:
    identity: Identity
    opened_here: bool = False
    number: int = 0


@dataclass(eq=False)
class Server:
    """One server, and what it has to say."""

    index: int
    replicas: Replicas[Link] = field(init=False)
    told: deque[Any] = field(default_factory=deque)  # to the other replica
    replies: list[Reply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.replicas = Replicas(self.index)
        self.replicas.incarnation = 1

    def carry_out(self, outputs: Iterable[Any]) -> None:
        for output in outputs:
            if isinstance(output, Tell):
                payload = [bytes(view) for view in output.payload]
                self.told.append((output.message, payload))
            elif isinstance(output, Reply) and output.route is not None:
                self.replies.append(output)

    def view(self, view: View) -> None:
        for _, output in self.replicas.take(0.0, view):
            self.carry_out([output])

    @property
    def replica(self) -> Replica[Link]:
        return self.replicas.by_shard[0]

    @property
    def count(self) -> float:
        values = self.replica.shard.state.values
        return 0.0 if values is None else float(values.buffer.vectors[0][0])


class Pair:
    """A primary, its backup, and two workers with one push each under way at most.

    A worker's gradient lies in its memory, which it uses for something else as soon as its push is
    answered. If it lends the memory, the backup reads the gradient there too.
    """

    def __init__(self, rule: Rule, *, lent: bool = False) -> None:
        self.rule = rule
        self.lent = lent
        self.memories = {worker: bytearray(64) for worker in range(2)}
        self.servers = [Server(0), Server(1)]
        self.view = PAIR
        self.acks: deque[int] = deque()
        self.sequences = {0: 0, 1: 0}
        self.waiting: dict[int, Push] = {}
        self.applied = 0  # updates that workers know to be applied
        for server in self.servers:
            server.view(PAIR)
        primary, backup = self.servers
        self.to_backup = Link(Identity("job", "ps:1"))
        backup.replicas.connected(Link(Identity("job", "ps:0"), opened_here=True), Peer(0, True, 0))
        taken = primary.replicas.followed(self.to_backup, backup.replica.follows(1))
        assert taken is not None
        primary.carry_out(taken[1])
        primary.replica.borrows(self.to_backup, [worker + 1 for worker in self.memories])
        self.links = {w: self._asks(primary, w) for w in range(2)}
        self._begin()

    def _asks(self, server: Server, worker: int) -> Link:
        link = Link(Identity("job", f"worker:{worker}", 1))
        assert server.replicas.addressed(link, ConnectToShard(0, 1)) is server.replica
        return link

    def _begin(self) -> None:
        for worker, link in self.links.items():
            attach = Attach(self.view.number, LAYOUT.spec, SGD, self.rule)
            self.request(worker, link, attach)
        spec = TensorSpec("values", "float32", "float32", 0, 16)
        raw = [memoryview(bytearray(64))]
        load = Load(self.view.number, 0, (spec,), (), ())
        self.request(0, self.links[0], load, tensors_from((spec,), raw), raw)
        self.settle()

    @property
    def primary(self) -> Server:
        return self.servers[self.view.shards[0].primary]

    def request(
        self,
        worker: int,
        link: Link,
        message: Any,
        what: Any = None,
        raw: Any = (),
        lent: Lent | None = None,
    ) -> None:
        replica = self.primary.replica
        if replica.dispatcher.admit(link, message) is not link:
            route = (worker, message)
            self.primary.carry_out(replica.request(0.0, link, route, message, what, raw, lent))
        self.hear()

    # -- what happens ----------------------------------------------------------------------------

    def push(self, worker: int) -> None:
        if worker not in self.waiting:
            self.sequences[worker] += 1
            step = self.primary.replica.shard.state.step
            pulled = self.known_step if self.rule.synchronous else step
            self.waiting[worker] = Push(
                0, self.sequences[worker], self.sequences[worker] - 1, pulled, 1.0
            )
        self.send(worker)

    known_step = 0

    def send(self, worker: int) -> None:
        push = msgspec.structs.replace(self.waiting[worker], view=self.view.number)
        gradients = self.gradients(worker)
        gradients.vectors[0].fill_(-1.0)
        lent = Lent(worker + 1, ((0, 64),)) if self.lent else None
        self.request(worker, self.links[worker], push, gradients, [*gradients.views], lent)

    def gradients(self, worker: int) -> PartBuffer:
        vector = torch.frombuffer(self.memories[worker], dtype=torch.float32)
        return PartBuffer(LAYOUT, 0, [vector])

    def deliver(self) -> None:
        """The backup hears one message, and confirms it some time."""
        primary, backup = self.servers
        if not primary.told or self.view.number > 1:
            return
        message, payload = primary.told.popleft()
        if isinstance(message, Fill):
            backup.replica.fill(0.0, message, (), ())
        else:
            assert isinstance(message, Replicate)
            event, what = decoded(message), None
            if isinstance(event, Push) and message.memory:
                assert not payload
                what = self.gradients(message.memory - 1)
            elif isinstance(event, Push):
                vector = torch.frombuffer(bytearray(payload[0]), dtype=torch.float32)
                what = PartBuffer(LAYOUT, 0, [vector])
            elif isinstance(event, Load):
                what = tensors_from(event.tensors, [memoryview(bytearray(payload[0]))])
            backup.carry_out(backup.replica.replicate(message, event, None, what))
        assert not backup.replies, "a backup answers nobody"
        self.acks.append(backup.replica.position)

    def confirm(self) -> None:
        """The primary hears a confirmation."""
        primary = self.servers[0]
        if self.acks and self.view.number == 1:
            position = self.acks.popleft()
            primary.carry_out(primary.replica.confirmed(self.to_backup, Replicated(position)))
            self.hear()

    def settle(self) -> None:
        while self.view.number == 1 and (self.servers[0].told or self.acks):
            self.deliver()
            self.confirm()

    def die(self) -> None:
        """The primary is gone; the backup is promoted, and workers ask it."""
        if self.view.number > 1:
            return
        self.view = View(2, SERVERS[1:], WORKERS, (ShardEntry(0, 1, 1),))
        promoted = self.servers[1]
        promoted.view(self.view)
        assert promoted.replica.primary
        self.links = {w: self._asks(promoted, w) for w in range(2)}
        for worker in [*self.waiting]:
            self.send(worker)

    # -- what workers hear -----------------------------------------------------------------------

    def hear(self) -> None:
        server = self.primary
        replies, server.replies = server.replies, []
        for reply in replies:
            assert isinstance(reply.route, tuple)
            worker, asked = reply.route
            message = reply.message
            if not isinstance(message, PushReply):
                continue
            if worker not in self.waiting or self.waiting[worker].sequence != asked.sequence:
                continue  # the answer to a repeat
            if isinstance(message.verdict, FencedVerdict):
                continue
            verdict = decided(message.verdict)
            assert isinstance(verdict, Applied | Duplicate), message
            del self.waiting[worker]
            self.gradients(worker).vectors[0].fill_(1234.5)
            self.applied += 1
            self.known_step = max(self.known_step, message.step)
            # Nobody sees a value that can be lost: the backup has every update in it.
            seen = float(reply.payload[0][0])
            assert seen <= self.servers[1].count
            assert seen == message.step


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


STEPS = st.lists(st.sampled_from(["push 0", "push 1", "deliver", "confirm", "die"]), max_size=60)


@pytest.mark.parametrize("name", RULES)
@given(steps=STEPS, lent=st.booleans())
@settings(deadline=None)
def test_no_acknowledged_update_is_lost_or_applied_twice(
    name: str, steps: list[str], lent: bool
) -> None:
    pair = Pair(RULES[name], lent=lent)
    for step in steps:
        if step.startswith("push"):
            pair.push(int(step[-1]))
        else:
            getattr(pair, step)()
    pair.settle()
    pair.die()
    if pair.rule.synchronous:  # a round needs both
        for worker in range(2):
            if pair.waiting and worker not in pair.waiting:
                pair.push(worker)
    assert not pair.waiting
    assert pair.applied == sum(pair.sequences.values())
    updates = 2 if pair.rule.synchronous else 1  # of a step
    assert pair.servers[1].count * updates == pair.applied


@pytest.mark.parametrize("name", RULES)
def test_both_replicas_are_equal_bit_by_bit(name: str) -> None:
    pair = Pair(RULES[name])
    for _ in range(10):
        for worker in range(2):
            pair.push(worker)
        pair.settle()
    first, second = (server.replica.shard.state for server in pair.servers)
    assert first.values is not None and second.values is not None
    assert first.values.buffer.vectors[0].equal(second.values.buffer.vectors[0])
    assert first.table.records == second.table.records
    assert first.step == second.step > 0


def test_a_primary_that_was_replaced_answers_nobody() -> None:
    pair = Pair(RULES["async"])
    pair.push(0)  # nobody has confirmed it
    old = pair.servers[0]
    pair.die()
    old.view(pair.view)
    assert not old.replies
    assert 0 not in old.replicas.by_shard, "it holds no replica any more"


def test_a_backup_without_the_workers_memory_is_sent_the_gradient() -> None:
    pair = Pair(RULES["async"], lent=True)
    primary = pair.servers[0]
    pair.push(0)
    message, payload = primary.told[-1]
    assert message.memory == 1 and message.places == ((0, 64),) and not payload
    pair.settle()
    primary.replica.borrows(pair.to_backup, [2])
    pair.push(0)
    message, payload = primary.told[-1]
    assert not message.memory and [len(each) for each in payload] == [64]


def test_answers_wait_until_the_backup_has_the_update() -> None:
    pair = Pair(RULES["async"])
    pair.push(0)
    assert pair.waiting
    pair.deliver()
    assert pair.waiting
    pair.confirm()
    assert not pair.waiting
