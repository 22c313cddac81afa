"""A loop that is not Trireme's, in one plain process."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import torch
from torch import nn

import trireme
from trireme.errors import ConfigurationError
from trireme.loops.distributed_optimizer import DistributedOptimizer
from trireme.session.checkpoint import list_checkpoints


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
    with pytest.raises(SystemExit, match="130"):
        optimizer.close()
    optimizer.close()
    assert saved(tmp_path) == [f"step-{optimizer.global_step:09d}-writer-1"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_step_after_the_end_says_what_to_do_and_loses_nothing(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path, max_steps=3)
    with pytest.raises(ConfigurationError, match=r"ended at step 3: .*should_stop\(\)"):
        for _ in range(5):
            step(model, optimizer)
    assert saved(tmp_path) == ["step-000000003-writer-1"]
    optimizer.close()


def test_what_is_left_of_the_last_iteration_makes_no_update(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path, max_steps=5)
    while not optimizer.should_stop():
        step(model, optimizer)
        step(model, optimizer)
    optimizer.close()
    assert optimizer.global_step == 5
    assert saved(tmp_path) == ["step-000000005-writer-1"]


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


def test_loading_a_state_keeps_the_groups_that_the_job_and_schedulers_have() -> None:
    """Wrappers such as Accelerate's load what `state_dict` returned before the first step."""
    model, optimizer = make()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    groups = optimizer.param_groups
    changed = optimizer.state_dict()
    changed["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(changed)
    assert optimizer.param_groups is groups and groups[0]["lr"] == 0.25
    before = {name: value.clone() for name, value in model.state_dict().items()}
    step(model, optimizer)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.detach(), before[name] - 0.25 * parameter.grad)
    scheduler.step()
    assert groups[0]["lr"] == 0.125 == optimizer.worker.setup.optimizer.param_groups[0]["lr"]
    optimizer.close()


def test_a_state_is_loaded_where_this_process_holds_it() -> None:
    model = nn.Linear(3, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = trireme.distribute(model, sgd)
    step(model, optimizer)
    saved_state = optimizer.state_dict()
    kept = saved_state["state"][0]["momentum_buffer"].clone()
    step(model, optimizer)
    optimizer.load_state_dict({**saved_state, "state": {0: {"momentum_buffer": kept}}})
    (weight, _) = model.parameters()
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], kept)
    assert optimizer.state is sgd.state
    optimizer.close()


def test_a_state_is_refused_where_servers_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = make()
    settings = optimizer.worker.setup.settings
    task = msgspec.structs.replace(settings.task, servers=1)
    served = replace(optimizer.worker.setup, settings=replace(settings, task=task))
    monkeypatch.setattr(optimizer.worker, "setup", served)
    with pytest.raises(ConfigurationError, match="parameter servers run this optimizer"):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {0: {}}})
    with mock.patch.object(optimizer.worker.progress, "warn") as warn:
        optimizer.load_state_dict(optimizer.state_dict())  # before the first step: nothing is lost
        warn.assert_not_called()
        step(model, optimizer)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
    assert "such as momentum, and keep it: only hyper-parameters are loaded" in warn.call_args[0][0]
    monkeypatch.undo()
    optimizer.close()


def test_groups_may_be_added() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    sgd = torch.optim.SGD(model[1].parameters(), lr=0.1)
    optimizer = trireme.distribute(model, sgd)
    step(model, optimizer)
    before = model[0].weight.detach().clone()
    optimizer.add_param_group({"params": model[0].parameters()})
    step(model, optimizer)
    assert not torch.equal(before, model[0].weight)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    optimizer.close()


def test_hooks_of_an_optimizers_step_are_called() -> None:
    model, optimizer = make()
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    step(model, optimizer)
    assert called == ["before", "after"]
    optimizer.close()


PROGRAM = """
import torch, trireme
model = torch.nn.Linear(3, 2)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = trireme.distribute(model, sgd, run_dir="run")
model(torch.ones(4, 3)).square().mean().backward()
optimizer.step()
"""


@pytest.mark.slow
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
    assert saved(tmp_path / "run") == ["step-000000001-writer-1"]


FILLED = """
import sys, torch, trireme

model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = trireme.distribute(model, optimizer, run_dir=sys.argv[1])
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(4, 3)).square().mean().backward()
    optimizer.step()
model.weight = torch.nn.Parameter(torch.ones(2, 3))
"""


def test_what_fails_at_exit_is_told_in_one_line_and_in_the_status(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(FILLED)
    ended = subprocess.run(
        [sys.executable, "loop.py", "run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 2
    assert "error: the program has put another parameter in the place of 'weight'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("follows", [False, True])
def test_a_loop_that_is_not_restored_is_told_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], follows: bool
) -> None:
    for _ in range(2):
        model, optimizer = make(tmp_path)
        steps = range(optimizer.loop_steps, 4) if follows else range(2)
        for _ in steps:
            step(model, optimizer)
        told = capfd.readouterr()
        optimizer.close()
    assert ("the job goes on at step 2, and this loop at its beginning" in told.out) != follows
