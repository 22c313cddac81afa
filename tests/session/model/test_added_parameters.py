"""Parameters that a program gives to its optimizer, or unfreezes, after training began."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trireme
from tests.harness import Cluster, run_job
from tests.process_groups import ProcessGroup, run_process_group
from trireme.errors import ConfigurationError

INPUTS = torch.linspace(-1, 1, 24).reshape(4, 6)


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def by_method(optimizer: torch.optim.Optimizer, late: nn.Module) -> None:
    optimizer.add_param_group({"params": list(late.parameters()), "lr": 0.01})


def by_appending(optimizer: torch.optim.Optimizer, late: nn.Module) -> None:
    group = {**optimizer.param_groups[0], "lr": 0.01, "params": list(late.parameters())}
    optimizer.param_groups.append(group)


def by_extending(optimizer: torch.optim.Optimizer, late: nn.Module) -> None:
    optimizer.param_groups[0]["params"].extend(late.parameters())


def by_unfreezing(optimizer: torch.optim.Optimizer, late: nn.Module) -> None:
    late.requires_grad_(True)


def by_removing(optimizer: torch.optim.Optimizer, late: nn.Module) -> None:
    optimizer.param_groups[0]["params"][-1:] = []


WAYS: dict[str, Callable[[torch.optim.Optimizer, nn.Module], None]] = {
    "add_param_group": by_method,
    "append": by_appending,
    "extend": by_extending,
    "unfreeze": by_unfreezing,
    "remove": by_removing,
}


def first_optimizer(model: nn.Sequential, way: str) -> torch.optim.Optimizer:
    """An optimizer of the last layer, or of both layers of which the first is frozen."""
    if way == "unfreeze":
        model[0].requires_grad_(False)
        return torch.optim.Adam(model.parameters(), lr=0.05)
    return torch.optim.Adam(model[2].parameters(), lr=0.05)


def loop(way: str, over: str = "given") -> None:
    model = made()
    given = first_optimizer(model, way)
    optimizer = trireme.distribute(model, given)
    try:
        for step in range(4):
            model.zero_grad()
            model(INPUTS).square().mean().backward()
            optimizer.step()
            if step == 1:
                WAYS[way](given if over == "given" else optimizer, model[0])
    except ConfigurationError as error:
        optimizer.worker.fail(error)
        raise
    optimizer.close()


def session(way: str) -> None:
    def optimizer_of(params: object) -> torch.optim.Optimizer:
        return first_optimizer(model, way)

    model = made()
    joined = trireme.Session(model, lambda out, _: out.square().mean(), optimizer_of)
    with joined:
        for step in range(4):
            joined.step((INPUTS, INPUTS))
            if step == 1:
                WAYS[way](joined.optimizer, model[0])


SHARED = [
    ProcessGroup(workers=2, strategy="fsdp"),
    ProcessGroup(servers=1, strategy="averaging", every=2),
    ProcessGroup(servers=1, mesh="dp=2", inside=2),
]
IDS = ["fsdp", "averaging", "a mesh in a worker"]


GROWING = {
    "alone": ProcessGroup(),
    "allreduce": ProcessGroup(workers=2),
    "async": ProcessGroup(servers=2),
    "sync": ProcessGroup(workers=2, servers=2, strategy="sync"),
    "sync through memory": ProcessGroup(workers=2, servers=1, strategy="sync", transport="auto"),
}
SERVERS = [name for name, group in GROWING.items() if group.servers]
LR = 0.05


def data(replica: int, replicas: int) -> torch.Tensor:
    return INPUTS[replica::replicas]


@contextmanager
def failing(optimizer: Any) -> Iterator[None]:
    """Tells the job of an error: a process that only ends is waited for until it counts as lost."""
    try:
        yield
    except Exception as error:
        if hasattr(optimizer, "worker"):
            optimizer.worker.fail(error)
        raise


def trained(
    way: str, wrap: Callable[[nn.Module, torch.optim.Optimizer], Any], steps: int, at: int
) -> tuple[list[float], Any]:
    """Trains a loop of one's own, which gives its optimizer more after a step."""
    model = made()
    if way == "a new layer":
        model.append(nn.Identity())
    given = first_optimizer(model, way)
    optimizer = wrap(model, given)
    replica = getattr(optimizer, "replica", 0), getattr(optimizer, "replicas", 1)
    with failing(optimizer):
        for step in range(getattr(optimizer, "global_step", 0), steps):
            if step == at:
                torch.manual_seed(1)
                if way == "a new layer":
                    model[3] = nn.Linear(2, 2)
                    optimizer.add_param_group({"params": list(model[3].parameters())})
                else:
                    WAYS[way](given, model[0])
            optimizer.zero_grad()
            model(data(*replica)).square().mean().backward()
            optimizer.step()
    values: list[float] = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    return values, optimizer


def distributed(
    way: str, steps: int = 6, at: int = 2, run_dir: Path | None = None
) -> tuple[list[float], int]:
    def wrap(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return trireme.distribute(model, optimizer, run_dir=run_dir, ema=0.9)

    values, optimizer = trained(way, wrap, steps, at)
    optimizer.close()
    return values, optimizer.global_step


ALL_WAYS = [*WAYS, "a new layer"]


def removes_with_servers(name: str, way: str) -> bool:
    return name in SERVERS and way == "remove"


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough(
    but=(
        "alone-extend",
        "alone-remove",
        "allreduce-add_param_group",
        "allreduce-unfreeze",
        "allreduce-a new layer",
        "async-append",
        "async-remove",
        "sync-extend",
        "sync-a new layer",
        "sync through memory-unfreeze",
    )
)
@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("name", GROWING)
def test_a_loop_trains_what_it_adds_as_plain_pytorch_does(name: str, way: str) -> None:
    if removes_with_servers(name, way):
        raised = run_process_group(GROWING[name], distributed, way).raised
        assert raised and all(expected(way) in said for said in raised.values())
        return
    want, _ = trained(way, lambda _, optimizer: optimizer, 6, 2)
    for found, _ in run_process_group(GROWING[name], distributed, way).values:
        assert found == pytest.approx(want, abs=1e-5)


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough(
    but=("alone-add_param_group", "allreduce-unfreeze", "async-add_param_group", "sync-unfreeze")
)
@pytest.mark.parametrize("way", ["unfreeze", "add_param_group"])
@pytest.mark.parametrize("name", GROWING)
def test_a_checkpoint_has_what_was_added(name: str, way: str, tmp_path: Path) -> None:
    want, _ = trained(way, lambda _, optimizer: optimizer, 8, 2)
    group = replace(GROWING[name], run_dir=tmp_path)
    _ = run_process_group(group, distributed, way, 5, 2).values
    # The second run adds it again before its first step, as a program does by the step it is at.
    for found, step in run_process_group(group, distributed, way, 8, 5).values:
        assert step == 8 and found == pytest.approx(want, abs=1e-5)


def session_values(way: str) -> list[float]:
    def optimizer_of(params: object) -> torch.optim.Optimizer:
        return first_optimizer(model, way)

    model = made()
    joined = trireme.Session(
        model, lambda out, _: out.square().mean(), optimizer_of, l2=0.01, clip_norm=0.5, ema=0.9
    )
    with joined:
        replica = joined.worker.setup.replica, joined.worker.setup.replicas
        for step in range(6):
            if step == 2:
                WAYS[way](joined.optimizer, model[0])
            joined.step((data(*replica), data(*replica)))
    values: list[float] = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    return values


def plain_session(way: str) -> list[float]:
    """The same by hand; gradients of what no optimizer has take part in nothing."""
    model = made()
    optimizer = first_optimizer(model, way)
    for step in range(6):
        if step == 2:
            WAYS[way](optimizer, model[0])
        own = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        model.zero_grad()
        loss = model(INPUTS).square().mean()
        loss = loss + 0.005 * sum(p.square().sum() for p in own if p.dim() >= 2)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own, 0.5)
        optimizer.step()
    values: list[float] = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    return values


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough(
    but=(
        "alone-append",
        "allreduce-extend",
        "allreduce-remove",
        "async-unfreeze",
        "sync-add_param_group",
        "sync-remove",
        "sync through memory-append",
    )
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GROWING)
def test_a_session_trains_what_it_adds(name: str, way: str) -> None:
    if removes_with_servers(name, way):
        raised = run_process_group(GROWING[name], session_values, way).raised
        assert raised and all(expected(way) in said for said in raised.values())
        return
    want = plain_session(way)
    for found in run_process_group(GROWING[name], session_values, way).values:
        assert found == pytest.approx(want, abs=1e-5)


def test_what_is_added_is_no_change_of_settings_that_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def make(index: int) -> trireme.Session:
        model = made()
        optimizer = first_optimizer(model, "add_param_group")
        return trireme.Session(model, lambda out, _: out.square().mean(), optimizer)

    def program(joined: trireme.Session) -> None:
        for step in range(4):
            if step == 2:
                by_method(joined.optimizer, joined.model[0])  # type: ignore[index]
            joined.step((INPUTS, INPUTS))

    assert not run_job(Cluster(workers=2), make, program).raised
    assert "changes the optimizer's settings by itself" not in caplog.text


def one_alone(way: str, rank: int) -> None:
    if trireme_rank() == rank:
        distributed(way)
    else:
        distributed(way, at=99)


def trireme_rank() -> int:
    from trireme.launch.environment import current_task

    return current_task().group.rank


def unseeded(way: str) -> None:
    model = made()
    optimizer = trireme.distribute(model, first_optimizer(model, "extend"))
    torch.manual_seed(trireme_rank())
    model.append(nn.Linear(2, 2))
    optimizer.add_param_group({"params": list(model[3].parameters())})
    model(INPUTS).square().mean().backward()
    optimizer.step()


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("way", WAYS)
def test_what_one_replica_adds_is_refused_by_all(way: str) -> None:
    ran = run_process_group(GROWING["allreduce"], one_alone, way, 1)
    assert len(ran.raised) == 2
    for said in ran.raised.values():
        assert "1 of 2 processes have given their optimizer other parameters" in said


def worker_index() -> int:
    from trireme.launch.environment import current_task

    return current_task().index


def by_one_worker(way: str) -> tuple[list[float], int]:
    return distributed(way, at=2 if worker_index() else 99)


def at_different_steps(way: str) -> tuple[list[float], int]:
    model = made()
    optimizer = trireme.distribute(model, first_optimizer(model, way))
    for step in range(6):
        if step == (4 if worker_index() else 2):
            WAYS[way](optimizer, model[0])
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()
    optimizer.close()
    values = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return values.tolist(), optimizer.global_step


@pytest.mark.parametrize("way", ["add_param_group", "unfreeze"])
def test_what_one_worker_adds_is_refused_in_rounds(way: str) -> None:
    raised = run_process_group(GROWING["sync"], by_one_worker, way).raised
    apart = "worker:1 has added or unfrozen parameter '0.weight', and worker:0 makes an update"
    assert any(apart.replace("weight", each) in s for s in raised.values() for each in NAMES)


NAMES = ("weight", "bias")


@pytest.mark.parametrize("way", ["add_param_group", "unfreeze"])
@pytest.mark.parametrize("strategy", ["async", "ssp"])
def test_workers_add_them_one_after_the_other(strategy: str, way: str) -> None:
    group = ProcessGroup(workers=2, servers=2, strategy=strategy)
    (first, step), (second, other) = run_process_group(group, at_different_steps, way).values
    assert (step, other) == (12, 12)
    assert first == second and all(map(math.isfinite, first))
    before = torch.cat([p.detach().reshape(-1) for p in made().parameters()]).tolist()
    assert all(value != untrained for value, untrained in zip(first, before, strict=True))


def test_new_layers_that_differ_are_refused() -> None:
    ran = run_process_group(GROWING["allreduce"], unseeded, "")
    assert len(ran.raised) == 2
    assert all("seed torch before new layers are built" in said for said in ran.raised.values())


def inserting(seeded: bool) -> float:
    """Puts a layer before the others, which have other names then; returns the sum of all."""
    model = made()
    optimizer = trireme.distribute(model, torch.optim.Adam(model.parameters(), lr=0.05))
    if not seeded:
        torch.manual_seed(trireme_rank())
    for step in range(4):
        if step == 2:
            if seeded:
                torch.manual_seed(1)
            model.insert(0, nn.Linear(6, 6))
            optimizer.add_param_group({"params": list(model[0].parameters())})
        optimizer.zero_grad()
        model(data(optimizer.replica, optimizer.replicas)).square().mean().backward()
        optimizer.step()
    optimizer.close()
    return float(sum(p.detach().double().sum() for p in model.parameters()))


def test_a_new_layer_that_takes_the_name_of_another_is_trained_or_refused() -> None:
    (alone,) = run_process_group(GROWING["alone"], inserting, True).values
    together = run_process_group(GROWING["allreduce"], inserting, True).values
    assert together == pytest.approx([alone, alone], rel=1e-6)
    unlike = run_process_group(GROWING["allreduce"], inserting, False)
    assert len(unlike.raised) == 2
    assert all("seed torch before new layers are built" in s for s in unlike.raised.values())
    served = run_process_group(GROWING["sync"], inserting, True)
    assert all("servers know it by its name" in said for said in served.raised.values())


def expected(way: str) -> str:
    if way == "unfreeze":
        return "parameter '0.weight' requires a gradient now, and did not when training began"
    if way == "remove":
        return "parameters were taken out of the optimizer's groups"
    return "parameter '0.weight' was given to the optimizer after training began"


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough(
    but=(
        "fsdp-append",
        "fsdp-add_param_group",
        "a mesh in a worker-unfreeze",
        "averaging-extend",
        "averaging-remove",
    )
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("group", SHARED, ids=IDS)
def test_a_loop_is_refused_by_name_what_would_not_be_trained(group: ProcessGroup, way: str) -> None:
    ran = run_process_group(group, loop, way)
    assert ran.raised and all(expected(way) in said for said in ran.raised.values())


@pytest.mark.slow(one_in=3)
@pytest.mark.thorough(
    but=(
        "fsdp-append",
        "pipeline-add_param_group",
        "a mesh in a worker-unfreeze",
        "averaging-extend",
        "fsdp-remove",
    )
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "group", [*SHARED, ProcessGroup(workers=2, strategy="pipeline")], ids=[*IDS, "pipeline"]
)
def test_a_session_is_refused_likewise(group: ProcessGroup, way: str) -> None:
    raised = run_process_group(group, session, way).raised
    assert any(expected(way) in said for said in raised.values())  # a stage has some of them
