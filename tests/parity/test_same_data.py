"""A program that gives every worker the same data is told so, once."""

from __future__ import annotations

import pytest

from tests.parity.loop import train_on_the_same
from tests.parity.test_distribute import WAYS
from tests.process_groups import run_process_group

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


@pytest.mark.thorough(but=("allreduce-names0", "tensor-names5"))
@pytest.mark.parametrize(
    ("way", "names"),
    [
        ("allreduce", ["worker:0, worker:1"]),
        ("fsdp", ["worker:0, worker:1"]),
        ("ps sync", ["worker:0, worker:1"]),
        ("ps averaging, H=1", ["worker:0, worker:1"]),
        ("ps sync over dp=2", ["rank:0, rank:1"]),
        ("tensor", []),  # which must have the same
    ],
)
def test_the_same_data_on_every_worker_is_noticed(way: str, names: list[str]) -> None:
    chief, *others = run_process_group(WAYS[way], train_on_the_same, "MLP", True).values
    assert [said.partition(" were given the same batches")[0] for said in chief] == names
    assert all("optimizer.prepare(loader)" in said for said in chief)
    assert not any(others[: len(others) // 2])  # of several workers, each has a first process


@pytest.mark.parametrize("way", ["allreduce", "ps sync", "ps sync over dp=2"])
def test_different_data_is_no_reason_to_warn(way: str) -> None:
    assert not any(run_process_group(WAYS[way], train_on_the_same, "MLP", False).values)
