"""Programs that go on where a job cannot: each is told what to do, and nothing waits or hangs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.integration.shell import Shell

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

FOLDS = """
import torch, trireme
for fold in range(2):
    model = torch.nn.Linear(2, 1)
    session = trireme.Session(
        model, torch.nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), max_steps=4
    )
    with session:
        while not session.should_stop():
            session.step((torch.ones(4, 2), torch.ones(4, 1)))
    print("fold", fold, "is over")
"""
LOOPS = """
import torch, trireme
for fold in range(2):
    model = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = trireme.distribute(model, sgd, max_steps=4)
    while not optimizer.should_stop():
        optimizer.zero_grad()
        model(torch.ones(4, 2)).square().sum().backward()
        optimizer.step()
    optimizer.close()
    print("fold", fold, "is over")
"""
FAKES = """
import pathlib, sys, time, torch, trireme
nets = {"g": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
        "d": torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))}
sgds = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
steps = trireme.distribute(nets, sgds)
made = pathlib.Path("made")
if steps["g"].replica:
    nets["d"](nets["g"](torch.ones(4, 2))).sum().backward()
    steps["g"].step()
    made.touch()
else:
    fake = nets["g"](torch.ones(4, 2))
    while not made.exists():
        time.sleep(0.01)
    nets["d"](fake.detach()).sum().backward()
    steps["d"].step()
    nets["d"](fake).sum().backward()
"""
CAUGHT = """
import torch, trireme
model = torch.nn.Linear(2, 1)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
session = trireme.Session(model, torch.nn.functional.mse_loss, sgd, max_steps=4)
with session:
    batch = (torch.ones(4, 2), torch.ones(4, 1))
    session.step(batch)
    session.optimizer.param_groups[0]["lr"] = float("inf")
    try:
        session.step(batch)
    except trireme.errors.Rejected as error:
        print("caught", error)
    session.optimizer.param_groups[0]["lr"] = 0.1
    session.step(batch)
"""


def ran(shell: Shell, tmp_path: Path, program: str, *words: object) -> tuple[int, str]:
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    ended = shell.run("run", *words, "program.py")
    return ended.status, ended.text


@pytest.mark.thorough(but=("ps",))
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (FOLDS, ("--ps", 1, "--workers", 2)),
        (LOOPS, ("--workers", 2)),
        (FOLDS, ("--workers", 1, "--run-dir", "run")),
    ],
    ids=["ps", "allreduce", "a run directory"],
)
def test_a_second_part_in_a_job_is_refused(
    shell: Shell, tmp_path: Path, program: str, words: tuple[object, ...]
) -> None:
    status, text = ran(shell, tmp_path, program, *words)
    assert status == 2, text
    assert "fold 0 is over" in text and "fold 1 is over" not in text
    assert "worker:0 has left its job" in text or "worker:1 has left its job" in text
    assert "trireme.run(function, ...)" in text


@pytest.mark.thorough
def test_one_process_may_take_part_in_one_job_after_the_other(shell: Shell, tmp_path: Path) -> None:
    status, text = ran(shell, tmp_path, FOLDS, "--workers", 1)
    assert status == 0 and "fold 1 is over" in text


@pytest.mark.thorough
def test_a_fake_batch_that_others_steps_have_made_old_is_told_with_what_to_do(
    shell: Shell, tmp_path: Path
) -> None:
    status, text = ran(shell, tmp_path, FAKES, "--ps", 1, "--workers", 2)
    assert status != 0
    assert "brought other values than it was computed from" in text
    assert "fake = generator(noise)" in text


@pytest.mark.thorough
def test_a_step_after_a_rejected_one_says_that_there_is_none(shell: Shell, tmp_path: Path) -> None:
    status, text = ran(shell, tmp_path, CAUGHT, "--ps", 1, "--workers", 1)
    assert status != 0 and "caught" in text
    assert "worker:0 makes no more steps, as one has failed" in text
    assert "KeyError" not in text
