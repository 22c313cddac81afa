"""Large values, tasks that die, memory, times: tasks of a cut graph beyond equal results."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.standing_group import StandingGroup, standing_group
from trireme.graph.capture.capture import capture
from trireme.graph.execute.cut import Cut, cut, fingerprint
from trireme.graph.execute.executor import Executor, Microbatch
from trireme.graph.execute.plan import Message
from trireme.graph.execute.transfers import TaskDevice, Transfers

CPU, OTHER_CPU = torch.device("cpu"), torch.device("cpu", 0)
WIDE = 1 << 20  # two rows of float32 are 8 MiB


@pytest.fixture(scope="module")
def pair() -> Iterator[StandingGroup]:
    with standing_group(2) as made:
        yield made


class Crossing(nn.Module):
    """Two parameters whose large products cross between two places, in both directions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Parameter(torch.full((width,), 0.5))
        self.right = nn.Parameter(torch.full((width,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x * self.left, x * self.right
        return torch.sin(left + right).mean() + torch.cos(left - right).mean()


CROSSING = {"mul": 0, "mul_1": 1, "add": 0, "sin": 0, "mean": 0, "sub": 1, "cos": 1, "mean_1": 1}


def crossing(width: int) -> tuple[Crossing, Cut]:
    model = Crossing(width)
    return model, cut(capture(model, (torch.ones(2, width),), verify=False).module, CROSSING)


def exchanged(rank: int, width: int) -> float:
    """Returns the sum of the gradient of this task's parameter, over three micro-batches."""
    model, parts = crossing(width)
    batches = [Microbatch([torch.full((2, width), 0.1 * i)], torch.sum) for i in range(3)]
    Executor(parts, rank, [TaskDevice(0, CPU), TaskDevice(1, CPU)]).run(batches)
    mine, other = (model.left, model.right) if rank == 0 else (model.right, model.left)
    assert mine.grad is not None
    assert other.grad is None
    return float(mine.grad.double().sum())


def test_large_values_cross_in_both_directions_at_once(pair: StandingGroup) -> None:
    model = Crossing(WIDE)
    for i in range(3):
        model(torch.full((2, WIDE), 0.1 * i)).backward()
    left, right = pair(exchanged, WIDE)
    assert model.left.grad is not None
    assert model.right.grad is not None
    assert left == pytest.approx(float(model.left.grad.double().sum()), rel=1e-5)
    assert right == pytest.approx(float(model.right.grad.double().sum()), rel=1e-5)


def dying(rank: int) -> None:
    """Kills task 1 in its second micro-batch; the other one gets to know that."""
    _, parts = crossing(64)
    executor = Executor(parts, rank, [TaskDevice(0, CPU), TaskDevice(1, CPU)])

    def die(kind: str, depth: int, place: int, number: int, began: float, ended: float) -> None:
        if rank == 1 and number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    executor.record = die
    batches = [Microbatch([torch.ones(2, 64)], torch.sum) for _ in range(3)]
    with pytest.raises(RuntimeError, match="rank 1, with which"):
        executor.run(batches)


def test_the_others_raise_an_error_when_a_task_dies(pair: StandingGroup) -> None:
    with pytest.raises(AssertionError, match="rank 1:\nis gone") as caught:
        pair(dying)
    assert "rank 0" not in str(caught.value)


def stopped(rank: int) -> float:
    """Task 1 never runs; returns how long the other one waits for it."""
    _, parts = crossing(64)
    executor = Executor(parts, rank, [TaskDevice(0, CPU), TaskDevice(1, CPU)])
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match="rank 1, with which"):
            executor.run([Microbatch([torch.ones(2, 64)], torch.sum)])
    return time.monotonic() - began


def test_a_task_waits_for_another_one_no_longer_than_the_timeout() -> None:
    with standing_group(2, 2) as group:
        waited, _ = group(stopped)
    assert waited < 8


def peak_growth(rank: int, count: int) -> float:
    """Returns by how many MiB the peak of memory grows from one micro-batch to many."""
    model = nn.Sequential(nn.Linear(8, WIDE), nn.Sigmoid(), nn.Linear(WIDE, 1))
    graph = capture(model, (torch.ones(2, 8),), verify=False).module
    parts = cut(graph, {"linear": 0, "sigmoid": 1, "linear_1": 1}, output_place=1)
    peaks = []
    for number in (1, count):
        executor = Executor(parts, rank, [TaskDevice(0, CPU), TaskDevice(1, CPU)])
        executor.run([Microbatch([torch.ones(2, 8)], torch.sum) for _ in range(number)])
        peaks.append(_peak())
    return peaks[1] - peaks[0]


def _peak() -> float:
    # Unlike ru_maxrss, this does not begin with the peak of the process that has started this one.
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) / 1024


@pytest.mark.slow
def test_few_micro_batches_are_kept_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Else glibc keeps freed memory of this size for itself, with holes.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    with standing_group(2, fresh=True) as group:
        grown = group(peak_growth, 12)
    assert grown[1] < 48  # task 1 keeps results of sigmoid, 8 MiB each


def busy(rank: int) -> list[tuple[float, float]]:
    """Returns when a task computes the segments of its tower."""
    model = nn.ModuleList(nn.Sequential(*(nn.Linear(512, 512) for _ in range(6))) for _ in "lr")
    total = Sum(model)
    graph = capture(total, (torch.randn(512, 512),), verify=False).module
    where = {node.name: int("layers.1" in str(node.meta)) for node in graph.graph.nodes}
    executor = Executor(cut(graph, where), rank, [TaskDevice(0, CPU), TaskDevice(1, CPU)])
    found = []
    executor.record = lambda *event: found.append(event[-2:])
    executor.run([Microbatch([torch.randn(512, 512)], torch.sum) for _ in range(4)])
    return found


class Sum(nn.Module):
    """The sum of layers."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def test_independent_segments_compute_at_the_same_time(pair: StandingGroup) -> None:
    one, other = pair(busy)
    together = sum(
        max(0.0, min(end, its_end) - max(begin, its_begin))
        for begin, end in one
        for its_begin, its_end in other
    )
    assert together > 0.1 * sum(end - begin for begin, end in one)


def captured_alone(rank: int) -> str:
    del rank
    return fingerprint(crossing(16)[1])


def test_tasks_that_capture_by_themselves_cut_the_same_graph(pair: StandingGroup) -> None:
    first, second = pair(captured_alone)
    assert first == second


def in_one_process() -> tuple[Crossing, Executor]:
    model, parts = crossing(16)
    return model, Executor(parts, 0, [TaskDevice(0, CPU), TaskDevice(0, OTHER_CPU)])


def test_two_devices_of_one_task_need_no_process_group() -> None:
    model, executor = in_one_process()
    inputs = [torch.randn(size, 16) for size in (2, 5)]
    batches = [Microbatch([each], lambda out: out * 2) for each in inputs]
    executor.run(batches)
    again = Crossing(16)
    values = [again(each) for each in inputs]
    (sum(values) * 2).backward()  # type: ignore[union-attr]
    torch.testing.assert_close([each.outputs for each in batches], values)
    torch.testing.assert_close([each.value for each in batches], [each * 2 for each in values])
    torch.testing.assert_close(model.left.grad, again.left.grad)
    torch.testing.assert_close(model.right.grad, again.right.grad)


def test_a_layer_that_two_places_share_gets_the_sum_of_its_gradients() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    graph = capture(model, (torch.randn(3, 4),)).module
    parts = cut(graph, {"linear": 0, "tanh": 0, "linear_1": 1})
    executor = Executor(parts, 0, [TaskDevice(0, CPU), TaskDevice(0, OTHER_CPU)])
    inputs = [torch.randn(size, 4) for size in (2, 3, 4)]
    for _ in range(2):  # gradients are added to those that are there
        executor.run([Microbatch([each], torch.sum) for each in inputs])
    found = [each.grad for each in model.parameters()]
    model.zero_grad()
    (2 * sum(model(each).sum() for each in inputs)).backward()
    torch.testing.assert_close(found, [each.grad for each in model.parameters()])


class Chain(nn.Module):
    """Values that cross between places, and whose gradients autograd gives one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in "abc")
        self.bias = nn.Parameter(torch.ones(4))
        self.other = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = []
        for layer in self.layers:
            x = layer(x)
            found.append(x)
            x = torch.tanh(x) * 2
        return torch.stack([*found, x]).sum(0) + torch.stack([self.bias, self.other]).sum(0)


def test_gradients_of_the_same_memory_are_not_changed_together() -> None:
    model = Chain()
    graph = capture(model, (torch.randn(3, 4),)).module
    nodes = (each.name for each in graph.graph.nodes)
    where = {name: int(not name.startswith("tanh")) for name in nodes}
    places = [TaskDevice(0, CPU), TaskDevice(0, OTHER_CPU)]
    executor = Executor(cut(graph, where, output_place=1), 0, places)
    inputs = [torch.randn(size, 4) for size in (2, 3, 4)]
    executor.run([Microbatch([each], lambda out: out.square().sum()) for each in inputs])
    found = [each.grad for each in model.parameters()]
    wanted = torch.autograd.grad(
        sum(model(each).square().sum() for each in inputs),  # type: ignore[arg-type]
        list(model.parameters()),
    )
    torch.testing.assert_close(found, list(wanted))


class Unused(nn.Module):
    """An output that the test's loss does not use, whose gradient would not be a number."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.used(x)
        return h * 2, torch.sqrt(torch.relu(self.unused(h)) * 0) * self.scale


def computed_unused(rank: int, places: list[TaskDevice]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = Unused()
    graph = capture(model, (torch.randn(3, 4),), verify=False).module
    nodes = [each.name for each in graph.graph.nodes]
    far = ("p_unused", "unused", "linear_1", "relu", "mul_1", "sqrt")
    parts = cut(graph, {name: int(name.startswith(far)) for name in nodes})
    batches = [Microbatch([torch.ones(2, 4)], lambda out: out[0].sum()) for _ in range(2)]
    Executor(parts, rank, places).run(batches)
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_what_the_loss_does_not_use_has_no_gradient(pair: StandingGroup) -> None:
    model = Unused()
    one = computed_unused(0, [TaskDevice(0, CPU), TaskDevice(0, OTHER_CPU)])
    both = pair(computed_unused, [TaskDevice(0, CPU), TaskDevice(1, CPU)])
    wanted = {name for name, _ in model.used.named_parameters("used")}
    assert set(one) == wanted
    assert set().union(*both) == wanted
    assert all(each.isfinite().all() for found in (one, *both) for each in found.values())


class Counting(nn.Module):
    """A buffer that forward changes and that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.second(self.first(x) * self.count)  # type: ignore[no-any-return]


def test_a_buffer_that_forward_changes_may_be_used_in_backward() -> None:
    model, again = Counting(), Counting()
    again.load_state_dict(model.state_dict())
    graph = capture(model, (torch.randn(3, 4),)).module
    parts = cut(graph, {each.name: int(each.name == "linear_1") for each in graph.graph.nodes})
    executor = Executor(parts, 0, [TaskDevice(0, CPU), TaskDevice(0, OTHER_CPU)])
    inputs = [torch.randn(size, 4) for size in (2, 3)]
    executor.run([Microbatch([each], torch.sum) for each in inputs])
    for each in inputs:
        again(each).sum().backward()
    wanted = [each.grad for each in again.parameters()]
    torch.testing.assert_close([each.grad for each in model.parameters()], wanted)


class Lazy(nn.Module):
    """Conjugated and negated views, which only a bit distinguishes from their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.real, self.imaginary = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.complex(self.real(x), self.imaginary(x))
        return (z.conj() * (1 + 2j)).real + z.conj().imag * 3


def computed_lazily(rank: int, places: list[TaskDevice]) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    model = Lazy()
    graph = capture(model, (torch.randn(3, 4),), verify=False).module
    nodes = [each.name for each in graph.graph.nodes]
    far = ("mul", "add", "real")
    parts = cut(graph, {name: int(name.startswith(far)) for name in nodes})
    batch = Microbatch([torch.ones(2, 4)], lambda out: out.square().sum())
    Executor(parts, rank, places).run([batch])
    return batch.value, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_conjugated_and_negated_values_are_sent(pair: StandingGroup) -> None:
    torch.manual_seed(1)
    model = Lazy()
    loss = model(torch.ones(2, 4)).square().sum()
    loss.backward()
    (value, found), (_, further) = pair(computed_lazily, [TaskDevice(0, CPU), TaskDevice(1, CPU)])
    torch.testing.assert_close(value, loss.detach())
    wanted = {name: each.grad for name, each in model.named_parameters()}
    torch.testing.assert_close(found | further, wanted)


def changing_loss(outputs: torch.Tensor) -> torch.Tensor:
    outputs.mul_(2)
    return outputs.square().sum()


def test_the_loss_may_change_outputs_in_place() -> None:
    model, executor = in_one_process()
    batch = Microbatch([torch.ones(2, 16)], lambda out: changing_loss(out.view_as(out)))
    executor.run([batch])
    again = Crossing(16)
    changing_loss(again(torch.ones(2, 16)) * 1).backward()
    torch.testing.assert_close(model.left.grad, again.left.grad)


def local_error(rank: int) -> None:
    sent = Message("h", 0, 1, 0, back=False)
    transfers = Transfers(
        rank,
        [TaskDevice(0, CPU), TaskDevice(1, CPU)],
        {sent: (0, 0)},
        lambda message: torch.empty(1),
        None,
    )
    if rank == 0:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            transfers.send(sent, torch.eye(2).to_sparse())
        assert "has gone" not in str(caught.value)


def test_an_error_of_a_task_s_own_is_not_said_to_be_another_one_s(pair: StandingGroup) -> None:
    pair(local_error)


def test_without_a_loss_there_are_outputs_and_no_gradients() -> None:
    model, executor = in_one_process()
    batch = Microbatch([torch.ones(2, 16)])
    executor.run([batch])
    torch.testing.assert_close(batch.outputs, Crossing(16)(torch.ones(2, 16)))
    assert batch.value is None
    assert model.left.grad is None


def test_times_are_recorded_for_each_segment_and_micro_batch() -> None:
    _, executor = in_one_process()
    found: list[tuple[Any, ...]] = []
    executor.record = lambda *event: found.append(event)
    began = time.time()
    executor.run([Microbatch([torch.ones(2, 16)], torch.sum) for _ in range(2)])
    kinds = [(kind, place, number) for kind, _, place, number, _, _ in found]
    assert len(kinds) == 2 * 2 * len(executor._cut.segments)
    assert {each[0] for each in kinds} == {"forward", "backward"}
    assert {each[1] for each in kinds} == {0, 1}
    assert all(began <= start <= end <= time.time() for *_, start, end in found)


def test_random_numbers_of_dropout_are_those_of_forward_in_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    graph = capture(model, (torch.randn(3, 8),)).module
    parts = cut(graph, {"linear": 0, "dropout": 1, "linear_1": 0})
    executor = Executor(parts, 0, [TaskDevice(0, CPU), TaskDevice(0, OTHER_CPU)])
    x = torch.randn(4, 8)
    torch.manual_seed(5)
    executor.run([Microbatch([x], torch.sum)])
    found = [each.grad for each in model.parameters()]
    model.zero_grad()
    torch.manual_seed(5)
    model(x).sum().backward()
    torch.testing.assert_close(found, [each.grad for each in model.parameters()])
