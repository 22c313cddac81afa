from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.session.checkpoint.samples import sample_changes, sample_tables, save_changes
from trireme.cli import main
from trireme.session.checkpoint import CheckpointData, save


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fails(capsys: pytest.CaptureFixture[str], *words: str, status: int = 2) -> str:
    """Runs a command that must end with one line and a status."""
    assert main(list(words)) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("trireme: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    for step in (10, 20):
        save(tmp_path / "run", CheckpointData(step, {"weight": torch.full((2, 3), float(step))}))
    return str(tmp_path / "run")


def test_checkpoints_are_listed_oldest_first(
    run_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "ls", run_dir]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "step-000000010-writer-1",
        "step-000000020-writer-2",
    ]


def test_checkpoints_of_changes_are_listed_shown_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    whole = CheckpointData(10, {}, tables=sample_tables({1: 1.0}))
    save(run, whole)
    save_changes(run, whole, [(20, sample_changes({2: 1.0}))])
    assert main(["checkpoint", "ls", run]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert "tables" not in first
    assert second.endswith("  tables: step 10, changes of 20")
    assert main(["checkpoint", "show", run]) == 0
    shown = capsys.readouterr().out
    assert "t/rows  F32 [1, 2]" in shown
    assert "  tables: step 10, changes of 20\n" in shown
    assert main(["checkpoint", "verify", run]) == 0


def test_tables_are_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("trireme.tables.job.parquet", reason="tables are not installed")
    run = str(tmp_path / "run")
    save(run, CheckpointData(10, {}, tables=sample_tables({1: 1.0})))
    assert main(["checkpoint", "export", run, "--tables", "--output", "out"]) == 0
    assert f"out/t.parquet: a table of {run}" in capsys.readouterr().out
    assert Path("out/t.parquet").read_bytes()[:4] == b"PAR1"
    assert "--state goes with --tables" in fails(capsys, "checkpoint", "export", run, "--state")
    capsys.readouterr()
    assert main(["checkpoint", "export", run, "--output", "m.safetensors"]) == 0
    assert "without the rows of its sparse tables, t: export them" in capsys.readouterr().out


def test_the_newest_checkpoint_is_shown_verified_and_exported(
    run_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "show", run_dir]) == 0
    shown = capsys.readouterr().out
    assert "global step 20" in shown
    assert "weight  F32 [2, 3]" in shown
    assert main(["checkpoint", "verify", run_dir]) == 0
    assert main(["checkpoint", "export", run_dir, "--step", "10", "--output", "m.safetensors"]) == 0
    from safetensors.torch import load_file

    assert torch.equal(load_file("m.safetensors")["weight"], torch.full((2, 3), 10.0))


def test_a_damaged_or_missing_checkpoint_is_said(
    run_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = Path(run_dir) / "checkpoints" / "step-000000020-writer-2" / "state.json"
    state.write_bytes(state.read_bytes()[:-5])
    assert main(["checkpoint", "ls", run_dir]) == 1
    assert "step-000000020-writer-2  DAMAGED: " in capsys.readouterr().out
    assert "damaged" in fails(capsys, "checkpoint", "verify", run_dir, status=1)
    assert "it has: 10, 20" in fails(capsys, "checkpoint", "show", run_dir, "--step", "15")
    for action in ("ls", "show", "verify", "export"):
        assert "no checkpoint in nowhere. Give the" in fails(
            capsys, "checkpoint", action, "nowhere"
        )
