"""An update that cannot be applied is refused by every copy alike, and ends no server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ps.bench import ASYNC, SYNC, Bench, told
from tests.ps.test_optimizers import CASES
from trireme.errors import OutOfMemory
from trireme.ps.extra import ShownExtension
from trireme.ps.messages import (
    Applied,
    Duplicate,
    GroupSpec,
    OptimizerSpec,
    PushReply,
    RejectedVerdict,
    Verdict,
)
from trireme.ps.rule import Rule
from trireme.ps.shard.values.segment_optimizer import SegmentOptimizer

POISON = 666.0


def copies(rule: Rule = ASYNC, extension: ShownExtension | None = None, **made: Any) -> list[Bench]:
    """Two copies of a shard, which are given the same events."""
    both = [Bench(rule, loaded=False, **made) for _ in range(2)]
    for each in both:
        each.attach(0, extension=extension)
        each.load(0)
    return both


def verdicts(copies: list[Bench], event: Callable[[Bench], Any]) -> list[Verdict]:
    """Gives an event to all copies; returns their verdicts, which are the same."""
    first, second = (
        [m.verdict for _, m in told(event(each)) if isinstance(m, PushReply)] for each in copies
    )
    assert first == second
    return first


def contents(bench: Bench) -> list[tuple[Any, bytes]]:
    """All that a copy holds, bit for bit."""
    state = bench.shard.state
    assert state.values is not None
    tensors = state.values.copy(state=True)
    if state.extension is not None:
        tensors += state.extension.copy()
    held = [(spec, tensor.numpy().tobytes()) for spec, tensor in tensors]
    return [*held, (state.step, repr(state.table.records).encode())]


def is_refused(verdict: Verdict, why: str) -> bool:
    return isinstance(verdict, RejectedVerdict) and why in verdict.reason


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optimizers raise after they have applied a gradient of `POISON`."""
    step = SegmentOptimizer.step

    def dense(self: Any, gradients: Any, *rest: Any) -> None:
        poison = gradients.vectors[0][0].item() >= POISON
        step(self, gradients, *rest)
        if poison:
            raise ValueError("half of it is applied")

    monkeypatch.setattr(SegmentOptimizer, "step", dense)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", CASES)
def test_an_exception_of_an_optimizer_refuses_the_push_at_all_copies(name: str) -> None:
    kind, hyper = CASES[name]
    both = copies(optimizer=OptimizerSpec(kind, (GroupSpec(hyper),)))
    assert verdicts(both, lambda each: each.push(0)) == [Applied(1)]
    (verdict,) = verdicts(both, lambda each: each.push(0, 2, POISON))
    assert is_refused(verdict, "step 2 could not be applied to shard 0: ValueError: half of it")
    assert verdicts(both, lambda each: each.push(0, 2, POISON)) == [Duplicate(verdict)]
    assert verdicts(both, lambda each: each.push(1)) == [Applied(3)]
    assert contents(both[0]) == contents(both[1])
    assert both[0].counters["rejected"] == 1


@pytest.mark.usefixtures("poisoned")
def test_a_round_that_cannot_be_applied_is_refused_to_all_of_its_workers() -> None:
    both = copies(SYNC)
    assert verdicts(both, lambda each: each.push(0, value=POISON)) == []
    refused = verdicts(both, lambda each: each.push(1, value=POISON))
    assert len(refused) == 2 and is_refused(refused[0], "half of it") and refused[0] == refused[1]
    verdicts(both, lambda each: each.push(0, 2))
    assert verdicts(both, lambda each: each.push(1, 2)) == [Applied(2), Applied(2)]
    assert contents(both[0]) == contents(both[1])


@pytest.mark.parametrize("rule", [ASYNC, SYNC])
def test_hyper_parameters_with_which_nothing_can_be_computed_are_taken_back(rule: Rule) -> None:
    """Each number is sensible by itself, and 0.96 to the power of -1e9 is no float."""
    group = {"lr": 0.1, "momentum_decay": 0.004}
    both = copies(rule, workers=(0,), optimizer=OptimizerSpec("NAdam", (GroupSpec(group),)))
    assert verdicts(both, lambda each: each.push(0)) == [Applied(1)]
    poison = (GroupSpec({"lr": 0.1, "momentum_decay": -1e9}),)
    (verdict,) = verdicts(both, lambda each: each.push(0, 2, hyper=poison))
    assert is_refused(verdict, "OverflowError")
    assert verdicts(both, lambda each: each.push(0, 3)) == [Applied(3)]
    assert contents(both[0]) == contents(both[1])


def test_examples_of_a_refused_push_are_dealt_again(poisoned: None) -> None:
    bench = Bench()
    spans = bench.lease(0)
    bench.push(0, value=POISON, examples=spans)
    assert bench.lease(1) == spans


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OutOfMemory("no"), RuntimeError("DefaultCPUAllocator: not enough memory")],
    ids=repr,
)
def test_a_lack_of_memory_is_the_copys_own_and_no_verdict(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(*said: Any) -> None:
        raise error

    bench = Bench()
    monkeypatch.setattr(SegmentOptimizer, "step", lacks)
    with pytest.raises(type(error)):
        bench.push(0)
    with pytest.raises(RuntimeError, match="allocate"):
        torch.empty(1 << 60)
