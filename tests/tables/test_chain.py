"""Tables that are stored as a whole and changes are, when they are read, what the tables were."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.session.checkpoint.samples import (
    AFTER_FOURTH,
    AFTER_SECOND,
    FIRST,
    FOURTH,
    SECOND,
    THIRD,
    assert_same,
    assert_same_tensors,
    sample,
    sample_changes,
    sample_tables,
)
from trireme.errors import CheckpointError
from trireme.location import Location
from trireme.ps.snapshot import Mark
from trireme.session.checkpoint import (
    CheckpointData,
    describe,
    list_checkpoints,
    load,
    save,
    step_of,
    verify,
)
from trireme.session.checkpoint.place import LocalPlace, Place
from trireme.session.checkpoint.saver import Saver
from trireme.session.options import Checkpoint
from trireme.tables.chain import DROPPED, merged

SOON = 20.0


def chain(run: Path) -> list[Path]:
    found = [save(run, data) for data in (FIRST, SECOND, THIRD, FOURTH)]
    assert all(isinstance(path, Path) for path in found)
    return found  # type: ignore[return-value]


# Merging ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_after", [0, 5])
@pytest.mark.parametrize("admit_after", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_a_whole_and_changes_are_the_table(admit_after: int, drop_after: int, dtype: str) -> None:
    """Against a table that exports everything, bit for bit, after random updates."""
    pytest.importorskip("numba")
    from trireme.tables.job.requests import RowUpdates, encoded
    from trireme.tables.job.shard_tables import ShardTables
    from trireme.tables.job.table_extension import joined
    from trireme.tables.keys import SLOTS, slots_of
    from trireme.tables.table_spec import Adagrad, Add, TableSpec

    draw = random.Random(f"{admit_after} {drop_after} {dtype}")
    optimizer: Any = Adagrad(lr=0.1) if dtype == "float32" else Add()
    spec = TableSpec("a/b", 3, optimizer, dtype, admit_after=admit_after, drop_after=drop_after)
    halves = [ShardTables([spec], slots) for slots in ((0, SLOTS // 2), (SLOTS // 2, SLOTS))]

    def flat(since: int | None) -> dict[str, torch.Tensor]:
        return dict(joined([half.copy(since) for half in halves]))

    parts: list[Mapping[str, torch.Tensor]] = []
    mark = 0
    for step in range(1, 120):
        keys = np.unique([draw.randint(-40, 40) for _ in range(draw.randint(1, 6))])
        rows = np.random.default_rng(step).integers(-9, 9, (keys.size, 3)).astype(dtype)
        for half, slots in zip(halves, ((0, SLOTS // 2), (SLOTS // 2, SLOTS)), strict=True):
            at = slots_of(keys)
            mine = (at >= slots[0]) & (at < slots[1])
            half.apply(encoded([RowUpdates(0, keys[mine], rows[mine])]), step)
        if draw.random() < 0.1 or step == 119:
            assert all(half.changes_after <= mark for half in halves)
            parts.append(flat(None if not parts else mark))
            mark = step
            assert len(parts) == 1 or all(f"a/b/{DROPPED}" in part for part in parts[1:] if part)
            expected = flat(None)
            found = merged(parts)
            filled = [name for name in found if found[name].numel()]  # else of any width
            assert filled == [name for name in expected if expected[name].numel()]
            assert_same_tensors(
                {name: found[name] for name in filled}, {name: expected[name] for name in filled}
            )
    assert len(parts) > 4
    if drop_after:
        assert any(part and part[f"a/b/{DROPPED}"].numel() for part in parts[1:])


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    tables = sample_tables({1: 1.0})
    for name, wrong in (("t/rows", torch.ones(2, 2)), ("t/waiting_steps", torch.ones(3))):
        with pytest.raises(CheckpointError, match="of the table 't' do not belong together"):
            merged([{**tables, name: wrong}])
    del tables["t/steps"]
    with pytest.raises(CheckpointError, match="of the table 't' do not belong together"):
        merged([tables])


# On a disk ----------------------------------------------------------------------------------------


def test_each_checkpoint_stands_by_itself(tmp_path: Path) -> None:
    paths = chain(tmp_path)
    assert [describe(path)[0].chain for path in paths] == [(), (1, 2), (1, 2, 3), (1, 2, 3, 4)]
    first, last = (path / "tables.safetensors" for path in (paths[0], paths[-1]))
    assert os.stat(first).st_ino == os.stat(last).st_ino, "written once"
    assert_same(load(paths[1]), replace(SECOND, tables=AFTER_SECOND))
    assert_same_tensors(load(paths[2]).tables, AFTER_SECOND)
    for path in paths[:-1]:
        for file in path.iterdir():
            file.unlink()
    verify(paths[-1])
    assert_same(load(paths[-1]), replace(FOURTH, tables=AFTER_FOURTH))
    assert_same(load(paths[-1], streamed=True), replace(FOURTH, tables=AFTER_FOURTH))
    assert load(paths[-1]).since is None


def test_a_file_system_without_hard_links_gets_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    last = chain(tmp_path)[-1]
    assert os.stat(last / "tables.safetensors").st_nlink == 1
    assert_same(load(last), replace(FOURTH, tables=AFTER_FOURTH))


def test_a_checkpoint_cannot_follow_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 1"):
        save(tmp_path, SECOND)
    assert not list_checkpoints(tmp_path)


@pytest.mark.parametrize("name", ["tables.safetensors", "changes-000000002.safetensors"])
def test_damage_of_any_part_is_found(tmp_path: Path, name: str) -> None:
    path = chain(tmp_path)[-1] / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for check in (verify, load):
        with pytest.raises(CheckpointError, match=f"{name} is damaged"):
            check(path.parent)


def test_an_older_release_is_not_given_changes_for_all_rows(tmp_path: Path) -> None:
    first, *rest = chain(tmp_path)
    formats = [msgspec.json.decode((p / "state.json").read_bytes())["format"] for p in rest]
    assert formats == [2, 2, 2]
    state = msgspec.json.decode((first / "state.json").read_bytes())
    assert state["format"] == 1 and "chain" not in state


# Saving -------------------------------------------------------------------------------------------


def saved(saver: Saver, step: int, **options: Any) -> CheckpointData:
    """Saves a step as a job does: what has changed, if there is a base for it."""
    base = saver.base()
    mark = Mark(step, 1)
    data = replace(sample(step), tables=FIRST.tables, mark=mark)
    if base is not None:
        assert base.mark == Mark(base.step, 1)
        data = replace(data, tables=sample_changes({step: 1.0}), since=base.step)
    saver.submit(data, 1, **options)
    saver.wait(SOON)
    return data


def followed(run: Path) -> list[tuple[int, ...]]:
    return [describe(path)[0].chain for path in list_checkpoints(run)]


def test_all_rows_are_saved_now_and_then(tmp_path: Path) -> None:
    saver = Saver(LocalPlace(tmp_path), Checkpoint(keep=10, whole_tables_every=3))
    for step in range(1, 8):
        saved(saver, step)
    assert followed(tmp_path) == [(), (1, 2), (1, 2, 3), (), (4, 5), (4, 5, 6), ()]
    assert load(list_checkpoints(tmp_path)[2]).tables["t/keys"].tolist() == [1, 2, 3, 9]


def test_all_rows_are_saved_each_time_where_that_is_chosen(tmp_path: Path) -> None:
    saver = Saver(LocalPlace(tmp_path), Checkpoint(whole_tables_every=1))
    for step in range(1, 4):
        saved(saver, step)
    assert followed(tmp_path) == [(), (), ()]


def test_all_rows_are_saved_where_the_changes_are_as_large(tmp_path: Path) -> None:
    saver = Saver(LocalPlace(tmp_path), Checkpoint(keep=20, whole_tables_every=100))
    for step in range(1, 10):
        saved(saver, step)
    lengths = [len(each) for each in followed(tmp_path)]
    nbytes = sum(tensor.nbytes for tensor in FIRST.tables.values())
    most = nbytes // sum(tensor.nbytes for tensor in sample_changes({1: 1.0}).values()) + 1
    assert max(lengths) == most + 1 < 9
    assert lengths.count(0) > 1


def test_old_checkpoints_go_and_what_follows_them_stays_whole(tmp_path: Path) -> None:
    saver = Saver(LocalPlace(tmp_path), Checkpoint(keep=1, whole_tables_every=4))
    for step in range(1, 4):
        saved(saver, step)
    saver.base()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [2, 3], "2 was followed"
    saved(saver, 4)
    (*_, last) = list_checkpoints(tmp_path)
    assert load(last).tables["t/keys"].tolist() == [1, 2, 3, 4, 9]
    saved(saver, 5)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [5], "all rows: nothing is"


def test_a_base_stays_while_a_checkpoint_that_follows_it_waits(tmp_path: Path) -> None:
    saver = Saver(LocalPlace(tmp_path), Checkpoint(keep=1))
    saved(saver, 1)
    base = saver.base()
    assert base is not None and base.step == 1
    saver.submit(replace(sample(2), tables=FIRST.tables, mark=Mark(2, 1)), 1)
    saver.wait(SOON)
    saver.submit(replace(sample(3), tables=sample_changes({5: 1.0}), since=1), 1)
    saver.wait(SOON)
    assert load(list_checkpoints(tmp_path)[-1]).tables["t/keys"].tolist() == [1, 2, 5, 9]


def test_another_history_has_no_base(tmp_path: Path) -> None:
    saver = Saver(LocalPlace(tmp_path), Checkpoint())
    saved(saver, 1)
    saver.forget_base()
    assert saver.base() is None
    assert saved(saver, 2).since is None
    assert saved(saver, 3).since == 2


def test_a_save_of_a_history_that_is_over_is_no_base(tmp_path: Path) -> None:
    history: list[Saver] = []

    def write(place: Place, data: CheckpointData, writer: int) -> Location:
        history[0].forget_base()  # while it is written
        return save(place, data, writer=writer)

    saver = Saver(LocalPlace(tmp_path), Checkpoint(), write)
    history.append(saver)
    saved(saver, 1)
    assert saver.base() is None


def test_what_cannot_be_followed_is_not_tried_again(tmp_path: Path) -> None:
    saver = Saver(LocalPlace(tmp_path), Checkpoint())
    saved(saver, 1)
    assert saver.base() is not None
    (list_checkpoints(tmp_path)[0] / "tables.safetensors").unlink()  # type: ignore[union-attr]
    saver.submit(replace(sample(2), tables=sample_changes({5: 1.0}), since=1), 1)
    with pytest.raises(CheckpointError, match="could not be written"):
        saver.wait(SOON)
    assert saver.base() is None


def test_data_without_tables_has_no_base(tmp_path: Path) -> None:
    saver = Saver(LocalPlace(tmp_path), Checkpoint())
    saver.submit(sample(1), 1)
    saver.wait(SOON)
    assert saver.base() is None
