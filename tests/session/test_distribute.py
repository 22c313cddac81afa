"""A loop that is not Trireme's, in one plain process."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import trireme
from trireme.errors import ConfigurationError
from trireme.session.checkpoint import list_checkpoints
from trireme.session.distribute import DistributedOptimizer


def make(run_dir: Path | None = None, **options: object) -> tuple[nn.Module, DistributedOptimizer]:
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, trireme.distribute(model, sgd, run_dir=run_dir, **options)  # type: ignore[arg-type]


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()


def saved(run_dir: Path) -> list[str]:
    return [path.name for path in list_checkpoints(run_dir)]


def test_an_interrupted_loop_saves_and_ends_though_it_never_asks(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    model, optimizer = make(tmp_path)
    steps = 0
    with pytest.raises(SystemExit, match="130"):
        for _ in range(100):
            step(model, optimizer)
            steps += 1
            if steps == 5:
                signal.raise_signal(signal.SIGTERM)
    assert optimizer.should_stop() and steps < 10
    optimizer.close()
    assert saved(tmp_path) == [f"step-{optimizer.global_step:09d}"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_step_after_the_end_says_what_to_do_and_loses_nothing(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path, max_steps=3)
    with pytest.raises(ConfigurationError, match=r"ended at step 3: .*should_stop\(\)"):
        for _ in range(5):
            step(model, optimizer)
    assert saved(tmp_path) == ["step-000000003"]
    optimizer.close()


def test_what_is_left_of_the_last_iteration_makes_no_update(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path, max_steps=5)
    while not optimizer.should_stop():
        step(model, optimizer)
        step(model, optimizer)
    optimizer.close()
    assert optimizer.global_step == 5
    assert saved(tmp_path) == ["step-000000005"]


def test_should_stop_without_parentheses_answers_and_warns() -> None:
    model, optimizer = make(max_steps=1)
    with pytest.warns(DeprecationWarning, match=r"should_stop\(\)"):
        assert not optimizer.should_stop
    step(model, optimizer)
    with pytest.warns(DeprecationWarning, match=r"should_stop\(\)"):
        assert optimizer.should_stop
    assert optimizer.should_stop() is True
    optimizer.close()


@pytest.mark.parametrize("over", ["the one given", "the one returned"])
def test_a_scheduler_acts_whenever_it_was_made_and_leaves_step_alone(
    over: str, recwarn: pytest.WarningsRecorder
) -> None:
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    optimizer = trireme.distribute(model, sgd)
    if over == "the one returned":
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for done in range(1, 4):
        step(model, optimizer)
        schedule.step()
        assert optimizer.global_step == done
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**done
    optimizer.close()
    assert not [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message)]


PROGRAM = """
import torch, trireme
model = torch.nn.Linear(3, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = trireme.distribute(model, sgd, run_dir="run")
model(torch.ones(4, 3)).square().mean().backward()
optimizer.step()
"""


def test_an_exception_at_a_prompt_is_not_the_end_of_the_program(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-i"],
        input=f"1 / 0\n{PROGRAM}1 / 0\n",
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=90,
        check=False,
    )
    assert ended.stderr.count("ZeroDivisionError") == 2 and "failed" not in ended.stderr
    assert ended.returncode == 0
    assert saved(tmp_path / "run") == ["step-000000001"]
