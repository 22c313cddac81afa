"""Values that a program writes itself: they count as in one process, or are refused."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import trireme
from tests.harness import Cluster, run_job
from tests.process_groups import ProcessGroup, run_process_group
from trireme.errors import ConfigurationError, TriremeError
from trireme.ps.flat import FlatModel
from trireme.session.session import Session
from trireme.writes.watched_writes import ValueWatch, WatchedWrites

INPUTS = torch.linspace(-1, 1, 24).reshape(4, 6)


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05)


def clamp(model: nn.Module) -> None:
    """As in a Wasserstein GAN."""
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


def reload(model: nn.Module) -> None:
    model.load_state_dict(made().state_dict())


def scale(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "clamp": clamp,
    "load_state_dict": reload,
    "in place": scale,
    "other memory": replace,
}

IN_SHARDS = ("clamp", "in place", "load_state_dict")
"""The changes that a program can make to shards: torch drops the other."""


def loop(change: str, at: tuple[int, ...], writers: tuple[int, ...]) -> list[float]:
    """Six steps of a loop of one's own, which changes the values after some of them."""
    model = made()
    optimizer = trireme.distribute(model, adam(model))
    try:
        for step in range(6):
            optimizer.zero_grad()
            model(INPUTS).square().mean().backward()
            optimizer.step()
            if step in at and optimizer.worker.task.index in writers:
                (CHANGES | {"swap": swap})[change](model)
    except TriremeError as error:
        optimizer.worker.fail(error)  # as where the program ends
        raise
    values = trained(model)
    optimizer.close()
    return values


def trained(model: nn.Module) -> list[float]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    found: list[float] = torch.cat([p.detach().reshape(-1) for p in whole]).tolist()
    return found


def plain(change: str, at: tuple[int, ...]) -> list[float]:
    model = made()
    optimizer = adam(model)
    for step in range(6):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()
        if step in at:
            CHANGES[change](model)
    return trained(model)


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough(
    but=(
        "alone-load_state_dict",
        "allreduce-load_state_dict",
        "allreduce-clamp",
        "fsdp-in place",
        "fsdp-load_state_dict",
        "sync-in place",
        "sync-other memory",
        "sync, with lent memory-clamp",
        "sync, with lent memory-load_state_dict",
    )
)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "group",
    [
        ProcessGroup(),
        ProcessGroup(workers=2),
        ProcessGroup(workers=2, strategy="fsdp"),
        ProcessGroup(workers=2, servers=2, strategy="sync"),
        ProcessGroup(workers=2, servers=1, strategy="sync", transport="auto"),
    ],
    ids=["alone", "allreduce", "fsdp", "sync", "sync, with lent memory"],
)
def test_what_every_process_changes_counts_as_in_one(group: ProcessGroup, change: str) -> None:
    if group.strategy == "fsdp" and change not in IN_SHARDS:
        pytest.skip("torch drops it: see the test that it is refused")
    want = plain(change, (0, 3))
    for found in run_process_group(group, loop, change, (0, 3), (0, 1)).values:
        assert found == pytest.approx(want, abs=1e-6)


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("trireme").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def part_loop(change: str) -> tuple[list[float], list[str]]:
    """Loads a part of the model, or draws it anew, in each process of a loop."""
    said = Said()
    model = made()
    optimizer = trireme.distribute(model, adam(model))
    for step in range(4):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()
        if step == 1 and change != "draw":
            torch.manual_seed(3)
            with torch.inference_mode(change == "inference"):
                model[2].load_state_dict(nn.Linear(8, 2).state_dict())
        if step == 1 and change == "load, then draw":
            model[2].reset_parameters()
        elif step in (1, 2) and change == "draw":
            torch.manual_seed(step)
            model[2].reset_parameters()
    values = trained(model)
    optimizer.close()
    return values, [line for line in said.lines if "drawn random numbers" in line]


def evaluated_loop(change: str, differs: bool) -> list[float]:
    """Changes the values right after a forward pass without a backward pass."""
    model: nn.Module = Held()
    optimizer = trireme.distribute(model, adam(model))
    for step in range(4):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()
        if step == 1:
            with torch.set_grad_enabled(differs):
                model(INPUTS)
            other = Held()
            nn.init.constant_(other.weight, 0.1 + differs * optimizer.replica)
            CHANGES[change](model) if change != "load" else model.load_state_dict(
                other.state_dict()
            )
    values = trained(model)
    optimizer.close()
    return values


class Held(nn.Module):
    """A parameter of the model's own, and one of a child."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 6))
        self.child = nn.Linear(8, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.child(torch.tanh(inputs @ self.weight.T))
        return found


@pytest.mark.parametrize("change", ["load", "clamp", "in place"])
def test_shards_are_written_to_after_an_evaluation(change: str) -> None:
    (want,) = run_process_group(ProcessGroup(), evaluated_loop, change, False).values
    group = ProcessGroup(workers=2, strategy="fsdp")
    for found in run_process_group(group, evaluated_loop, change, False).values:
        assert found == pytest.approx(want, abs=1e-6)


def test_whole_tensors_that_differ_between_processes_are_refused() -> None:
    group = ProcessGroup(workers=2, strategy="fsdp")
    ran = run_process_group(group, evaluated_loop, "load", True)
    assert len(ran.raised) == 2
    assert "not all of them the same values" in ran.raised[0]


def late_loop(hidden: bool, alone: bool) -> list[float]:
    """Writes between the passes of a step."""
    model = made()
    optimizer = trireme.distribute(model, adam(model))
    for step in range(4):
        optimizer.zero_grad()
        loss = model(INPUTS).square().mean()
        loss.backward()
        if step == 1 and not (alone and optimizer.replica):
            with torch.no_grad():
                for parameter in model.parameters():
                    (parameter.data if hidden else parameter).mul_(0.5)
        optimizer.step()
    values = trained(model)
    optimizer.close()
    return values


@pytest.mark.parametrize("strategy", ["allreduce", "fsdp"])
def test_a_write_between_the_passes_of_a_step_counts_as_one_before_it(strategy: str) -> None:
    (want,) = run_process_group(ProcessGroup(), late_loop, False, False).values
    group = ProcessGroup(workers=2, strategy=strategy)
    for found in run_process_group(group, late_loop, False, False).values:
        assert found == pytest.approx(want, abs=1e-6)
    ran = run_process_group(group, late_loop, False, True)
    assert len(ran.raised) == 2
    assert "1 of 2 processes have written to parameters" in ran.raised[0]


@pytest.mark.parametrize("change", ["load", "inference"])
def test_a_part_of_a_model_of_shards_takes_whole_tensors(change: str) -> None:
    ((want, _),) = run_process_group(ProcessGroup(), part_loop, change).values
    ran = run_process_group(ProcessGroup(workers=2, strategy="fsdp"), part_loop, change)
    for found, warned in ran.values:
        assert found == pytest.approx(want, abs=1e-6)
        assert not warned  # the values were drawn in a copy


@pytest.mark.parametrize("change", ["draw", "load, then draw"])
@pytest.mark.parametrize(("strategy", "times"), [("fsdp", 1), ("allreduce", 0)])
def test_values_drawn_in_shards_are_told_of_once(strategy: str, times: int, change: str) -> None:
    ran = run_process_group(ProcessGroup(workers=2, strategy=strategy), part_loop, change)
    for _, warned in ran.values:
        assert len(warned) == times
        assert all("parameters '2.weight' and 1 more" in line for line in warned)


def clip(model: nn.Module, hidden: bool) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.data if hidden else parameter).clamp_(-0.2, 0.2)


def lopsided(hidden: bool) -> list[float]:
    """Clips weights of which only the first rows are large enough."""
    model = made()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[(len(parameter) + 1) // 2 :] *= 0.01
    optimizer = trireme.distribute(model, adam(model))
    for _ in range(3):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()
        clip(model, hidden)
    values = trained(model)
    optimizer.close()
    return values


@pytest.mark.parametrize("hidden", [False, True], ids=["no_grad", "data"])
def test_clipping_that_changes_one_shard_alone_counts(hidden: bool) -> None:
    (want,) = run_process_group(ProcessGroup(), lopsided, hidden).values
    shards = ProcessGroup(workers=2, strategy="fsdp")
    for found in run_process_group(shards, lopsided, hidden).values:
        assert found == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
    ("strategy", "change"),
    [("allreduce", "clamp"), ("allreduce", "in place"), ("fsdp", "in place")],
)
def test_what_one_process_changes_is_refused_by_all(strategy: str, change: str) -> None:
    group = ProcessGroup(workers=2, strategy=strategy)
    ran = run_process_group(group, loop, change, (2,), (1,))
    assert len(ran.raised) == 2
    assert all(
        "1 of 2 processes have written to parameters" in said for said in ran.raised.values()
    )
    assert "this one to parameters '0.weight' and 3 more" in ran.raised[1]


def test_what_torch_would_drop_of_a_shard_is_refused() -> None:
    group = ProcessGroup(workers=2, strategy="fsdp")
    ran = run_process_group(group, loop, "other memory", (2,), (0, 1))
    assert len(ran.raised) == 2
    assert "assigned to .data of parameters '0.weight' and 3 more" in ran.raised[0]
    assert "the change would be lost" in ran.raised[0]


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "group",
    [
        ProcessGroup(servers=1),
        ProcessGroup(servers=1, mesh="dp=2", inside=2),
        ProcessGroup(servers=1, mesh="fsdp=2", inside=2),
    ],
    ids=["async", "a mesh of replicas in a worker", "a mesh of shards in a worker"],
)
def test_what_servers_would_replace_is_refused(group: ProcessGroup, change: str) -> None:
    if "fsdp" in group.mesh and change not in IN_SHARDS:
        pytest.skip("torch drops it")
    ran = run_process_group(group, loop, change, (1,), (0,))
    assert "the program has written to parameters '0.weight' and 3 more itself" in ran.raised[0]
    assert "the change would be lost" in ran.raised[0]
    assert "by copy_ of a clone" in ran.raised[0]


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_worker_changes_between_exchanges_is_in_its_delta(change: str) -> None:
    group = ProcessGroup(servers=1, strategy="averaging", every=2)
    (found,) = run_process_group(group, loop, change, (0, 2), (0,)).values
    assert found == pytest.approx(plain(change, (0, 2)), abs=1e-6)


@pytest.mark.parametrize("change", ["clamp", "in place"])
@pytest.mark.parametrize("servers", [1, 2])
def test_what_one_worker_of_a_round_changes_is_refused(servers: int, change: str) -> None:
    group = ProcessGroup(workers=2, servers=servers, strategy="sync")
    ran = run_process_group(group, loop, change, (2,), (1,))
    assert any("have written different values since step 3" in said for said in ran.raised.values())


def given(at: tuple[int, ...], writers: tuple[int, ...]) -> list[float]:
    """Six steps, after some of which the values are halved by the call for that."""
    model = made()
    optimizer = trireme.distribute(model, adam(model))
    for step in range(6):
        optimizer.zero_grad()
        model(INPUTS).square().mean().backward()
        optimizer.step()
        if step in at and optimizer.worker.task.index in writers:
            whole = {n: getattr(p, "full_tensor", p.clone)() for n, p in model.named_parameters()}
            optimizer.write_values({name: value.detach() * 0.5 for name, value in whole.items()})
    values = trained(model)
    optimizer.close()
    return values


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize(
    "group",
    [
        ProcessGroup(),
        ProcessGroup(workers=2),
        ProcessGroup(workers=2, strategy="fsdp"),
        ProcessGroup(servers=2),
        ProcessGroup(servers=1, mesh="fsdp=2", inside=2),
        ProcessGroup(workers=2, servers=2, strategy="sync"),
        ProcessGroup(servers=1, strategy="averaging", every=2),
    ],
    ids=["alone", "allreduce", "fsdp", "async", "a mesh in a worker", "sync", "averaging"],
)
def test_values_that_are_given_to_the_job_count(group: ProcessGroup) -> None:
    want = plain("in place", (0, 3))
    for found in run_process_group(group, given, (0, 3), (0, 1)).values:
        assert found == pytest.approx(want, abs=1e-6)


def meeting(folder: str) -> list[float]:
    """One of two asynchronous workers writes; the other waits for it, and pulls by a step."""
    model = nn.Linear(2, 1)
    optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0))
    written = Path(folder) / "written"
    if optimizer.worker.task.index == 0:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.write_values({"weight": torch.full((1, 2), 7.0)})
        written.touch()
    else:
        deadline = time.monotonic() + 60
        while not written.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    found: list[float] = model.weight.detach().flatten().tolist()
    optimizer.close()
    return found


def test_another_asynchronous_worker_receives_them(tmp_path: Path) -> None:
    ran = run_process_group(ProcessGroup(workers=2, servers=2), meeting, str(tmp_path))
    assert ran.values == [[7.0, 7.0], [7.0, 7.0]]


def test_a_call_with_another_shape_or_name_is_refused() -> None:
    def make(index: int) -> Session:
        return trireme.Session(made(), nn.MSELoss(), Adam, max_steps=8)

    def program(session: Session) -> None:
        for values, said in (
            ({"0.weight": torch.zeros(2)}, r"'0.weight' .* the optimizer has shape \(8, 6\)"),
            ({"7.weight": torch.zeros(2)}, "'7.weight' .* the optimizer has no such parameter"),
        ):
            with pytest.raises(ConfigurationError, match=said):
                session.write_values(values)

    assert not run_job(Cluster(), make, program).raised


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_that_only_change_places_are_no_longer_as_they_were(dtype: torch.dtype) -> None:
    model = nn.Linear(5000, 3, dtype=dtype)
    watch = ValueWatch(FlatModel([list(model.named_parameters())], servers=1))
    sums = set[int]()
    for shift in range(6):
        watch.remember(0)
        sums.add(watch.values_of(["weight"]))
        rows, last = model.weight.data, slice(shift, None, 5)  # few are among the sample
        rows[:, last] = rows[:, last].flip(1).clone()
        assert watch.written() == ["weight"]
    assert len(sums) == 6


def test_a_late_change_of_few_elements_is_found_by_its_version_or_by_a_sample() -> None:
    model = nn.Linear(100, 100)
    flat = FlatModel([list(model.named_parameters())], servers=1)
    watch = ValueWatch(flat)
    for step in range(8):
        watch.remember(step)
        assert watch.written() == []
    with torch.no_grad():
        model.bias[3] = 1.0
    assert watch.written() == ["bias"]
    watch.remember()
    found = 0
    for step in range(100):  # the sample is of others each time: one of 39 at most is spared
        watch.remember(step)
        model.weight.data[7, 7] += 1.0
        found += watch.written() == ["weight"]
    assert found >= 2


def swap(model: nn.Module) -> None:
    """As an evaluation of averaged weights does, which puts the trained ones back."""
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    scale(model)
    model.load_state_dict(kept)


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough(
    but=(
        "async-later",
        "a mesh of shards in a worker-from the first step on",
        "allreduce-later",
        "fsdp-from the first step on",
        "sync-later",
    )
)
@pytest.mark.parametrize("at", [(0, 1, 3, 4), (4,)], ids=["from the first step on", "later"])
@pytest.mark.parametrize(
    "group",
    [
        ProcessGroup(servers=1),
        ProcessGroup(servers=1, mesh="fsdp=2", inside=2),
        ProcessGroup(workers=2),
        ProcessGroup(workers=2, strategy="fsdp"),
        ProcessGroup(workers=2, servers=2, strategy="sync"),
    ],
    ids=["async", "a mesh of shards in a worker", "allreduce", "fsdp", "sync"],
)
def test_values_that_one_process_changes_and_puts_back_count_as_unchanged(
    group: ProcessGroup, at: tuple[int, ...]
) -> None:
    ran = run_process_group(group, loop, "swap", at, (0,))
    assert not ran.raised
    for found in ran.values:
        assert found == pytest.approx(plain("swap", ()), abs=1e-6)


def test_values_that_a_program_exchanges_are_no_longer_as_they_were() -> None:
    model = nn.Linear(3000, 1)
    watch = ValueWatch(FlatModel([list(model.named_parameters())], servers=1))
    for _ in range(4):
        watch.remember()
    swap(model)
    assert watch.written() == []
    watch.remember()
    with torch.no_grad():  # which no sum of them shows
        model.weight.copy_(model.weight.flip(1))
    assert watch.written() == ["weight"]
    watch.remember()
    with torch.no_grad():
        model.weight[0, 1] += 1.0  # of which no element is compared that is not summed
    assert watch.written() == ["weight"]


def session_steps(write: bool) -> None:
    session = trireme.Session(made(), lambda outputs, _: outputs.square().mean(), Adam)
    with session:
        session.step((INPUTS, INPUTS))
        if write:
            clamp(session.model)
        session.step((INPUTS, INPUTS))


def Adam(params: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["fsdp", "pipeline"])
def test_a_model_that_only_shows_values_takes_none(strategy: str) -> None:
    group = ProcessGroup(workers=2, strategy=strategy)
    ran = run_process_group(group, session_steps, True)
    assert all("the change would be lost" in said for said in ran.raised.values())
    assert not run_process_group(group, session_steps, False).raised


def test_an_evaluation_writes_nothing_of_the_programs() -> None:
    def make(index: int) -> Session:
        return trireme.Session(made(), nn.MSELoss(), Adam, ema=0.9, max_steps=8)

    def program(session: Session) -> None:
        data = torch.utils.data.TensorDataset(INPUTS, torch.zeros(4, 2))
        while not session.should_stop():
            session.step((INPUTS, torch.zeros(4, 2)))
            session.evaluate(data)

    for cluster in (Cluster(servers=0), Cluster(), Cluster(strategy="sync", workers=2)):
        assert not run_job(cluster, make, program).raised


def test_a_write_before_an_evaluation_is_found_after_it() -> None:
    def make(index: int) -> Session:
        return trireme.Session(made(), nn.MSELoss(), Adam, max_steps=8)

    def program(session: Session) -> None:
        session.step((INPUTS, torch.zeros(4, 2)))
        clamp(session.model)
        session.evaluate(torch.utils.data.TensorDataset(INPUTS, torch.zeros(4, 2)))
        session.step((INPUTS, torch.zeros(4, 2)))

    assert isinstance(run_job(Cluster(), make, program).raised[0], ConfigurationError)


def test_the_final_values_are_no_write_of_the_programs(caplog: pytest.LogCaptureFixture) -> None:
    def make(index: int) -> Session:
        return trireme.Session(made(), nn.MSELoss(), Adam)

    def program(session: Session) -> None:
        data = torch.utils.data.TensorDataset(INPUTS, torch.zeros(4, 2))
        for batch in session.loader(data, batch_size=4, epochs=4):
            session.step(batch)
        session.job.end()
        session.evaluate(data)

    assert not run_job(Cluster(), make, program).raised
    assert "put back" not in caplog.text


def one_element(at: int, writers: tuple[int, ...], swaps: tuple[int, ...]) -> list[float]:
    """Eight steps at rate 0; one element of 40,000 is written to, by some after a swap there."""
    torch.manual_seed(0)
    model = nn.Linear(400, 100, bias=False)
    optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.0))
    try:
        for step in range(8):
            optimizer.zero_grad()
            model(torch.ones(2, 400)).square().mean().backward()
            optimizer.step()
            if step == at and optimizer.worker.task.index in swaps:
                swap(model)
            if step == at and optimizer.worker.task.index in writers:
                with torch.no_grad():
                    model.weight.view(-1)[7] = 123.0
    except TriremeError as error:
        optimizer.worker.fail(error)
        raise
    values = trained(model)
    optimizer.close()
    return values[:8]


@pytest.mark.parametrize(
    ("group", "writers", "swaps"),
    [
        (ProcessGroup(servers=1, strategy="sync"), (0,), ()),
        (ProcessGroup(workers=2, servers=2, strategy="sync"), (0, 1), (0,)),
        (ProcessGroup(workers=2), (0, 1), (0,)),
    ],
    ids=["sync, alone", "sync", "allreduce"],
)
def test_one_element_of_many_that_every_worker_writes_to_counts(
    group: ProcessGroup, writers: tuple[int, ...], swaps: tuple[int, ...]
) -> None:
    ran = run_process_group(group, one_element, 4, writers, swaps)
    assert not ran.raised
    assert [values[7] for values in ran.values] == [123.0] * len(ran.values)


@pytest.mark.parametrize("strategy", ["sync", "allreduce"])
def test_one_element_that_one_worker_writes_to_is_refused(strategy: str) -> None:
    servers = 1 if strategy == "sync" else 0
    group = ProcessGroup(workers=2, servers=servers, strategy=strategy)
    said = run_process_group(group, one_element, 4, (1,), ()).raised.values()
    words = "written different values" if servers else "not all of them the same values"
    assert any(words in each for each in said)


@pytest.mark.parametrize("strategy", ["sync", "allreduce"])
def test_values_of_many_that_one_worker_swaps_and_puts_back_count_as_unchanged(
    strategy: str,
) -> None:
    servers = 1 if strategy == "sync" else 0
    group = ProcessGroup(workers=2, servers=servers, strategy=strategy)
    assert not run_process_group(group, one_element, 4, (), (1,)).raised


def test_what_one_worker_writes_before_the_last_step_is_refused() -> None:
    group = ProcessGroup(workers=2, strategy="allreduce")
    said = run_process_group(group, one_element, 6, (1,), ()).raised.values()
    assert len(said) == 2
    assert all("1 of 2 processes have written" in each for each in said)
    assert any("this one to parameter 'weight'," in each for each in said)


@pytest.mark.parametrize("data", [False, True])
def test_what_is_written_and_then_given_to_write_values_counts(data: bool) -> None:
    def make(index: int) -> Session:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return trireme.Session(model, nn.MSELoss(), optimizer, max_steps=4)

    def program(session: Session) -> None:
        weight = next(iter(session.model.parameters()))
        for number in range(4):
            session.step((INPUTS, torch.zeros(4, 2)))
            if number == 1:
                with torch.no_grad():
                    (weight.data if data else weight).fill_(0.5)
                session.write_values({"0.weight": torch.full_like(weight, 0.5)})
        assert torch.equal(weight, torch.full_like(weight, 0.5))

    assert not run_job(Cluster(1, 1, "async"), make, program).raised


def test_one_element_that_servers_may_replace_is_told_and_then_refused() -> None:
    flat = FlatModel([list(nn.Linear(400, 100).named_parameters())], servers=1)
    writes, weight = WatchedWrites([ValueWatch(flat)]), flat.parameters["weight"]
    for step in range(8):
        writes.remember(step)
        assert not writes.check()
    with torch.no_grad():
        weight.view(-1)[8] += 1.0
    assert "If a value is another now, the change is LOST" in writes.check()
    writes.remember(8)
    with torch.no_grad():
        weight.view(-1)[8] += 1.0
    with pytest.raises(ConfigurationError, match="the change would be lost"):
        writes.check()


def long_steps() -> Callable[[], float]:
    """A clock by which steps take much longer than what is done between two looks at it."""
    times = (100.0**number for number in itertools.count())
    return lambda: next(times)


@pytest.mark.parametrize("wide", [400, 4], ids=["a sum of all", "a sample of all"])
def test_values_that_are_put_back_are_not_warned_of_at_the_first_time(wide: int) -> None:
    flat = FlatModel([list(nn.Linear(wide, 100).named_parameters())], servers=1)
    writes = WatchedWrites([ValueWatch(flat, clock=long_steps() if wide > 4 else None)])
    for step in range(8):
        writes.remember(step)
        assert not writes.check()
    with torch.no_grad():
        for parameter in flat.parameters.values():
            kept = parameter.clone()
            parameter.fill_(0.5)
            parameter.copy_(kept)
    assert not writes.check()


def test_one_element_that_is_changed_is_refused_where_a_sum_of_all_shows_it() -> None:
    flat = FlatModel([list(nn.Linear(400, 100).named_parameters())], servers=1)
    writes = WatchedWrites([ValueWatch(flat, clock=long_steps())])
    for step in range(8):
        writes.remember(step)
    with torch.no_grad():
        flat.parameters["weight"].view(-1)[8] += 1.0
    with pytest.raises(ConfigurationError, match="written to parameter 'weight' itself"):
        writes.check()


def test_one_element_of_values_that_no_update_changes_is_found() -> None:
    flat = FlatModel([list(nn.Linear(400, 100).named_parameters())], servers=1)
    watch, weight = ValueWatch(flat, still=True), flat.parameters["weight"]
    for step in range(8):
        watch.remember(step)
        assert watch.written() == []
    with torch.no_grad():
        weight.view(-1)[7] += 1.0
    assert watch.written() == ["weight"]


def test_workers_look_at_the_same_elements_at_a_step() -> None:
    """Also where one of them has evaluated, or has begun later."""
    flat = FlatModel([list(nn.Linear(400, 100).named_parameters())], servers=1)
    one, other = ValueWatch(flat), ValueWatch(flat)
    for step in range(100, 108):
        one.remember(step)
        other.remember(step)
        one.remember()
    for element in range(0, 40000, 97):
        flat.parameters["weight"].data.view(-1)[element] += 1.0
        assert one.written() == other.written()
        one.remember(108 + element)
        other.remember(108 + element)
        one._often = other._often = False  # as if it was the first write
        one.remember()
        other.remember()
