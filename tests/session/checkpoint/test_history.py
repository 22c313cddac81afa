from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.session.checkpoint.samples import assert_same, sample
from trireme.errors import CheckpointError
from trireme.session.checkpoint import latest, list_checkpoints, prune, step_of
from trireme.session.checkpoint import save as save_under

save = partial(save_under, writer=1)


def steps(run: Path) -> list[int]:
    return [step_of(path) for path in list_checkpoints(run)]


def damage(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"cut sho")


def unexpected(path: Path, reason: CheckpointError) -> None:
    raise AssertionError(f"{path}: {reason}")


def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "absent") == []
    assert latest(tmp_path / "absent", unexpected) is None


def test_checkpoints_are_listed_by_step_and_nothing_else_is(tmp_path: Path) -> None:
    for step in (10**9 + 5, 30, 4):
        save(tmp_path, sample(step))
    for other in ("best", "step-4", ".saving-step-000000009.pid1.00c0ffee"):
        (tmp_path / "checkpoints" / other).mkdir()
    assert steps(tmp_path) == [4, 30, 10**9 + 5]


def test_a_directory_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a directory")
    with pytest.raises(CheckpointError, match="cannot be read"):
        list_checkpoints(tmp_path)


def test_step_of_needs_a_checkpoints_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="best"):
        step_of(tmp_path / "best")


def test_latest_falls_back_aloud(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, sample(step))
    newest = list_checkpoints(tmp_path)[-1]
    state = newest / "state.json"
    state.write_bytes(state.read_bytes()[:-40])
    damage(list_checkpoints(tmp_path)[-2])
    passed_over: list[tuple[str, str]] = []
    found = latest(tmp_path, lambda path, reason: passed_over.append((path.name, str(reason))))
    assert found is not None
    assert_same(found, sample(1))
    assert [name for name, _ in passed_over] == [
        "step-000000003-writer-1",
        "step-000000002-writer-1",
    ]
    assert "state.json is damaged" in passed_over[0][1]
    assert "model.safetensors is damaged: it has 7 bytes" in passed_over[1][1]


def test_latest_does_not_begin_anew_over_damaged_checkpoints(tmp_path: Path) -> None:
    damage(save(tmp_path, sample(1)))
    damage(save(tmp_path, sample(2)))
    passed_over: list[Path] = []
    with pytest.raises(CheckpointError, match=r"every checkpoint .* \(2 of them\)"):
        latest(tmp_path, lambda path, _: passed_over.append(path))
    assert len(passed_over) == 2


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in range(1, 7):
        save(tmp_path, sample(step))
    assert [step_of(path) for path in prune(tmp_path, 2)] == [1, 2, 3, 4]
    assert steps(tmp_path) == [5, 6]
    assert prune(tmp_path, 2) == []


def test_prune_keeps_a_good_one_older_than_the_newest(tmp_path: Path) -> None:
    paths = [save(tmp_path, sample(step)) for step in (1, 2, 3)]
    damage(paths[1])
    damage(paths[2])
    prune(tmp_path, 2, spared=[paths[0]])
    assert steps(tmp_path) == [1, 2, 3]


def test_prune_keeps_one_for_every_so_many_steps(tmp_path: Path) -> None:
    for step in (0, 400, 1037, 1500, 2000, 2112, 2900, 3500):
        save(tmp_path, sample(step))
    prune(tmp_path, 1, keep_every_steps=1000)
    assert steps(tmp_path) == [1037, 2000, 3500]
