from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trireme.cli import main


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")


def script(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["slurm", "script", *words]) == 0
    text = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    return text.splitlines()


def test_it_asks_for_what_the_job_needs(capsys: pytest.CaptureFixture[str]) -> None:
    lines = script(capsys, "--ps", "2", "--workers", "4", "--time", "2:00", "train.py", "a b")
    assert "#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=3" in lines
    assert "#SBATCH --time=2:00" in lines
    run = "trireme run --on slurm --ps 2 --workers 4 --run-dir runs/train train.py 'a b' &"
    assert run in lines


def test_servers_on_nodes_of_their_own_are_a_component(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--server-nodes=2", "--ps", "2", "--nodes", "4", "--workers", "8")
    own = ("--slurm-gpus-per-worker", "2", "--slurm-cpus-per-worker", "6", "--run-dir", "here")
    lines = script(capsys, *options, *own, "train.py")
    asked = [line for line in lines if "--nodes" in line or "gpus" in line or "hetjob" in line]
    assert asked[:4] == [
        "#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1  # the servers",
        "#SBATCH hetjob",
        "#SBATCH --nodes=4 --ntasks-per-node=1 --cpus-per-task=12",
        "#SBATCH --gpus-per-node=4",
    ]
    (run,) = [line for line in lines if line.startswith("trireme run")]
    assert "nodes" not in run and "--run-dir here" in run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name the program"),
        (("--workers", "auto", "train.py"), "give --workers N"),
        (("--nodes", "0", "train.py"), "--nodes is '0': it must be a whole number from 1"),
        (("--server-nodes", "1", "train.py"), "give --ps N too"),
        (("--time", "soon", "train.py"), "--time is 'soon'"),
        (("gone.py",), "gone.py"),
        (("--ps", "1", "--strategy", "synk", "train.py"), "did you mean sync"),
    ],
)
def test_what_cannot_be_is_refused(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", "script", *words]) == 2
    assert message in capsys.readouterr().err


def test_there_is_one_thing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slurm", "start"]) == 2
    assert "trireme slurm script" in capsys.readouterr().err
