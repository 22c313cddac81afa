"""Tables that an earlier version has stored as a whole and changes are read as one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.session.checkpoint.samples import (
    AFTER_CHANGES,
    FIRST,
    assert_same,
    assert_same_tensors,
    sample_changes,
    sample_tables,
    save_changes,
)
from trireme.errors import CheckpointError
from trireme.session.checkpoint import load, verify
from trireme.tables.job.chain import merged


@pytest.mark.parametrize("seed", range(20))
def test_a_whole_and_changes_are_the_table(seed: int) -> None:
    draw = random.Random(seed)
    rows = {key: draw.random() for key in draw.sample(range(40), 15)}
    waiting = {key: 1 for key in range(40, 44)}
    parts = [sample_tables(rows, waiting=waiting)]
    for _ in range(6):
        keys = draw.sample(range(50), 12)
        changed, waits, dropped = keys[:5], keys[5:7], keys[7:]
        for key in keys:
            rows.pop(key, None)
            waiting.pop(key, None)
        now = {key: draw.random() for key in changed}
        rows, waiting = {**rows, **now}, {**waiting, **dict.fromkeys(waits, 2)}
        parts.append(
            sample_changes(now, dropped=sorted(dropped), waiting=dict.fromkeys(waits, 2))
            if draw.random() < 0.9 or dropped
            else {}
        )
    assert_same_tensors(merged(parts), sample_tables(rows, waiting=waiting))


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    tables = sample_tables({1: 1.0})
    for name, wrong in (("t/rows", torch.ones(2, 2)), ("t/waiting_steps", torch.ones(3))):
        with pytest.raises(CheckpointError, match="of the table 't' do not belong together"):
            merged([{**tables, name: wrong}])
    del tables["t/steps"]
    with pytest.raises(CheckpointError, match="of the table 't' do not belong together"):
        merged([tables])


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    path = save_changes(tmp_path)
    verify(path)
    assert_same(load(path), replace(FIRST, step=4, tables=AFTER_CHANGES))


@pytest.mark.parametrize("name", ["tables", "changes-000000002", "changes-000000004"])
def test_damage_of_any_part_is_found(tmp_path: Path, name: str) -> None:
    path = save_changes(tmp_path)
    with (path / f"{name}.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)
