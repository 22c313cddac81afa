"""Values that a worker's program has written replace the shard's, and rounds agree on them."""

from __future__ import annotations

import torch

from tests.ps.bench import ASYNC, PARAMETER, SYNC, Bench, told
from trireme.ps.layout import Layout
from trireme.ps.messages import Done, ParameterSpec, PushReply, Refused, RejectedVerdict
from trireme.ps.rule import Rule
from trireme.ps.shard.instructions import Instruction
from trireme.ps.shard.participants import Participant
from trireme.ps.snapshot import values_of
from trireme.ps.snapshot_messages import WriteValues


def write(
    bench: Bench, worker: int = 0, value: float = 5.0, incarnation: int = 1
) -> list[Instruction]:
    tensors = values_of(bench.layout, {"w": torch.full((16,), value)}, bench.shard.number)
    request = WriteValues(bench.view_number, tuple(spec for spec, _ in tensors))
    who = Participant(worker, incarnation)
    return bench.shard.request(bench.now, "write", who, request, tensors)


def answer(out: list[Instruction]) -> object:
    ((_, message),) = told(out)
    return message


def test_they_replace_the_values_at_once_and_make_no_step() -> None:
    bench = Bench(ASYNC)
    assert answer(write(bench)) == Done()
    assert bench.value == 5.0 and bench.shard.state.step == 0
    bench.push(0, 1, 2.0)
    assert bench.value == 3.0


def test_they_wait_for_the_first_values() -> None:
    empty = Bench(ASYNC, loaded=False)
    refused = answer(write(empty))
    assert isinstance(refused, Refused) and refused.code == "rejected"


def test_a_worker_that_was_replaced_writes_nothing() -> None:
    bench = Bench(ASYNC)
    refused = answer(write(bench, incarnation=7))
    assert isinstance(refused, Refused) and refused.code == "fenced"
    assert bench.value == 100.0


def test_a_late_worker_of_backups_writes_nothing() -> None:
    refused = answer(write(Bench(Rule(aggregate=1, staleness=0))))
    assert isinstance(refused, Refused) and "late" in refused.reason


def round_of(bench: Bench, first: int, second: int, sequence: int) -> object:
    bench.push(0, sequence, 1.0, written=first)
    out = told(bench.push(1, sequence, 1.0, written=second))
    return out[-1][1]


def test_the_workers_of_a_round_must_have_written_the_same() -> None:
    bench = Bench(SYNC)
    round_of(bench, 0, 0, 1)
    same = round_of(bench, 9, 9, 2)
    assert isinstance(same, PushReply) and not isinstance(same.verdict, RejectedVerdict)
    for first, second in ((9, 0), (0, 9), (9, 8)):
        bench = Bench(SYNC)
        round_of(bench, 0, 0, 1)
        other = round_of(bench, first, second, 2)
        assert isinstance(other, PushReply) and isinstance(other.verdict, RejectedVerdict)
        assert "worker:0 have written different values since step 1" in other.verdict.reason


def test_a_worker_that_starts_anew_or_has_no_examples_is_not_compared() -> None:
    assert not isinstance(getattr(round_of(Bench(SYNC), 9, 0, 1), "verdict", None), RejectedVerdict)
    bench = Bench(SYNC)
    round_of(bench, 0, 0, 1)
    bench.push(0, 2, 1.0, written=9)
    last = told(bench.push(1, 2, 1.0, written=0, weight=0.0))[-1][1]
    assert isinstance(last, PushReply) and not isinstance(last.verdict, RejectedVerdict)


def test_some_parameters_of_several_are_written() -> None:
    layout = Layout.of([PARAMETER, ParameterSpec("v", (40,), "float32", 0)], servers=2)
    value = torch.arange(40.0)
    found = [entry for shard in (0, 1) for entry in values_of(layout, {"v": value}, shard)]
    joined = torch.cat([tensor for _, tensor in found])
    assert torch.equal(joined[:40], value)
    (vector,) = layout.vectors
    (start,) = (each.start for each in vector.placed if each.parameter.name == "v")
    assert found[0][0].start == start  # nothing of "w"
