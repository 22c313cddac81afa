"""Loops of one's own on data that the job deals: what one process makes of all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.loop import (
    accumulate_plainly,
    train_accumulating,
    train_and_leave,
    train_counting,
    train_epochs,
)
from tests.parity.plain import Values, difference
from tests.parity.spread import BATCH, STEPS
from tests.parity.test_distribute import CLOSE, WAYS, tensors
from tests.process_groups import run_process_group

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


NOTES = ("steps", "seen", "said")


def ran(way: str, *args: Any) -> list[tuple[Values, dict[str, Any]]]:
    """What each process ends with: values, and what it counted."""
    return [
        (
            {n: torch.from_numpy(v) for n, v in each.items() if n not in NOTES},
            {n: each[n] for n in NOTES},
        )
        for each in run_process_group(WAYS[way], train_epochs, "MLP", *args).values
    ]


@pytest.mark.thorough(but=("ps sync-24-epochs", "allreduce-24-prepare"))
@pytest.mark.parametrize("prepared", [False, True], ids=["epochs", "prepare"])
@pytest.mark.parametrize(
    ("way", "rows"),  # the last batch of an epoch is smaller, where that is allowed
    [("ps sync", 24), ("allreduce", 24), ("fsdp", BATCH), ("ps sync over dp=2", 24)],
)
def test_what_the_job_deals_is_trained_on_as_in_one_process(
    way: str, rows: int, prepared: bool
) -> None:
    ((wanted, alone),) = ran("python", rows, prepared)
    assert alone["seen"] == 2 * STEPS * BATCH
    for values, counted in ran(way, rows, prepared):
        assert difference(values, wanted) <= CLOSE
        assert counted["steps"] == alone["steps"]
        assert not any("divide an epoch" in line for line in counted["said"])


@pytest.mark.parametrize("rows", [12, pytest.param(24, marks=pytest.mark.thorough)])
def test_a_library_may_ask_for_batches_ahead(rows: int) -> None:
    """Of 160 examples in batches of 6 one process has none in the last step of an epoch."""
    ((wanted, alone),) = ran("python", rows, True, True)
    for values, counted in ran("allreduce", rows, True, True):
        assert difference(values, wanted) <= CLOSE
        assert counted["steps"] == alone["steps"]


def test_after_a_batch_that_only_takes_part_gradients_count_again() -> None:
    assert run_process_group(WAYS["allreduce"], train_and_leave, "MLP").values == [True, True]


def test_a_library_that_asks_ahead_of_a_round_is_told_what_it_mixes() -> None:
    said = [line for _, counted in ran("ps sync", 12, True, True) for line in counted["said"]]
    assert any("this loop asks for batches ahead" in line for line in said)
    assert not any("ahead" in line for _, c in ran("ps sync", 16, True, True) for line in c["said"])


@pytest.mark.parametrize("way", ["allreduce", "ps sync"])
def test_a_step_may_be_of_batches_of_two_epochs(way: str) -> None:
    """160 examples in batches of 6: one worker has none in the last round of an epoch."""
    group = run_process_group(WAYS[way], train_accumulating, "MLP", 6, 4)
    steps, seen, said = ([each.pop(name) for each in group.values] for name in NOTES)
    assert any("it counts by their sum" in line for each in said for line in each)
    if way == "allreduce":
        wanted = accumulate_plainly("MLP", 6, 4, 2)
        for values in group.values:
            assert difference(tensors(values), wanted) <= CLOSE
        assert steps == [7, 7]
        assert seen == [164, 168], "12 were stand-ins"
    else:
        assert seen == [164, 156], "each once in each epoch"
        assert steps == [7, 7]


@pytest.mark.parametrize("way", ["allreduce", "ps sync"])
def test_a_batch_that_a_loop_has_and_has_not_used_is_not_of_its_step(way: str) -> None:
    """The rest of an epoch is 10 examples of one worker, and 6 of the other."""
    group = run_process_group(WAYS[way], train_accumulating, "MLP", 6, 4, True)
    wanted = accumulate_plainly("MLP", 6, 4, 2, flushes=True)
    for values in group.values:
        assert values["steps"] == 7
        trained = {name: each for name, each in values.items() if name not in NOTES}
        assert difference(tensors(trained), wanted) <= CLOSE


@pytest.mark.thorough(but=("ps sync",))
@pytest.mark.parametrize("way", ["allreduce", "ps sync", "ps sync over dp=2"])
def test_what_a_loop_keeps_comes_back_in_all_processes(way: str, tmp_path: Path) -> None:
    started = replace(WAYS[way], run_dir=tmp_path)
    for begins in (0, 5, 10):
        assert set(run_process_group(started, train_counting, "MLP").values) == {begins}
