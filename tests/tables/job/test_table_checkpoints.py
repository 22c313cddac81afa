"""Checkpoints of changes, written by jobs: consistent, and resumed on any number of servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

import trireme
from tests.harness import Cluster, run_job
from tests.session.checkpoint.samples import assert_same_tensors
from tests.tables.job.test_tables import BATCH, make, train
from trireme.session.checkpoint import list_checkpoints, load, step_of, verify
from trireme.tables.job.connection import Connection
from trireme.tables.table_spec import Adagrad, Normal

pytest.importorskip("numba", reason="tables are not tested: pip install 'trireme-train[tables]'")


def connect(run_dir: Path) -> Connection:
    checkpoint = trireme.Checkpoint(every_seconds=None, keep=50)
    ps: Connection = trireme.ps.connect(run_dir, checkpoint=checkpoint)
    ps.create("dense", 5, dtype="int64")
    ps.create_table(
        "rows",
        3,
        optimizer=Adagrad(lr=0.1),
        initializer=Normal(seed=1),
        drop_after=8,
        admit_after=2,
    )
    return ps


def clocks(ps: Connection, start: int, stop: int, saves: int = 3) -> None:
    """Makes this worker's updates; the chief saves after some of them."""
    for number in range(start, stop):
        draw = np.random.default_rng([ps.index, number])
        keys = draw.integers(0, 60, 4)
        ps.push("rows", keys, draw.normal(size=(4, 3)))
        ps.push("dense", np.full(5, 1))
        assert ps.clock().applied
        if number % saves == 0 and ps.is_chief:
            ps.save()
            assert ps._worker is not None
            ps._worker.storage.settle()


def in_order(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return dict(sorted(tensors.items()))


@pytest.mark.thorough
def test_a_job_goes_on_on_other_servers_bit_for_bit(tmp_path: Path) -> None:
    def part(name: str, servers: int, start: int, stop: int) -> None:
        cluster = Cluster(workers=2, servers=servers, strategy="sync")
        _ = run_job(
            cluster,
            lambda _: connect(tmp_path / name),  # type: ignore[arg-type, return-value]
            lambda ps: clocks(ps, start, stop),  # type: ignore[arg-type]
        ).values

    part("parts", 2, 0, 10)
    part("parts", 3, 10, 17)
    part("parts", 1, 17, 30)
    part("once", 2, 0, 30)
    parts, once = (list_checkpoints(tmp_path / name)[-1] for name in ("parts", "once"))
    verify(parts)
    assert step_of(parts) == step_of(once) == 30
    assert_same_tensors(in_order(load(parts).tables), in_order(load(once).tables))


def test_a_model_resumes_at_the_exact_example_bit_for_bit(tmp_path: Path) -> None:
    def ran(name: str, steps: int, servers: int) -> None:
        run_job(
            Cluster(workers=2, servers=servers, strategy="sync"),
            lambda _: make(
                "Adam",
                tmp_path / name,
                max_steps=steps,
                checkpoint=trireme.Checkpoint(every_steps=2, every_seconds=None),
            ),
            lambda session: train(session, BATCH // 2, steps),
        )

    ran("parts", 7, 2)
    ran("parts", 12, 3)
    ran("parts", 20, 1)
    ran("once", 20, 2)
    parts, once = (load(list_checkpoints(tmp_path / name)[-1]) for name in ("parts", "once"))
    assert parts.step == once.step == 20
    assert_same_tensors(in_order(parts.tables), in_order(once.tables))
    assert_same_tensors(parts.model, once.model)
    assert parts.state["consumed"] == once.state["consumed"]
