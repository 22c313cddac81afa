"""A loop of one's own makes of a model, however it is spread, what it makes in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import trireme
from tests.parity.loop import (
    feed_another_batch,
    train_at_own_rates,
    train_loop,
    train_plain_loop,
    train_too_long,
    train_unequal,
)
from tests.parity.plain import Values, difference
from tests.parity.spread import STEPS
from tests.process_groups import ProcessGroup, run_process_group
from trireme.errors import ConfigurationError
from trireme.job_config import JobConfig
from trireme.launch.config.task_config import TASK_VARIABLE, GroupMember, TaskConfig, encode_task

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

CLOSE = 1e-5

WAYS = {
    "python": ProcessGroup(),
    "ps sync": ProcessGroup(2, servers=1, strategy="sync"),
    "ps averaging, H=1": ProcessGroup(2, servers=1, strategy="averaging", every=1),
    "allreduce": ProcessGroup(2),
    "fsdp": ProcessGroup(2, strategy="fsdp"),
    "tensor": ProcessGroup(2, strategy="tensor"),
    "dp=2,tp=2": ProcessGroup(mesh="dp=2,tp=2", inside=4),
    "ps sync over tp=2": ProcessGroup(2, servers=2, strategy="sync", mesh="tp=2", inside=2),
    "ps sync over dp=2": ProcessGroup(2, servers=1, strategy="sync", mesh="dp=2", inside=2),
    "ps async over dp=2": ProcessGroup(1, servers=1, strategy="async", mesh="dp=2", inside=2),
    "ps averaging over dp=2": ProcessGroup(
        2, servers=1, strategy="averaging", every=1, mesh="dp=2", inside=2
    ),
    "ps sync over dp=2,tp=2": ProcessGroup(
        1, servers=1, strategy="sync", mesh="dp=2,tp=2", inside=4
    ),
    "ps sync over fsdp=2": ProcessGroup(2, servers=1, strategy="sync", mesh="fsdp=2", inside=2),
    "ps averaging over tp=2": ProcessGroup(
        2, servers=1, strategy="averaging", every=1, mesh="tp=2", inside=2
    ),
}


@pytest.fixture(scope="module")
def plain() -> Values:
    """What one plain process ends with."""
    values: Values = train_plain_loop("MLP")
    return values


def spread(way: str, program: Any = train_loop, *args: Any, **replaced: Any) -> list[Values]:
    """What each process ends with."""
    ran = run_process_group(replace(WAYS[way], **replaced), program, "MLP", *args)
    return [tensors(values) for values in ran.values]


def tensors(values: dict[str, Any]) -> Values:
    return {n: torch.from_numpy(v) for n, v in values.items() if n != "begin"}


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough(
    but=(
        "allreduce",
        "fsdp",
        "tensor",
        "ps sync",
        "ps sync over tp=2",
        "ps async over dp=2",
        "ps averaging over dp=2",
    )
)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_equals_one_process(way: str, plain: Values) -> None:
    for values in spread(way):
        assert difference(values, plain) <= CLOSE


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("way", ["allreduce", "fsdp", "ps sync over dp=2", "ps async over dp=2"])
def test_adam_over_several_backward_passes_with_clipping(way: str) -> None:
    wanted = train_plain_loop("MLP", "adam", clip_norm=0.1)
    for values in spread(way, train_loop, "adam", 2, STEPS, {"clip_norm": 0.1}):
        assert difference(values, wanted) <= 2e-4


@pytest.mark.parametrize("way", ["fsdp", "tensor"])
def test_a_fused_optimizer_updates_shards_and_whole_parameters(way: str) -> None:
    wanted = train_plain_loop("transformer", "adam, fused")
    for ran in run_process_group(WAYS[way], train_loop, "transformer", "adam, fused").values:
        assert difference(tensors(ran), wanted) <= 2e-3


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("way", ["allreduce", "ps sync", "ps async over dp=2", "ps sync over dp=2"])
def test_batches_of_unequal_sizes_make_one_mean(way: str, plain: Values) -> None:
    for values in spread(way, train_unequal):
        assert difference(values, plain) <= CLOSE


@pytest.mark.parametrize("way", ["allreduce", "fsdp", "ps sync over dp=2"])
def test_what_was_saved_goes_on_where_it_was(way: str, tmp_path: Path) -> None:
    wanted = train_plain_loop("MLP", "adam")
    process_group = replace(WAYS[way], run_dir=tmp_path)
    assert all(
        ran["begin"] == 0
        for ran in run_process_group(process_group, train_loop, "MLP", "adam", 1, 8).values
    )
    for ran in run_process_group(process_group, train_loop, "MLP", "adam").values:
        assert ran["begin"] == 8
        assert difference(tensors(ran), wanted) <= 2e-4


def test_in_a_worker_the_others_go_on_without_one_whose_loop_is_over() -> None:
    (first, told, mine), (second, error, others) = run_process_group(
        WAYS["ps async over dp=2"], train_too_long, "MLP"
    ).values
    assert first == second == 7 and not told and not error
    assert all((mine[name] == others[name]).all() for name in mine)


def test_who_holds_one_replica_must_feed_one_batch() -> None:
    for rank, told in enumerate(
        run_process_group(WAYS["tensor"], feed_another_batch, "MLP").values
    ):
        assert f"rank {rank} and rank {1 - rank} hold one replica together" in told


@pytest.mark.parametrize("way", ["allreduce", "fsdp"])
def test_who_sets_another_rate_than_the_others_is_refused(way: str) -> None:
    said = run_process_group(WAYS[way], train_at_own_rates, "MLP").values
    assert all("with other settings of the optimizer, here lr 0.1" in each for each in said), said


def test_a_pipeline_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TaskConfig(
        job="j",
        workers=2,
        config=JobConfig().replaced("a test", strategy="pipeline"),
        group=GroupMember(size=2, address="127.0.0.1:1"),
    )
    monkeypatch.setenv(TASK_VARIABLE, encode_task(task))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="distribute cannot run a pipeline"):
        trireme.distribute(model, torch.optim.SGD(model.parameters()))
