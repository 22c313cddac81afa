"""Published values at a shard: who is sent what has changed, and who all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.ps.bench import Bench, applied, told
from trireme.ps.client.subscription import Subscription
from trireme.ps.flat import PartBuffer, as_bytes
from trireme.ps.messages import (
    Duplicate,
    GroupSpec,
    OptimizerSpec,
    Pull,
    PullReply,
    Push,
    PushReply,
    Stale,
)
from trireme.ps.rule import Rule
from trireme.ps.shard.instructions import Instruction, Reply
from trireme.ps.shard.participants import Participant
from trireme.wire.codec import BlockInt8

EVERY = 8
ROUNDS = Rule(aggregate=0, staleness=0, every=EVERY, codec="int8")
QUORUM = Rule(aggregate=1, staleness=0, every=EVERY, codec="int8")
ONE_BY_ONE = Rule(aggregate=1, staleness=1000, every=EVERY, codec="int8")
GRADIENTS = Rule(aggregate=0, staleness=0, codec="int8")
HALVES = Rule(aggregate=0, staleness=0, every=EVERY, codec="fp16")
NESTEROV = OptimizerSpec("SGD", (GroupSpec({"lr": 0.7, "momentum": 0.9, "nesterov": True}),))


def since_of(instructions: Sequence[Instruction]) -> dict[object, int | None]:
    """For each answer to a push with values: since which step, by route."""
    return {
        i.route: i.message.since
        for i in instructions
        if isinstance(i, Reply) and isinstance(i.message, PushReply) and i.payload
    }


def test_who_has_the_values_before_is_sent_what_has_changed() -> None:
    bench = Bench(ROUNDS)
    bench.pull(0)
    bench.push(0, 1, 2.0, steps=EVERY)
    out = bench.push(1, 1, 4.0, steps=EVERY)
    assert since_of(out) == {"push 0.1": 0, "push 1.1": 0}
    sizes = {sum(t.numel() for t in i.payload) for i in out if isinstance(i, Reply)}
    assert max(sizes) <= 4 + 16 < 64


@pytest.mark.parametrize("rule", [ONE_BY_ONE, GRADIENTS, HALVES])
def test_elsewhere_values_are_whole(rule: Rule) -> None:
    bench = Bench(rule, workers=(0,))
    assert since_of(bench.push(0, 1, 2.0)) == {"push 0.1": None}
    assert bench.value == 98.0


def test_who_asks_again_is_sent_the_same_change() -> None:
    bench = Bench(ROUNDS, workers=(0,))
    (first,) = bench.push(0, 1, 2.0, pulled=0)
    (again,) = bench.push(0, 1, 2.0, pulled=0)
    assert isinstance(first, Reply) and isinstance(again, Reply)
    assert isinstance(again.message, PushReply) and isinstance(again.message.verdict, Duplicate)
    assert again.message.since == 0
    assert all(map(torch.equal, first.payload, again.payload))


def test_who_comes_one_round_late_is_sent_the_change_and_who_comes_later_all() -> None:
    bench = Bench(QUORUM, workers=(0, 1, 2))
    bench.push(0, 1, 2.0, pulled=0, steps=EVERY)
    late = bench.push(1, 1, 2.0, pulled=0, steps=EVERY)
    assert told(late) == [("push 1.1", PushReply(Stale(EVERY), EVERY, EVERY, False, 0))]
    bench.push(0, 2, 2.0, pulled=EVERY, steps=EVERY)
    later = bench.push(2, 1, 2.0, pulled=0, steps=EVERY)
    assert since_of(later) == {"push 2.1": None}


def test_who_comes_anew_is_sent_all_though_it_is_less_than_the_true_values() -> None:
    bench = Bench(ROUNDS, workers=(0, 1))
    generator = torch.Generator().manual_seed(1)
    push_numbers(bench, 0, 1, torch.randn(16, generator=generator))
    push_numbers(bench, 1, 1, torch.randn(16, generator=generator))
    bench.view(0, (1, 2))
    published = pulled(bench, 1, incarnation=2)
    assert torch.equal(published, pulled(bench, 0))
    true = values_of(bench)
    assert not torch.equal(published, true)
    torch.testing.assert_close(published, true, rtol=0, atol=2 / 127)


def test_a_copy_is_of_the_true_values_and_with_state_of_the_published_ones_too() -> None:
    bench = Bench(ROUNDS, workers=(0,))
    push_numbers(bench, 0, 1, torch.linspace(-1, 1, 16))
    bench.freeze()
    (reply,) = (i for i in bench.cut(1, (0, 1), state=True) if isinstance(i, Reply))
    keys = [spec.key for spec in reply.message.tensors]  # type: ignore[attr-defined]
    assert keys == ["values", "state/published"]
    true, published = reply.payload
    assert torch.equal(true, values_of(bench))
    assert torch.equal(published, pulled(bench, 0))
    bench.freeze()
    (reply,) = (i for i in bench.cut(1, (0, 1)) if isinstance(i, Reply))
    assert [spec.key for spec in reply.message.tensors] == ["values"]  # type: ignore[attr-defined]


def values_of(bench: Bench) -> torch.Tensor:
    """The true values."""
    return bench.shard.state.values.buffer.vectors[0].clone()


def pulled(bench: Bench, worker: int, incarnation: int = 1) -> torch.Tensor:
    """What a worker that comes anew is sent."""
    who, request = Participant(worker, incarnation), Pull(bench.view_number, False)
    (reply,) = bench.shard.pull(bench.now, "look", who, request)
    assert isinstance(reply, Reply) and isinstance(reply.message, PullReply)
    return reply.payload[0].clone()


def push_numbers(
    bench: Bench,
    worker: int,
    sequence: int,
    numbers: torch.Tensor,
    incarnation: int = 1,
    **changed: int,
) -> list[Instruction]:
    """A delta of any numbers."""
    gradients = PartBuffer(bench.layout, 0)
    gradients.vectors[0].copy_(numbers)
    fields = {
        "view": bench.view_number,
        "acknowledged": sequence - 1,
        "pulled": bench.shard.state.step,
        "weight": 1.0,
        "steps": EVERY,
        **changed,
    }
    who, push = Participant(worker, incarnation), Push(sequence=sequence, **fields)  # type: ignore[arg-type]
    return bench.shard.push(bench.now, ("push", worker), who, push, gradients)


class Model:
    """A worker of the machine: what it has, and which push is under way."""

    def __init__(self, bench: Bench) -> None:
        self.values = PartBuffer(bench.layout, 0)
        self.subscription = Subscription(BlockInt8(), [self.values])
        self.incarnation = 1
        self.sequence = 0
        self.step: int | None = None
        self.waits = False

    def hear(self, reply: Reply) -> None:
        """As `Client` takes an answer."""
        message = reply.message
        assert isinstance(message, PushReply | PullReply)
        data = b"".join(bytes(as_bytes(tensor)) for tensor in reply.payload)
        packed = isinstance(message, PushReply) and message.since is not None
        views = self.subscription.place(0, len(data)) if packed else self.values.views
        rest = memoryview(data)
        for view in views:
            view[:] = rest[: view.nbytes]
            rest = rest[view.nbytes :]
        self.subscription.take(0, message)  # type: ignore[arg-type]
        self.step, self.waits = message.step, False


class PublicationMachine(RuleBasedStateMachine):
    """Workers push, lose answers, ask again, die and come back; two make a round."""

    @initialize(aggregate=st.sampled_from([0, 1, 2]))
    def begin(self, aggregate: int) -> None:
        rule = Rule(aggregate=aggregate, staleness=0, every=EVERY, codec="int8")
        self.bench = Bench(rule, workers=(0, 1, 2), optimizer=NESTEROV)
        self.workers = [Model(self.bench) for _ in range(3)]
        self.generator = torch.Generator().manual_seed(7)
        for worker in range(3):
            self.pull(worker)

    def pull(self, worker: int) -> None:
        model = self.workers[worker]
        who = Participant(worker, model.incarnation)
        request = Pull(self.bench.view_number, True)
        for each in self.bench.shard.pull(self.bench.now, ("pull", worker), who, request):
            self.take(each)

    def push(self, worker: int) -> list[Instruction]:
        """The push under way, for the first time or again."""
        model = self.workers[worker]
        assert model.step is not None
        return push_numbers(
            self.bench,
            worker,
            model.sequence,
            torch.randn(16, generator=self.generator),
            incarnation=model.incarnation,
            pulled=model.step,
        )

    def take(self, instruction: Instruction) -> None:
        assert isinstance(instruction, Reply)
        _, worker = instruction.route  # type: ignore[misc]
        self.workers[worker].hear(instruction)

    @rule(worker=st.integers(0, 2), lost=st.booleans())
    def pushes(self, worker: int, lost: bool) -> None:
        """A worker pushes, or asks again; the answers of this moment may all be lost."""
        model = self.workers[worker]
        if not model.waits:
            model.sequence += 1
            model.waits = True
        for each in self.push(worker):
            if not lost:
                self.take(each)

    @rule(worker=st.integers(0, 2))
    def dies_and_comes_back(self, worker: int) -> None:
        incarnation = 1 + max(before.incarnation for before in self.workers)
        model = self.workers[worker] = Model(self.bench)
        model.incarnation = incarnation
        for each in self.bench.view(*self.entries):
            fenced = isinstance(each, Reply) and not each.payload
            if not fenced:
                self.take(each)
        self.pull(worker)

    @property
    def entries(self) -> list[tuple[int, int]]:
        return [(index, model.incarnation) for index, model in enumerate(self.workers)]

    @precondition(lambda self: hasattr(self, "bench"))
    @invariant()
    def who_is_up_to_date_has_the_published_values(self) -> None:
        published = pulled(self.bench, 0, self.workers[0].incarnation)
        for model in self.workers:
            if model.step == self.bench.shard.state.step:
                assert torch.equal(model.values.vectors[0], published)

    @precondition(lambda self: hasattr(self, "bench"))
    @invariant()
    def what_is_missing_is_not_much(self) -> None:
        published = pulled(self.bench, 0, self.workers[0].incarnation)
        assert (published - values_of(self.bench)).abs().max() < 1.0


TestPublications = PublicationMachine.TestCase
TestPublications.settings = settings(stateful_step_count=40, deadline=None)


def test_rounds_count_as_without_packing() -> None:
    bench = Bench(ROUNDS)
    bench.push(0, 1, 2.0, steps=EVERY)
    answers = told(bench.push(1, 1, 4.0, steps=EVERY))
    plain = applied(EVERY)
    assert [(r, a.verdict, a.step) for r, a in answers] == [  # type: ignore[attr-defined]
        ("push 0.1", plain.verdict, EVERY),
        ("push 1.1", plain.verdict, EVERY),
    ]
