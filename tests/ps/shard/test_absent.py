"""Parameters without a gradient: left alone as torch leaves them, on any number of servers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.ps.test_optimizers import CASES, Hyper
from trireme.ps.flat import PartBuffer
from trireme.ps.layout import Layout
from trireme.ps.messages import GroupSpec, OptimizerSpec, ParameterSpec
from trireme.ps.optimizers import OPTIMIZERS, join
from trireme.ps.rule import Rule
from trireme.ps.shard.values.parameters import Values
from trireme.ps.shard.values.segment_optimizer import SegmentOptimizer
from trireme.ps.snapshot import ModelState, assemble, disassemble
from trireme.ps.snapshot_messages import Snapshot

SHAPES = [(7, 5), (40,), (3, 3, 3), (), (64,), (0,), (130,), (2, 9)]
STEPS = 12


def layout_of(servers: int, groups: int = 2) -> Layout:
    parameters = [
        ParameterSpec(f"p{index}", shape, dtype, index * groups // len(SHAPES))
        for dtype in ("float32", "float64")
        for index, shape in enumerate(SHAPES)
    ]
    named = [ParameterSpec(f"{p.name}.{p.dtype}", p.shape, p.dtype, p.group) for p in parameters]
    return Layout.of(named, servers=servers, slots=64)


def schedule(count: int) -> list[tuple[int, ...]]:
    """Which parameters are absent, step by step: one never comes, one late, one goes, some vary."""
    chance = random.Random(4)
    steps = []
    for step in range(STEPS):
        absent = {3} | ({1} if step < 3 else set()) | ({6} if step > 5 else set())
        absent |= {p for p in range(8, count) if (p + step) % 2}
        absent |= {p for p in (4, 9) if chance.random() < 0.5}
        steps.append(
            () if step in (4, 10) else tuple(sorted(absent - {4} if step == 7 else absent))
        )
    return steps


class Plain:
    """torch.optim on the model's own tensors."""

    def __init__(self, layout: Layout, spec: OptimizerSpec) -> None:
        self.names = [p.parameter.name for v in layout.vectors for p in v.placed]
        generator = torch.Generator().manual_seed(3)
        self.tensors = {
            p.parameter.name: torch.randn(p.parameter.shape, generator=generator).to(
                getattr(torch, p.parameter.dtype)
            )
            for v in layout.vectors
            for p in v.placed
        }
        self.optimizers = []
        for kind in dict.fromkeys(spec.names):
            groups: list[Any] = [
                {
                    "params": [
                        self.tensors[p.parameter.name]
                        for v in layout.vectors
                        for p in v.placed
                        if p.parameter.group == index
                    ],
                    **group.values,
                }
                for index, (group, name) in enumerate(zip(spec.groups, spec.names, strict=True))
                if name == kind
            ]
            options: Hyper = dict(OPTIMIZERS.load(kind).options)
            first = next(
                g.values for g, n in zip(spec.groups, spec.names, strict=True) if n == kind
            )
            if "initial_accumulator_value" in first:
                options["initial_accumulator_value"] = first["initial_accumulator_value"]
            self.optimizers.append(OPTIMIZERS.load(kind).make(groups, **options))

    def step(self, gradients: dict[str, torch.Tensor], absent: tuple[int, ...]) -> None:
        for position, name in enumerate(self.names):
            self.tensors[name].grad = None if position in absent else gradients[name]
        for optimizer in self.optimizers:
            optimizer.step()


class Servers:
    """Every server's part of the same model."""

    def __init__(self, layout: Layout, spec: OptimizerSpec, state: ModelState) -> None:
        self.layout = layout
        self.values = []
        for server in range(layout.spec.shards):
            self.values.append(Values(layout, server, spec, Rule()))
            self.values[-1].load(0, disassemble(layout, state, server))

    def step(self, gradients: dict[str, torch.Tensor], absent: tuple[int, ...]) -> None:
        flat = disassemble_whole(self.layout, gradients)
        for server, values in enumerate(self.values):
            vectors = [
                flat[part.vector.dtype][part.start : part.stop].clone()
                for part in self.layout.parts(server)
            ]
            part = PartBuffer(self.layout, server, vectors)
            values.optimizer.step(part, absent=absent)
            for optimizer in values.optimizer._optimizers:
                assert all(piece.start < piece.stop for piece in optimizer.pieces)

    def state(self) -> ModelState:
        parts = []
        for values in self.values:
            tensors = values.copy(state=True)
            snapshot = Snapshot(0, tuple(spec for spec, _ in tensors), (), ())
            parts.append((snapshot, tensors))
        return assemble(self.layout, parts)


def disassemble_whole(layout: Layout, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    flat = {}
    for vector in layout.vectors:
        whole = torch.zeros(vector.length, dtype=getattr(torch, vector.dtype))
        for placed in vector.placed:
            whole[placed.start : placed.stop] = named[placed.parameter.name].reshape(-1)
        flat[vector.dtype] = whole
    return flat


def gradients_of(layout: Layout, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        p.parameter.name: torch.randn(p.parameter.shape, generator=generator).to(
            getattr(torch, p.parameter.dtype)
        )
        for v in layout.vectors
        for p in v.placed
    }


def zeroed(layout: Layout, named: dict[str, torch.Tensor], absent: Any) -> dict[str, torch.Tensor]:
    names = [p.parameter.name for v in layout.vectors for p in v.placed]
    return {n: torch.zeros_like(t) if names.index(n) in absent else t for n, t in named.items()}


def spec_for(name: str, hyper: Hyper) -> OptimizerSpec:
    return OptimizerSpec(name, (GroupSpec(hyper), GroupSpec({**hyper, "lr": hyper["lr"] / 2})))


def run(spec: OptimizerSpec, counts: list[int]) -> None:
    """Trains on so many servers in turn, over a checkpoint each; compares with torch."""
    layout = layout_of(1)
    plain = Plain(layout, spec)
    state = ModelState(0, {n: t.clone() for n, t in plain.tensors.items()})
    steps = schedule(len(plain.names))
    share = STEPS // len(counts)
    for turn, count in enumerate(counts):
        servers = Servers(layout_of(count), spec, state)
        for step in range(turn * share, (turn + 1) * share):
            gradients, absent = gradients_of(layout, step), steps[step]
            plain.step(gradients, absent)
            servers.step(zeroed(layout, gradients, absent), absent)
        state = servers.state()
    for name, wanted in plain.tensors.items():
        torch.testing.assert_close(state.values[name], wanted, rtol=2e-6, atol=2e-6)
    counters = {
        name: int(entries["step"])
        for optimizer in plain.optimizers
        for tensor, entries in optimizer.state.items()
        for name, own in plain.tensors.items()
        if own is tensor and "step" in entries
    }
    kept = {n.rpartition("/")[0]: int(t) for n, t in state.optimizer.items() if n.endswith("/step")}
    assert kept.keys() == counters.keys()
    # Whatever a parameter without elements counts, it is one of its neighbours' numbers.
    assert all(kept[name] == count for name, count in counters.items() if "p5" not in name)


@pytest.mark.slow(one_in=3)
@pytest.mark.thorough
@pytest.mark.parametrize("counts", [[1], [3], [1, 2], [3, 1, 2]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_servers_leave_alone_what_torch_does(case: str, counts: list[int]) -> None:
    run(spec_for(*CASES[case]), counts)


@pytest.mark.parametrize("counts", [[1], [2, 3]], ids=str)
def test_each_group_may_have_an_optimizer_of_its_own(counts: list[int]) -> None:
    sgd = OptimizerSpec("SGD", (GroupSpec({"lr": 0.1, "momentum": 0.9}),))
    adam = OptimizerSpec("Adam", (GroupSpec({"lr": 0.01}),))
    spec = join([sgd, adam])
    assert spec.names == ("SGD", "Adam")
    run(spec, counts)


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_a_segment_is_one_piece_until_its_parameters_differ(name: str) -> None:
    layout = layout_of(1, groups=1)
    spec = OptimizerSpec(name, (GroupSpec({"lr": 0.1}),))
    optimizer = SegmentOptimizer(spec, layout, 0, PartBuffer(layout, 0))
    pieces = optimizer._optimizers[0].pieces
    for _ in range(3):
        optimizer.step(PartBuffer(layout, 0))
    assert optimizer._optimizers[0].pieces is pieces and len(pieces) == 2  # one for each dtype
    optimizer.step(PartBuffer(layout, 0), absent=(2, 3))
    cut = len(optimizer._optimizers[0].pieces)
    assert cut == 1 + sum(shape != (0,) for shape in SHAPES)
    optimizer.step(PartBuffer(layout, 0), absent=(2, 3))
    optimizer.step(PartBuffer(layout, 0))
    assert len(optimizer._optimizers[0].pieces) == cut


def test_what_is_restored_equal_is_one_piece_again() -> None:
    layout = layout_of(2, groups=1)
    spec = OptimizerSpec("Adam", (GroupSpec({"lr": 0.1}),))
    optimizer = SegmentOptimizer(spec, layout, 0, PartBuffer(layout, 0))
    optimizer.step(PartBuffer(layout, 0), absent=(1,))
    apart = optimizer.export()
    optimizer.step(PartBuffer(layout, 0), absent=(0, *range(2, 16)))
    together = optimizer.export()
    other = SegmentOptimizer(spec, layout_of(1, groups=1), 0, PartBuffer(layout_of(1), 0))
    fresh = SegmentOptimizer(spec, layout, 0, PartBuffer(layout, 0))
    fresh.restore(together)
    assert len(fresh._optimizers[0].pieces) == len(layout.segments(0))
    fresh.restore([(s, t.clone()) for s, t in apart])
    assert len(fresh._optimizers[0].pieces) > len(layout.segments(0))
    other.restore(together)


def test_ranges_take_padding_along() -> None:
    layout = Layout.of(
        [ParameterSpec(name, (20,), "float32", 0) for name in "abcd"], servers=2, slots=8
    )
    # Each takes 32 elements of the vector; a server has 64.
    assert layout.ranges((0, 1, 2), 0) == ((0, 0, 32), (0, 32, 64))
    assert layout.ranges((0, 1, 2), 1) == ((0, 64, 96),)
    assert layout.ranges((1, 3), 1) == ((0, 96, 128),)
    assert layout.ranges((), 0) == ()
