"""Optimizers over flat segments: torch's own numbers, whatever the number of servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from trireme.errors import ConfigurationError, Rejected, UnsupportedOptimizerError
from trireme.ps.flat import PartBuffer, dtype_of
from trireme.ps.layout import Layout
from trireme.ps.messages import GroupSpec, OptimizerSpec, ParameterSpec
from trireme.ps.optimizers import OPTIMIZERS, Entry, groups_of, mismatch, name_of, spec_of
from trireme.ps.shard.values.segment_optimizer import SegmentOptimizer
from trireme.ps.snapshot_messages import TensorSpec

Hyper = dict[str, Any]
State = list[tuple[TensorSpec, torch.Tensor]]

CASES: dict[str, tuple[str, Hyper]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "SGD weight decay": ("SGD", {"lr": 0.1, "weight_decay": 0.01}),
    "SGD momentum": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "SGD dampening": ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "SGD nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD maximize": ("SGD", {"lr": 0.1, "momentum": 0.5, "maximize": True}),
    "Adam": ("Adam", {"lr": 0.01, "betas": (0.8, 0.99)}),
    "Adam weight decay": ("Adam", {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6}),
    "Adam amsgrad": ("Adam", {"lr": 0.01, "amsgrad": True}),
    "Adam decoupled": ("Adam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "AdamW": ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW amsgrad maximize": ("AdamW", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.01}),
    "Adagrad accumulator": ("Adagrad", {"lr": 0.1, "initial_accumulator_value": 0.5}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "alpha": 0.9, "weight_decay": 0.01}),
    "RMSprop centered momentum": ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.9}),
    "Adadelta": ("Adadelta", {"lr": 1.0, "rho": 0.8, "weight_decay": 0.01}),
    "Adamax": ("Adamax", {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.01}),
    "NAdam": ("NAdam", {"lr": 0.01, "weight_decay": 0.01, "momentum_decay": 0.01}),
    "NAdam decoupled": ("NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "RAdam": ("RAdam", {"lr": 0.01, "betas": (0.5, 0.9), "weight_decay": 0.01}),
    "ASGD": ("ASGD", {"lr": 0.1, "lambd": 0.01, "t0": 5, "weight_decay": 0.01}),
    "Rprop": ("Rprop", {"lr": 0.01}),
}
STEPS = 20
SHAPES = {"a": ((7, 5), 0), "b": ((40,), 0), "c": ((3, 3, 3), 1), "d": ((), 1)}
# Of the narrow types: whether an element is rounded once or after each operation depends on
# whether it is in the vectorised part of a tensor.
TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 3e-2, "float16": 4e-3}


def layout_of(servers: int, *dtypes: str) -> Layout:
    parameters = [
        ParameterSpec(f"{name}.{dtype}", shape, dtype, group)
        for dtype in dtypes
        for name, (shape, group) in SHAPES.items()
    ]
    return Layout.of(parameters, servers=servers, slots=64)


def hyper_at(step: int, hyper: Hyper) -> tuple[GroupSpec, GroupSpec]:
    """The second group has another learning rate, and both follow a schedule."""
    lr = hyper["lr"] * 0.95**step
    return GroupSpec({**hyper, "lr": lr}), GroupSpec({**hyper, "lr": lr / 3})


def whole_gradients(layout: Layout) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        [
            torch.randn(v.length, generator=generator, dtype=torch.float64).to(dtype_of(v.dtype))
            for v in layout.vectors
        ]
        for _ in range(STEPS)
    ]


def first_values(layout: Layout) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [
        torch.randn(v.length, generator=generator, dtype=torch.float64).to(dtype_of(v.dtype))
        for v in layout.vectors
    ]


class Servers:
    """Every server's optimizer over its part of one model."""

    def __init__(self, layout: Layout, name: str, hyper: Hyper) -> None:
        self.layout = layout
        self.hyper = hyper
        self.buffers = [
            PartBuffer(layout, server, self.cut(first_values(layout), server, copy=True))
            for server in range(layout.spec.shards)
        ]
        spec = OptimizerSpec(name, hyper_at(0, hyper))
        self.optimizers = [
            SegmentOptimizer(spec, layout, server, buffer)
            for server, buffer in enumerate(self.buffers)
        ]

    def cut(
        self, vectors: Sequence[torch.Tensor], server: int, *, copy: bool = False
    ) -> list[torch.Tensor]:
        parts = [
            vector[part.start : part.stop]
            for vector, part in zip(vectors, self.layout.parts(server), strict=True)
        ]
        return [part.clone() for part in parts] if copy else parts

    def train(self, first: int, last: int) -> None:
        gradients = whole_gradients(self.layout)
        for step in range(first, last):
            for server, optimizer in enumerate(self.optimizers):
                optimizer.set_hyper(hyper_at(step, self.hyper))
                part = PartBuffer(self.layout, server, self.cut(gradients[step], server))
                optimizer.step(part)

    def values(self) -> list[torch.Tensor]:
        return [
            torch.cat([buffer.vectors[index] for buffer in self.buffers])
            for index in range(len(self.layout.vectors))
        ]

    def state(self) -> State:
        return [
            (spec, tensor.clone())
            for optimizer in self.optimizers
            for spec, tensor in optimizer.export()
        ]

    def joined_state(self) -> dict[tuple[str, str, int], torch.Tensor]:
        """The state as whole vectors, and scalars by group."""
        joined: dict[tuple[str, str, int], torch.Tensor] = {}
        lengths = {vector.dtype: vector.length for vector in self.layout.vectors}
        for spec, tensor in self.state():
            key = (spec.key, spec.vector, spec.group)
            if spec.group >= 0:
                assert torch.equal(joined.setdefault(key, tensor), tensor), "servers differ"
                continue
            if key not in joined:
                joined[key] = torch.full((lengths[spec.vector],), torch.nan, dtype=tensor.dtype)
            joined[key][spec.start : spec.stop] = tensor
        return joined


def plain_training(layout: Layout, name: str, hyper: Hyper) -> list[torch.Tensor]:
    """torch.optim itself, on the model's own tensors; the result laid out flat."""
    flat = first_values(layout)
    tensors: list[tuple[torch.Tensor, int, int, int]] = []
    for index, vector in enumerate(layout.vectors):
        for placed in vector.placed:
            value = flat[index][placed.start : placed.stop].reshape(placed.parameter.shape).clone()
            tensors.append((value, placed.parameter.group, index, placed.start))
    groups = [
        {"params": [t for t, group, _, _ in tensors if group == number], **spec.values}
        for number, spec in enumerate(hyper_at(0, hyper))
    ]
    narrow = {vector.dtype for vector in layout.vectors if vector.item_size == 2}
    options: Hyper = dict(OPTIMIZERS.load(name).options)
    if narrow & OPTIMIZERS.load(name).fused:  # else each operation is rounded to the narrow type
        options = {"fused": True}
    if "initial_accumulator_value" in hyper:
        options["initial_accumulator_value"] = hyper["initial_accumulator_value"]
    optimizer = OPTIMIZERS.load(name).make(groups, **options)
    for step, gradients in enumerate(whole_gradients(layout)):
        for group, spec in zip(optimizer.param_groups, hyper_at(step, hyper), strict=True):
            group.update(spec.values)
        for tensor, _, index, start in tensors:
            tensor.grad = gradients[index][start : start + tensor.numel()].reshape(tensor.shape)
        optimizer.step()
    for tensor, _, index, start in tensors:
        flat[index][start : start + tensor.numel()] = tensor.reshape(-1)
    return flat


def parameters_of(layout: Layout, vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements that belong to a parameter, as float64: padding is nobody's."""
    return torch.cat(
        [
            vector[placed.start : placed.stop].double()
            for vector, spec in zip(vectors, layout.vectors, strict=True)
            for placed in spec.placed
        ]
    )


def test_every_optimizer_of_the_registry_is_tested() -> None:
    assert {name for name, _ in CASES.values()} == set(OPTIMIZERS)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_it_is_torch_on_the_models_own_tensors(case: str, dtype: str) -> None:
    name, hyper = CASES[case]
    layout = layout_of(2, dtype)
    servers = Servers(layout, name, hyper)
    servers.train(0, STEPS)
    trained = parameters_of(layout, servers.values())
    expected = parameters_of(layout, plain_training(layout, name, hyper))
    assert not torch.equal(trained, parameters_of(layout, first_values(layout)))
    torch.testing.assert_close(trained, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", CASES)
def test_the_number_of_servers_changes_no_bit(case: str) -> None:
    name, hyper = CASES[case]
    one = Servers(layout_of(1, "float32", "float64"), name, hyper)
    one.train(0, STEPS)
    for count in (2, 3):
        several = Servers(layout_of(count, "float32", "float64"), name, hyper)
        several.train(0, STEPS)
        for a, b in zip(one.values(), several.values(), strict=True):
            assert torch.equal(a, b)
        state, same = one.joined_state(), several.joined_state()
        assert state.keys() == same.keys()
        for key in state:
            assert torch.equal(state[key], same[key]), key


@pytest.mark.slow(one_in=3)
@pytest.mark.thorough
@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (2, 3), (3, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_state_moves_to_another_number_of_servers(case: str, counts: tuple[int, int]) -> None:
    name, hyper = CASES[case]
    before, after = counts
    whole = Servers(layout_of(1, "float32", "bfloat16"), name, hyper)
    whole.train(0, STEPS)
    first = Servers(layout_of(before, "float32", "bfloat16"), name, hyper)
    first.train(0, STEPS // 2)
    second = Servers(layout_of(after, "float32", "bfloat16"), name, hyper)
    second.train(0, 3)  # what is there is replaced
    for server, optimizer in enumerate(second.optimizers):
        part = second.cut(first.values(), server)
        for target, source in zip(second.buffers[server].vectors, part, strict=True):
            target.copy_(source)
        optimizer.restore(first.state())
    second.train(STEPS // 2, STEPS)
    for a, b in zip(whole.values(), second.values(), strict=True):
        assert torch.equal(a, b)


def test_a_gradient_is_never_written_to() -> None:
    for name, hyper in CASES.values():
        layout = layout_of(1, "float32")
        decay = {"weight_decay": 0.1} if "weight_decay" in OPTIMIZERS.load(name).hyper else {}
        servers = Servers(layout, name, {**hyper, **decay})
        for gradients in whole_gradients(layout)[:3]:
            before = [gradient.clone() for gradient in gradients]
            servers.optimizers[0].step(PartBuffer(layout, 0, gradients))
            for gradient, copy in zip(gradients, before, strict=True):
                assert torch.equal(gradient, copy), name


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("SGD", {"lr": 0.1}, {"lr": 0.1, "momentum": 0.9}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, {"lr": 0.1, "momentum": 0.0}),
        ("Adam", {"lr": 0.1}, {"lr": 0.1, "betas": (0.5, 0.9), "weight_decay": 0.1}),
    ],
    ids=["momentum on", "momentum off", "betas"],
)
def test_any_hyper_parameter_may_change(name: str, before: Hyper, after: Hyper) -> None:
    layout = layout_of(1, "float32")
    servers = Servers(layout, name, {"momentum": 0.0, **before} if name == "SGD" else before)
    reference = first_values(layout)[0]
    tensor = reference.clone()
    optimizer = OPTIMIZERS.load(name).make([tensor], **before)
    for step, (gradient,) in enumerate(whole_gradients(layout)):
        if step == STEPS // 2:
            optimizer.param_groups[0].update(after)
            servers.optimizers[0].set_hyper((GroupSpec(after), GroupSpec(after)))
        elif step == 0:
            servers.optimizers[0].set_hyper((GroupSpec(before), GroupSpec(before)))
        tensor.grad = gradient
        optimizer.step()
        servers.optimizers[0].step(PartBuffer(layout, 0, [gradient]))
    torch.testing.assert_close(servers.values()[0], tensor, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("saved", "loaded", "missing"),
    [
        ("SGD momentum", "Adam", "exp_avg"),
        ("Adam", "Adagrad", "sum"),
        ("Adam", "Adam amsgrad", "max_exp_avg_sq"),
        ("RMSprop", "RMSprop centered momentum", "grad_avg"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(saved: str, loaded: str, missing: str) -> None:
    layout = layout_of(1, "float32")
    before, after = Servers(layout, *CASES[saved]), Servers(layout, *CASES[loaded])
    before.train(0, 2)
    with pytest.raises(Rejected, match=f"has no '{missing}', which {CASES[loaded][0]} keeps"):
        after.optimizers[0].restore(before.state())


def test_plain_sgd_takes_over_what_it_does_not_need() -> None:
    layout = layout_of(1, "float32")
    before, after = Servers(layout, *CASES["Adam"]), Servers(layout, *CASES["SGD"])
    before.train(0, 2)
    after.optimizers[0].restore(before.state())
    after.train(2, 4)


def test_a_server_without_elements_does_nothing() -> None:
    layout = Layout.of([ParameterSpec("a", (3,), "float32", 0)], servers=3, slots=3)
    empty = next(s for s in range(3) if not layout.segments(s))
    spec = OptimizerSpec("Adam", (GroupSpec({"lr": 0.1}),))
    optimizer = SegmentOptimizer(spec, layout, empty, PartBuffer(layout, empty))
    optimizer.set_hyper(spec.groups)
    optimizer.step(PartBuffer(layout, empty))
    optimizer.restore([])
    assert optimizer.export() == []


# A sum, and what to divide it by ------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("dtypes", [("float32",), ("float32", "float64"), ("bfloat16",)], ids=str)
@pytest.mark.parametrize("divisor", [2.0, 3.0, 0.1])
@pytest.mark.parametrize(("name", "hyper"), CASES.values(), ids=CASES)
def test_a_sum_is_divided_as_precisely_on_the_way(
    name: str, hyper: Hyper, divisor: float, dtypes: tuple[str, ...]
) -> None:
    parameters = [ParameterSpec(f"p{i}", (50,), dtype, 0) for i, dtype in enumerate(dtypes)]
    layout = Layout.of(parameters, servers=1, slots=4)
    spec = OptimizerSpec(name, (GroupSpec(hyper),))
    ours, theirs = PartBuffer(layout, 0), PartBuffer(layout, 0)
    on_the_way, before = (SegmentOptimizer(spec, layout, 0, values) for values in (ours, theirs))
    torch.manual_seed(3)
    for _ in range(4):
        total, mean = PartBuffer(layout, 0), PartBuffer(layout, 0)
        for one, other in zip(total.vectors, mean.vectors, strict=True):
            other.copy_(one.normal_()).div_(divisor)
        on_the_way.step(total, divisor)
        before.step(mean)
    for one, other in zip(ours.vectors, theirs.vectors, strict=True):
        assert torch.equal(one, other)
        assert one.abs().sum() > 0


# Numbers too small to be normal ------------------------------------------------------------------

SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def run_dry(name: str, hyper: Hyper, *, flushes: bool) -> tuple[torch.Tensor, State]:
    """Trains by a few gradients, many of them tiny, and then by none; returns values and state."""
    layout = layout_of(1, "float32")
    groups = GroupSpec(hyper), GroupSpec(hyper)
    values, gradients = PartBuffer(layout, 0), PartBuffer(layout, 0)
    generator = torch.Generator().manual_seed(7)
    values.vectors[0].copy_(torch.randn(values.vectors[0].numel(), generator=generator))
    optimizer = SegmentOptimizer(OptimizerSpec(name, groups), layout, 0, values)
    assert optimizer._flushes == OPTIMIZERS.load(name).flushes
    optimizer._flushes = flushes and OPTIMIZERS.load(name).flushes
    for step in range(1200):
        gradients.vectors[0].zero_()
        if step < 5:
            count = gradients.vectors[0].numel()
            scale = 10.0 ** (-30 * torch.rand(count, generator=generator))
            gradients.vectors[0].copy_(torch.randn(count, generator=generator) * scale)
        optimizer.step(gradients)
    return values.vectors[0], [(spec, tensor.clone()) for spec, tensor in optimizer.export()]


def denormal(state: State) -> int:
    return sum(int(((t != 0) & (t.abs() < SMALLEST_NORMAL)).sum()) for _, t in state)


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize(("name", "hyper"), CASES.values(), ids=CASES)
def test_numbers_too_small_to_be_normal_count_as_zero_and_change_no_value(
    name: str, hyper: Hyper
) -> None:
    values, state = run_dry(name, hyper, flushes=True)
    expected, plain = run_dry(name, hyper, flushes=False)
    assert torch.allclose(values, expected, rtol=0, atol=1e-30)
    assert not denormal(state) or not OPTIMIZERS.load(name).flushes
    if (name, hyper) in (CASES["Adam"], CASES["SGD momentum"]):
        assert denormal(plain), "nothing became too small"
    assert torch.full((64,), 1e-40).mul(0.5).all(), "everything else goes on as before"


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "later"])
def test_what_would_be_divided_by_stays_as_small_as_it_is(late: bool) -> None:
    layout = layout_of(1, "float32")
    values, gradients = PartBuffer(layout, 0), PartBuffer(layout, 0)
    small = tuple(GroupSpec({"lr": 0.1, "eps": 1e-30}) for _ in range(2))
    usual = tuple(GroupSpec({"lr": 0.1, "eps": 1e-8}) for _ in range(2))
    optimizer = SegmentOptimizer(OptimizerSpec("Adam", usual if late else small), layout, 0, values)
    optimizer.set_hyper(small)
    gradients.vectors[0].fill_(1e-20)
    optimizer.step(gradients)
    moved = gradients.segments[0]
    assert moved.numel()
    assert torch.allclose(values.segments[0], torch.full_like(moved, -0.1), rtol=0.02)


# What cannot be ----------------------------------------------------------------------------------


class Lion(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Computes something of its own."""


class OtherState(torch.optim.SGD):
    def _init_group(self, *args: Any) -> bool:
        return False


class Renamed(torch.optim.AdamW):
    """As many programs have: other defaults, the same steps."""

    def __init__(self, params: Any, lr: float = 0.5) -> None:
        super().__init__(params, lr=lr, weight_decay=0.25)


def test_an_optimizer_becomes_a_name_and_numbers() -> None:
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.AdamW(
        [{"params": [a], "lr": torch.tensor(0.5)}, {"params": [b], "betas": [0.1, 0.2]}], lr=0.25
    )
    spec = spec_of(optimizer)
    assert spec.name == "AdamW"
    assert spec.groups[0].values["lr"] == 0.5
    assert spec.groups[1].values["lr"] == 0.25
    assert spec.groups[1].values["betas"] == (0.1, 0.2)
    assert all(set(group.values) == OPTIMIZERS.load("AdamW").hyper for group in spec.groups)
    assert groups_of(optimizer, "AdamW") == spec.groups
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises(ConfigurationError, match="a hyper-parameter is 'much'"):
        spec_of(optimizer)


def test_a_subclass_that_steps_as_its_base_does_goes_by_its_name() -> None:
    spec = spec_of(Renamed([torch.nn.Parameter(torch.zeros(1))]))
    assert (spec.name, spec.groups[0].values["weight_decay"]) == ("AdamW", 0.25)


@pytest.mark.parametrize("make", [Lion, OtherState, torch.optim.Adafactor])
def test_an_optimizer_that_is_not_torchs_own_is_refused(make: Any) -> None:
    optimizer = make([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UnsupportedOptimizerError, match=rf"no optimizer .*{make.__name__}: it has"):
        spec_of(optimizer)


def test_a_class_of_our_own_needs_none_of_torchs_private_methods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Plain(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None: ...

    class Derived(Plain): ...

    class Other(Plain):
        def step(self, closure: Any = None) -> None: ...

    found = {"Plain": Entry(Plain, "lr")}
    monkeypatch.setattr(OPTIMIZERS, "find", found.get)
    assert [name_of(kind([torch.zeros(1)], {})) for kind in (Plain, Derived, Other)] == [
        "Plain",
        "Plain",
        None,
    ]


class Warmed(torch.optim.Optimizer):
    """Another package's: it keeps one number of each parameter, in its own way."""

    def __init__(self, params: Any, lr: float = 0.1, warm: int = 20) -> None:
        super().__init__(params, {"lr": lr, "warm": warm})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(self.keeps)

    keeps: ClassVar[dict[str, Any]] = {}


@pytest.mark.parametrize(
    ("hyper", "keeps", "reason"),
    [
        (
            "lr",
            {},
            r"Warmed's warm is 50, and servers would take 20: its entry does not name 'warm'",
        ),
        ("lr warm", {"count": 0}, "Warmed keeps 'count', which is 0, and no tensor"),
        ("lr warm", {"count": torch.zeros(())}, r"'count', which has shape \(\) instead of \(2,\)"),
        ("lr warm", {"step": torch.zeros(()), "mean": torch.ones(2), "last": None}, None),
    ],
)
def test_what_servers_would_do_otherwise_of_another_packages_is_refused(
    hyper: str, keeps: Any, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = Entry(Warmed, hyper)
    monkeypatch.setattr(OPTIMIZERS, "find", {"Warmed": entry}.get)
    monkeypatch.setattr(OPTIMIZERS, "load", lambda name: entry)
    monkeypatch.setattr(Warmed, "keeps", keeps)
    optimizer = Warmed([torch.nn.Parameter(torch.zeros(3))], warm=50)
    if reason is None:
        assert spec_of(optimizer).groups[0].values == {"lr": 0.1, "warm": 50}
        return
    with pytest.raises(UnsupportedOptimizerError, match=reason):
        spec_of(optimizer)


def test_nobody_is_told_to_go_where_it_is_refused_too() -> None:
    with pytest.raises(UnsupportedOptimizerError, match="with servers and without"):
        spec_of(torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(1))]))
    with pytest.raises(UnsupportedOptimizerError, match=r"use trireme\.Embedding") as refused:
        spec_of(torch.optim.SparseAdam([torch.nn.Parameter(torch.zeros(1))]))
    assert "allreduce" not in str(refused.value)


def test_an_unknown_name_is_refused_by_the_server() -> None:
    layout = layout_of(1, "float32")
    with pytest.raises(
        UnsupportedOptimizerError, match=r"no optimizer 'Lion': it has ASGD, Adadelta"
    ):
        SegmentOptimizer(OptimizerSpec("Lion", ()), layout, 0, PartBuffer(layout, 0))


@pytest.mark.parametrize(
    ("hyper", "reason"),
    [
        ({"lr": 0.1, "warmth": 1.0}, "no hyper-parameter 'warmth'"),
        ({"lr": -0.1}, "Invalid learning rate"),
        ({"lr": 0.1, "nesterov": True}, "Nesterov momentum requires"),
    ],
)
def test_hyper_parameters_are_checked_when_it_is_built(hyper: Hyper, reason: str) -> None:
    layout = layout_of(1, "float32")
    spec = OptimizerSpec("SGD", (GroupSpec(hyper), GroupSpec(hyper)))
    with pytest.raises(ConfigurationError, match=f"SGD.*{reason}"):
        SegmentOptimizer(spec, layout, 0, PartBuffer(layout, 0))


def test_changed_hyper_parameters_must_fit() -> None:
    spec = OptimizerSpec("SGD", (GroupSpec({"lr": 0.1}), GroupSpec({"lr": 0.2})))
    assert mismatch(spec, spec.groups) is None
    assert mismatch(spec, (GroupSpec({"momentum": 0.5}), GroupSpec({}))) is None
    assert "2 parameter groups, and values for 1" in str(mismatch(spec, spec.groups[:1]))
    assert "no hyper-parameter 'betas'" in str(
        mismatch(spec, (GroupSpec({}), GroupSpec({"betas": (0.1, 0.2)})))
    )
    adam = OptimizerSpec("Adam", (GroupSpec({"lr": 0.1, "amsgrad": False}),))
    for betas in ((0.9, 1.0), (-0.1, 0.9), (0.9, 0.99, 0.999), (0.9, float("nan")), 0.9):
        assert "betas is" in str(mismatch(adam, (GroupSpec({"betas": betas}),))), betas
    assert mismatch(adam, (GroupSpec({"betas": (0.0, 0.9)}),)) is None
    assert mismatch(adam, (GroupSpec({"lr": 0.2}),)) is None
    assert "amsgrad cannot" in str(mismatch(adam, (GroupSpec({"lr": 0.2, "amsgrad": True}),)))
    rms = OptimizerSpec("RMSprop", (GroupSpec({"lr": 0.1, "momentum": 0.5}),))
    assert mismatch(rms, (GroupSpec({"momentum": 0.9}),)) is None
    assert "momentum or centered cannot" in str(mismatch(rms, (GroupSpec({"momentum": 0.0}),)))
