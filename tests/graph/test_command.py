"""`trireme graph`: what the program's session is asked for."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trireme.cli import main
from trireme.launch.config.task_config import DRAWN, TaskConfig, decode_task, encode_task

SHOW = f"""import os, sys
print(os.environ['TRIREME_TASK'])
print(sys.argv[1:])
sys.exit({DRAWN})
"""
TRAIN = """
import torch, trireme
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        %s

session = trireme.Session(
    Model, nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1), max_steps=3, run_dir="runs/train"
)
with session:
    for step in range(%d):
        session.step((torch.ones(4, 2), torch.ones(4, 2)))
        print("made a step")
"""
LOOP = """
import torch, trireme

model = torch.nn.Linear(2, 2)
optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
print("joined")
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The program runs in this process: what it may change is put back afterwards."""
    kept = {name: each for name, each in os.environ.items() if not name.startswith("TRIREME_")}
    monkeypatch.setattr(os, "environ", kept)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SHOW)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def task(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    first, second = capsys.readouterr().out.splitlines()
    return json.loads(first), second


def test_the_session_is_asked_for_pictures_and_does_not_train(capsys) -> None:
    words = ["--workers", "3", "--microbatches=4"]
    assert main(["graph", *words, "train.py", "--workers", "mine"]) == 0
    asked, arguments = task(capsys)
    assert asked["draw"] == 3
    assert asked["dry_run"] is True
    assert (asked["workers"], asked["group"]["size"], asked["servers"]) == (3, 3, 0)
    assert asked["config"]["training"]["strategy"] == "graph"
    assert asked["config"]["model"]["microbatches"] == 4
    assert asked["config"]["origins"]["strategy"] == "trireme graph"
    assert arguments == "['--workers', 'mine']"
    assert not Path("runs").exists()


def test_one_worker_by_default(capsys) -> None:
    assert main(["graph", "train.py"]) == 0
    assert task(capsys)[0]["draw"] == 1


def test_a_task_keeps_what_it_is_asked_to_draw() -> None:
    task = TaskConfig(job="j", draw=2)
    assert decode_task(encode_task(task)) == task
    assert decode_task(encode_task(TaskConfig(job="j"))).draw is None


def test_environment_file_and_mesh_decide_too(capsys, monkeypatch) -> None:
    Path("trireme.toml").write_text("workers = 3\nps = 2\n")
    assert main(["graph", "--mesh", "dp=2", "train.py"]) == 0
    asked = task(capsys)[0]
    assert asked["draw"] == 6
    assert asked["servers"] == 0
    monkeypatch.setitem(os.environ, "TRIREME_WORKERS", "2")
    assert main(["graph", "train.py"]) == 0
    assert task(capsys)[0]["draw"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py", "--strategy", "sync"], ""),
        (["--strategy", "sync", "train.py"], "no option --strategy"),
        (["--workers", "auto", "train.py"], "give --workers N"),
        (["--workers", "0", "train.py"], "workers is '0'"),
        (["--wokers", "x", "train.py"], "did you mean --workers?"),
        (["--ps", "1", "train.py"], "no option --ps"),
        ([], "name the program"),
        (["other.py"], "there is no program other.py"),
    ],
)
def test_wrong_words_are_refused(capsys, words: list[str], message: str) -> None:
    assert main(["graph", *words]) == (2 if message else 0)
    assert message in capsys.readouterr().err


# The programs themselves -------------------------------------------------------------------------


def drawn(capsys: pytest.CaptureFixture[str], program: str, *words: str) -> tuple[int, str, str]:
    """Draws a program; returns the status, what it prints, and the errors."""
    Path("train.py").write_text(program)
    status = main(["graph", *words, "train.py"])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_the_graph_is_drawn_at_the_first_step_and_nothing_else_is_left(capsys) -> None:
    program = TRAIN % ("return self.linear(x).relu()", 2)
    status, out, err = drawn(capsys, program, "--workers", "2")
    assert status == 0 and not err
    assert "made a step" not in out and "global steps" not in out
    assert "relu" in out
    assert "predicted:" in out and "worker:1/cpu" in out
    assert [path.name for path in Path().iterdir()] == ["train.py"]


def test_a_model_that_cannot_be_captured_is_refused_with_its_line(capsys) -> None:
    program = TRAIN % ("return self.linear(x) if x.sum() > 0 else x", 1)
    line = 1 + program[: program.index("if x.sum")].count("\n")
    status, out, err = drawn(capsys, program)
    assert status == 2 and "predicted" not in out
    assert f"train.py:{line}" in err and "depends on the value of a tensor" in err
    assert not Path("runs").exists()


@pytest.mark.parametrize("text", ["print('hello')", TRAIN % ("return self.linear(x)", 0)])
def test_a_program_that_makes_no_step_is_no_success(capsys, text: str) -> None:
    status, _, err = drawn(capsys, text)
    assert status == 1
    assert "train.py has ended, and no session in it has made a step" in err


def test_a_loop_of_its_own_cannot_be_drawn(capsys) -> None:
    status, out, err = drawn(capsys, LOOP)
    assert status == 2 and "joined" not in out
    assert "trireme graph cannot be used with trireme.distribute" in err
    assert "trireme.Session" in err


@pytest.mark.parametrize("status", [1, 3])
def test_the_status_of_a_program_that_fails_is_its_own(capsys, status: int) -> None:
    assert drawn(capsys, f"raise SystemExit({status})") == (status, "", "")
