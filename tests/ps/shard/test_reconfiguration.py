"""Shards stop at one common cut, and others go on from their quiet states, bit by bit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import pytest
import torch

from trireme.cluster.view import ShardEntry, View, WorkerEntry
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import (
    Applied,
    Attach,
    Duplicate,
    GroupSpec,
    Lease,
    Leased,
    OptimizerSpec,
    ParameterSpec,
    Pull,
    PullReply,
    Push,
    PushReply,
    Span,
)
from trireme.ps.rule import Rule
from trireme.ps.shard.instructions import Instruction, Reply, Send
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.quiet_state import Quiet, export, united
from trireme.ps.shard.shard import Shard
from trireme.ps.snapshot_messages import Load, TensorSpec

SLOTS = 12
PARAMETER = ParameterSpec("w", (16 * SLOTS,), "float32", 0)
ADAM = OptimizerSpec("Adam", (GroupSpec({"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8}),))
SYNC = Rule(aggregate=0, staleness=0)
ASYNC = Rule(aggregate=1, staleness=None)
WORKERS = (WorkerEntry(0, 1), WorkerEntry(1, 1))


def entries(*bounds: int) -> tuple[ShardEntry, ...]:
    pairs = enumerate(itertools.pairwise(bounds))
    return tuple(ShardEntry(start, stop, index) for index, (start, stop) in pairs)


class Job:
    """Some shards, whose messages reach each other at once."""

    def __init__(self, rule: Rule, *bounds: int) -> None:
        self.view = View(1, (), WORKERS, entries(*bounds))
        self.rule = rule
        self.layout = Layout.of([PARAMETER], servers=1, slots=SLOTS).divided(bounds)
        self.shards = [Shard(index) for index in range(len(bounds) - 1)]
        self.replies: dict[object, Reply] = {}
        for shard in self.shards:
            self.carry_out(shard, shard.view(0.0, self.view))

    def carry_out(self, shard: Shard, instructions: list[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Reply):
                self.replies[each.route] = each
            elif isinstance(each, Send):
                other = self.shards[each.shard]
                self.carry_out(other, other.heard(0.0, shard.number, each.message))
        if shard.due:
            self.carry_out(shard, shard.go_on())

    @property
    def stopped(self) -> set[int]:
        return {shard.number for shard in self.shards if shard.stopped}

    def load(self, values: torch.Tensor) -> None:
        who = Participant(0, 1)
        for shard in self.shards:
            request = Attach(self.view.number, self.layout.spec, ADAM, self.rule)
            self.carry_out(shard, shard.request(0.0, None, who, request))
            (part,) = self.layout.parts(shard.number)
            spec = TensorSpec("values", "float32", "float32", part.start, part.stop)
            load = Load(self.view.number, 0, (spec,), (), ())
            tensors = [(spec, values[part.start : part.stop].clone())]
            self.carry_out(shard, shard.request(0.0, None, who, load, tensors))

    def push(self, worker: int, sequence: int, gradient: torch.Tensor, pulled: int) -> None:
        push = Push(self.view.number, sequence, sequence - 1, pulled, 1.0)
        for shard in self.shards:
            (part,) = self.layout.parts(shard.number)
            vectors = [gradient[part.start : part.stop].clone()]
            buffer = PartBuffer(self.layout, shard.number, vectors)
            route, who = (shard.number, worker, sequence), Participant(worker, 1)
            self.carry_out(shard, shard.request(0.0, route, who, push, buffer))

    def pull(self, worker: int) -> None:
        for shard in self.shards:
            route, who = ("pull", shard.number, worker), Participant(worker, 1)
            self.carry_out(shard, shard.request(0.0, route, who, Pull(self.view.number)))

    def lease(self, worker: int, incarnation: int, count: int) -> tuple[Span, ...]:
        shard, who = self.shards[0], Participant(worker, incarnation)
        request = Lease(self.view.number, "d", 100, 4, count, 1)
        self.carry_out(shard, shard.request(0.0, "lease", who, request))
        message = self.replies["lease"].message
        assert isinstance(message, Leased)
        return message.spans

    def divide(self, *bounds: int, workers: tuple[WorkerEntry, ...] = WORKERS) -> Quiet:
        """Stops all shards, and goes on with others and these workers; returns their beginning."""
        announced = View(
            self.view.number + 1, (), WORKERS, self.view.shards, next_shards=entries(*bounds)
        )
        for shard in self.shards:
            self.carry_out(shard, shard.view(0.0, announced))
        assert self.stopped == set(range(len(self.shards)))
        assert all(shard.stopped for shard in self.shards)
        quiets = [export(shard.state) for shard in self.shards]
        united_quiet = united([quiet for quiet in quiets if quiet is not None])
        self.view = View(announced.number + 1, (), workers, entries(*bounds), 2)
        self.layout = self.layout.divided(bounds)
        self.shards = [Shard(index) for index in range(len(bounds) - 1)]
        for shard in self.shards:
            self.carry_out(shard, shard.resume(0.0, self.view, united_quiet))
        return united_quiet

    @property
    def under_way(self) -> set[int]:
        leader = self.shards[0].state.leader
        assert leader is not None
        return leader.ending.under_way

    @property
    def values(self) -> torch.Tensor:
        found = [shard.state.values for shard in self.shards]
        return torch.cat([values.buffer.vectors[0] for values in found if values is not None])


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("bounds", [(0, 4, 8, 12), (0, 12), (0, 2, 7, 9, 12)])
@pytest.mark.parametrize("rule", [SYNC, ASYNC], ids=["sync", "async"])
def test_training_goes_on_bit_by_bit(rule: Rule, bounds: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(16 * SLOTS, generator=generator)
    divided, plain = Job(rule, 0, 6, 12), Job(rule, *bounds)
    for job in (divided, plain):
        job.load(first)
    for step in range(6):
        if step == 3:
            divided.divide(*bounds)
        for worker in range(2):
            gradient = torch.randn(16 * SLOTS, generator=generator)
            for job in (divided, plain):
                pulled = job.shards[0].state.step
                job.push(worker, step + 1, gradient, pulled if rule is ASYNC else step)
    assert divided.shards[0].state.step == plain.shards[0].state.step > 0
    assert torch.equal(divided.values, plain.values)


def test_a_push_that_was_decided_is_a_duplicate_after_the_division() -> None:
    job = Job(ASYNC, 0, 6, 12)
    job.load(torch.zeros(16 * SLOTS))
    job.push(0, 1, torch.ones(16 * SLOTS), 0)
    before = job.values.clone()
    job.divide(0, 4, 8, 12)
    job.push(0, 1, torch.ones(16 * SLOTS), 0)
    for shard in range(3):
        message = job.replies[shard, 0, 1].message
        assert isinstance(message, PushReply)
        assert message.verdict == Duplicate(Applied(1))
    assert torch.equal(job.values, before)


@pytest.mark.parametrize("bounds", [(0, 12), (0, 4, 8, 12)])
def test_a_worker_that_is_held_back_is_held_back_after_the_division_too(
    bounds: tuple[int, ...],
) -> None:
    job = Job(Rule(aggregate=1, staleness=1), 0, 6, 12)
    job.load(torch.zeros(16 * SLOTS))
    for sequence in (1, 2):
        job.push(0, sequence, torch.ones(16 * SLOTS), sequence - 1)
    assert (0, 0, 2) not in job.replies, "it is two ahead"
    job.divide(*bounds)
    for _ in range(2):
        job.push(0, 2, torch.ones(16 * SLOTS), 1)  # it asks again
        assert [shard.lags() for shard in job.shards] == [{0: 0, 1: 2}] * len(job.shards)
        assert all((shard.number, 0, 2) not in job.replies for shard in job.shards)
    job.push(1, 1, torch.ones(16 * SLOTS), 2)
    for shard in job.shards:
        message = job.replies[shard.number, 0, 2].message
        assert isinstance(message, PushReply) and message.verdict == Duplicate(Applied(2))


def test_a_push_that_was_not_decided_is_decided_once_after_the_division() -> None:
    job = Job(SYNC, 0, 6, 12)
    job.load(torch.zeros(16 * SLOTS))
    job.push(0, 1, torch.ones(16 * SLOTS), 0)  # the round waits for worker 1
    old = job.shards
    job.divide(0, 4, 8, 12)
    fenced = [reply.message for shard in old for reply in shard.dismiss(job.view.number)]
    assert len(fenced) == 2
    for worker in range(2):
        job.push(worker, 1, torch.ones(16 * SLOTS), 0)
    assert [shard.state.step for shard in job.shards] == [1, 1, 1]
    assert [record.applied for record in job.shards[2].state.table.records.values()] == [1, 1]


@pytest.mark.parametrize("rule", [SYNC, ASYNC], ids=["sync", "async"])
def test_workers_that_were_lost_or_started_anew_meanwhile_give_back_what_they_held(
    rule: Rule,
) -> None:
    job = Job(rule, 0, 12)
    job.load(torch.zeros(16 * SLOTS))
    held = {job.lease(worker, 1, 1) for worker in range(2)}
    for worker in range(2):
        job.pull(worker)
    assert job.under_way == {0, 1}
    job.divide(0, 6, 12, workers=(WorkerEntry(1, 2),))
    assert job.under_way == set()
    assert (
        {(span,) for span in job.lease(1, 2, 2)} == held == {(Span("d", 0, 4),), (Span("d", 4, 8),)}
    )


def test_another_view_lets_shards_go_on_that_were_to_be_divided() -> None:
    job = Job(ASYNC, 0, 6, 12)
    job.load(torch.zeros(16 * SLOTS))
    announced = View(2, (), WORKERS, job.view.shards, next_shards=entries(0, 12))
    for shard in job.shards:
        job.carry_out(shard, shard.view(0.0, announced))
    assert job.stopped == {0, 1}
    job.view = View(3, (), WORKERS, job.view.shards)
    for shard in job.shards:
        job.carry_out(shard, shard.view(0.0, job.view))
    job.push(0, 1, torch.ones(16 * SLOTS), 0)
    assert [shard.state.step for shard in job.shards] == [1, 1]


def test_nobody_waits_for_a_worker_that_was_lost_before_its_shard_began() -> None:
    job = Job(msgspec.structs.replace(ASYNC, max_steps=2), 0, 6, 12)
    job.load(torch.zeros(16 * SLOTS))
    job.pull(0)
    job.push(1, 1, torch.ones(16 * SLOTS), 0)
    quiet = job.divide(0, 12)
    job.view = View(job.view.number + 1, (), WORKERS[1:], job.view.shards, 2)
    job.shards = [Shard(0)]
    job.carry_out(job.shards[0], job.shards[0].resume(0.0, job.view, quiet))
    job.pull(1)
    assert job.replies["pull", 0, 1].message == PullReply(1, False)


def test_a_worker_that_pulls_again_has_given_up_the_update_that_it_had_begun() -> None:
    job = Job(msgspec.structs.replace(ASYNC, max_steps=1), 0, 6, 12)
    job.load(torch.zeros(16 * SLOTS))
    job.pull(0)
    job.pull(1)
    assert ("pull", 0, 1) not in job.replies, "worker 0 may make the last step"
    job.divide(0, 12)
    job.replies.clear()
    job.pull(1)
    assert ("pull", 0, 1) not in job.replies, "worker 0 may make the last step"
    job.pull(0)
    assert job.replies["pull", 0, 1].message == PullReply(0, False)
    assert ("pull", 0, 0) not in job.replies, "worker 1 may make the last step"


def test_a_shard_that_begins_as_other_shards_are_announced_already_stops() -> None:
    """Its server has missed the view before."""
    job = Job(ASYNC, 0, 6, 12)
    job.load(torch.zeros(16 * SLOTS))
    quiet = job.divide(0, 12)
    announced = View(job.view.number + 1, (), WORKERS, entries(0, 12), 2, entries(0, 6, 12))
    job.shards = [Shard(0)]
    job.carry_out(job.shards[0], job.shards[0].resume(0.0, announced, quiet))
    assert job.stopped == {0}
