"""A worker of several replicas is a worker of larger batches, under every strategy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.parity.inside import (
    BATCH,
    STEPS,
    random_state,
    running_statistics,
    stop_at,
    train,
    train_and_record,
    train_with_bad_examples,
)
from tests.parity.plain import Values, difference, values_of
from tests.parity.spread import OPTIMIZERS, data_of, loss_of, model_of
from tests.process_groups import ProcessGroup, run_process_group
from trireme.ps.messages import WorkerProgress
from trireme.ps.rule import Average
from trireme.session.checkpoint import CheckpointData, latest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

TWO = {"mesh": "dp=2", "inside": 2}
ASYNC = ProcessGroup(1, servers=1, strategy="async")
SYNC = ProcessGroup(2, servers=1, strategy="sync")


def tensors(values: dict[str, Any]) -> Values:
    return {name: torch.from_numpy(value) for name, value in values.items()}


def trained(
    group: ProcessGroup, *, steps: int = STEPS, optimizer: str = "sgd", **options: Any
) -> list[Values]:
    """What each process ends with."""
    replicas = group.inside
    ran = run_process_group(group, train, replicas, steps, optimizer, options)
    return [tensors(values) for values, _ in ran.values]


def saved(run_dir: Path) -> CheckpointData:
    data = latest(run_dir, lambda path, error: pytest.fail(f"{path}: {error}"))
    assert data is not None
    return data


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("group", "options"),
    [
        (ASYNC, {}),
        (replace(ASYNC, servers=2, transport="auto"), {}),
        (replace(ASYNC, strategy="ssp"), {}),
        (ASYNC, {"clip_norm": 0.5}),
        (ASYNC, {"l2": 0.1, "accumulate": 2}),
        (replace(ASYNC, compress="fp16"), {}),
        (replace(SYNC, transport="auto"), {}),
        (SYNC, {"clip_norm": 0.5}),
        (SYNC, {"ema": Average(0.9, warm_up=False)}),
        (replace(SYNC, strategy="averaging", every=3), {}),
        (replace(SYNC, strategy="diloco", every=4), {}),
    ],
    ids=str,
)
def test_a_worker_of_two_replicas_is_one_of_twice_the_batch(
    group: ProcessGroup, options: dict[str, Any]
) -> None:
    (wanted, *_) = trained(group, **options)
    for values in trained(replace(group, **TWO), **options):
        assert difference(values, wanted) <= (1e-6 if group.compress == "none" else 1e-3)


@pytest.mark.parametrize("compress", ["int8", "topk"])
def test_what_is_packed_is_the_mean_of_all_replicas(compress: str) -> None:
    first, second = trained(replace(ASYNC, compress=compress, **TWO))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert difference(first, values_of(model_of("MLP"))) > 1e-3


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize(
    "group",
    [
        replace(ASYNC, workers=2),
        replace(ASYNC, workers=2, strategy="ssp"),
        replace(SYNC, aggregate=1),
        replace(SYNC, strategy="averaging", every=3),
    ],
    ids=str,
)
def test_each_example_counts_once(group: ProcessGroup, tmp_path: Path) -> None:
    steps = 24
    trained(replace(group, run_dir=tmp_path, **TWO), steps=steps)
    data = saved(tmp_path)
    assert data.step == steps
    rows = msgspec.convert(data.state["pushes"], list[WorkerProgress])
    updates = sum(row.applied for row in rows)
    per_update = 3 if group.every else 1
    # Rounds of one update make a step each; of averaging, all workers' pushes make `every` steps.
    assert updates * per_update == (steps * group.workers if group.every else steps)
    consumed = sum(stop - start for start, stop in data.state["consumed"]["train"])
    assert consumed == updates * per_update * BATCH


@pytest.mark.thorough
@pytest.mark.parametrize(("before", "after"), [(TWO, TWO), (TWO, {}), ({}, TWO)], ids=str)
def test_a_job_goes_on_at_the_exact_example(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    group = replace(SYNC, run_dir=tmp_path)
    (wanted, *_) = trained(SYNC, optimizer="adam")
    trained(replace(group, **before), steps=5, optimizer="adam")
    assert saved(tmp_path).state["consumed"] == {"train": [[0, 5 * 2 * BATCH]]}
    resumed = replace(group, **after)
    for values, began in run_process_group(
        resumed, train, resumed.inside, STEPS, "adam", {}
    ).values:
        assert began == 5
        assert difference(tensors(values), wanted) <= 1e-5
    assert saved(tmp_path).state["consumed"] == {"train": [[0, STEPS * 2 * BATCH]]}


def test_short_pieces_that_came_back_are_shared_by_all_replicas(tmp_path: Path) -> None:
    """One asynchronous worker of three replicas goes on where two of other batches were."""
    trained(replace(ASYNC, workers=2, run_dir=tmp_path), steps=7)
    three = replace(ASYNC, mesh="dp=3", inside=3, run_dir=tmp_path)
    run_process_group(three, train, 3, 30, "sgd", {})
    data = saved(tmp_path)
    assert data.step == 30
    done = data.state["consumed"]["train"]
    # A batch is at most 2 examples a replica; what came back is in pieces of 8, none of them lost.
    examples = sum(stop - start for start, stop in done)
    assert 7 * BATCH + 23 * 3 <= examples <= 7 * BATCH + 23 * 6
    assert done[0][0] == 0 and len(done) <= 2


def test_a_loss_that_is_not_finite_in_one_replica_leaves_out_the_update_of_all() -> None:
    bad = (3 * BATCH, 6 * BATCH + BATCH - 1)  # the first replica's at one step, the second's later
    ran = run_process_group(replace(ASYNC, **TWO), train_with_bad_examples, bad)
    model = model_of("MLP")
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    inputs, targets = data_of("MLP").tensors
    made, step = 0, 0
    while made < STEPS:
        own = slice(step * BATCH, (step + 1) * BATCH)
        step += 1
        if any(own.start <= example < own.stop for example in bad):
            made += SKIPPED_IS_A_STEP
            continue
        optimizer.zero_grad()
        loss_of(model(inputs[own]), targets[own]).backward()
        optimizer.step()
        made += 1
    for values in ran.values:
        assert difference(tensors(values), values_of(model)) <= 1e-6


SKIPPED_IS_A_STEP = 1
"""The server counts an update that weighs nothing as a step, and leaves the values."""


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_the_loss_that_is_recorded_is_the_mean_over_the_replicas(
    mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = replace(ASYNC, mesh=mesh, inside=2, run_dir=tmp_path)
    (first, recorded), (second, _) = run_process_group(group, train_and_record).values
    assert len(recorded) == STEPS
    assert recorded == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)])
    assert (first != second) == (mesh == "dp=2")


def test_any_process_may_ask_that_the_job_end() -> None:
    first, second = run_process_group(replace(ASYNC, **TWO), stop_at, 5).values
    assert first == second and 5 <= first <= 8


def test_running_statistics_are_the_mean_over_all_replicas() -> None:
    ran = run_process_group(replace(SYNC, **TWO), running_statistics).values
    last = sum(means[-1] for _, means in ran) / len(ran)
    for values, _ in ran:
        assert float(values["0.running_mean"].mean()) == pytest.approx(last, abs=1e-6)
        assert all((values[name] == ran[0][0][name]).all() for name in values)


def test_each_replica_draws_numbers_of_its_own() -> None:
    drawn = run_process_group(replace(SYNC, **TWO), random_state).values
    assert len({tuple(numbers) for numbers in drawn}) == 4
