from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import trireme
from trireme.cli import main
from trireme.verification.record import Run
from trireme.verification.recorder import Hook
from trireme.verification.verdict import (
    Comparison,
    Difference,
    Verdict,
    described,
    exit_status,
    page,
)

FOUND = Comparison(
    (1, 2), Difference(2, "values", "net.0.weight", 1.0, 2.0, 0.5, 1e-6), {1: 0.0, 2: 0.25}, 1e-6
)
DIFFERS = Verdict("sync, workers=2", "differs", reason="<because>", comparison=FOUND)
SAME = Verdict("fsdp", "same", comparison=Comparison((1, 2), None, {1: 0.0, 2: 1e-9}, 1e-6))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "name the program to verify"),
        (
            ("--steps", "0", "PROGRAM"),
            "steps is '0' (command line): it must be a whole number from 1",
        ),
        (("--stop-at", "20", "PROGRAM"), "stop-at is 20: it must be below steps, 20"),
        (
            ("--strategies", "sync", "PROGRAM"),
            "strategies is 'sync' (command line): it must be all",
        ),
        (
            ("--tolerance", "much", "PROGRAM"),
            "tolerance is 'much' (command line): it must be a number above 0 and below 1",
        ),
        (("--tolerance", "nan", "PROGRAM"), "tolerance is 'nan'"),
        (("--workers", "0", "PROGRAM"), "workers is '0'"),
        (("--json", "missing/x.json", "PROGRAM"), "missing/x.json cannot be written"),
        (("--html", "missing/x.html", "PROGRAM"), "missing/x.html cannot be written"),
        (("missing.py",), "there is no program missing.py"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "program.py"
    program.touch()
    given = [str(program) if each == "PROGRAM" else each for each in arguments]
    assert main(["verify", *given]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_exit_status() -> None:
    refused, failed, apart = (Verdict("x", o) for o in ("refused", "failed", "apart"))
    assert exit_status([SAME, apart, refused]) == 0
    assert exit_status([SAME, failed]) == 3
    assert exit_status([refused]) == 3
    assert exit_status([DIFFERS, failed]) == 1


def test_a_verdict_in_words() -> None:
    assert list(DIFFERS.lines()) == [
        "sync, workers=2: DIFFERS from one process",
        "  first: step 2, values net.0.weight (2.5e-01 of its movement apart; 5.0e-07 is allowed)",
        "  why: <because>",
        "  values at the end: 2.5e-01 apart, relative to how far training has moved them; "
        "tolerance of gradients 1.0e-06",
    ]
    assert next(SAME.lines()) == "fsdp: the same as one process, in 2 steps"
    assert "NaN or infinite" in described(Difference(1, "buffers", "b", 1, 1, math.inf, 1e-6))


@pytest.mark.parametrize("far", [math.nan, math.inf, 0.0])
def test_the_page_has_every_curve(far: float) -> None:
    curve = Comparison((1, 2), None, {1: 1e-3, 2: far}, 1e-6)
    text = page("train.py", [Verdict("fsdp", "same", comparison=curve)])
    assert text.count("<polyline") == 1
    assert "nan," not in text


def test_the_page_needs_no_network_and_trusts_no_text() -> None:
    text = page("train.py --name <b>", [DIFFERS, SAME, Verdict("graph", "refused", reason="no")])
    assert "&lt;because&gt;" in text
    assert "&lt;b&gt;" in text
    assert text.count("<polyline") == 2
    assert "http" not in text


def test_options_of_the_call_are_checked() -> None:
    wrong: list[dict[str, Any]] = [
        *[{"steps": each} for each in (0, 2.5, "many")],
        *[{"stop_at": each} for each in (30, 0)],
        *[{"tolerance": each} for each in (0.0, 1.5, math.nan)],
        {"worker": 2},
    ]
    for options in wrong:
        with pytest.raises(trireme.ConfigurationError):
            trireme.verify("program.py", **options)


def test_the_call_is_refused_on_another_thread() -> None:
    raised: list[BaseException] = []

    def call() -> None:
        try:
            trireme.verify("program.py")
        except trireme.ConfigurationError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (
            "worker:1 | ValueError: x\ntrireme: the job failed after 9.8 s. First worker:1 failed: "
            "ValueError: x (bad.py:7)\ntrireme:   its traceback is in /tmp/gone.log",
            "worker:1 failed: ValueError: x (bad.py:7)",
        ),
        ("error: such is the problem", "error: such is the problem"),
        ("", "it made no step"),
    ],
)
def test_why_a_run_has_failed(output: str, cause: str, tmp_path: Path) -> None:
    assert Run(tmp_path, output.splitlines()).cause() == cause


def test_what_a_job_warns_of_is_noted(tmp_path: Path) -> None:
    notes = Run(tmp_path, ["worker:0 | warning: the same batches"]).notes()
    assert notes == {"the job warns: the same batches"}


def test_a_model_with_hooks_is_copied_without_them() -> None:
    calls: list[object] = []
    model = nn.Linear(2, 2)
    model.register_forward_hook(Hook(lambda *given: calls.append(given)))
    copied = copy.deepcopy(model)
    copied(torch.ones(1, 2))
    assert not calls
    model(torch.ones(1, 2))
    assert len(calls) == 1


def train(rate: float) -> None:
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
    session = trireme.Session(
        lambda: nn.Linear(3, 1), nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=rate), max_steps=9
    )
    with session:
        for batch in session.loader(TensorDataset(x, x.sum(1, keepdim=True)), 4):
            session.step(batch)


@pytest.mark.processes
@pytest.mark.thorough
def test_a_function_is_verified() -> None:
    verdict = trireme.verify(train, args=(0.1,), workers=2, ps=1, strategy="sync", steps=3)
    assert verdict.outcome == "same", verdict
    assert verdict.comparison.steps == (1, 2, 3)


WAITS = """
import os, time, trireme, torch
model = torch.nn.Linear(1, 1)
optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
optimizer.close()
if optimizer.worker.task.trial.settings:
    open("reference", "w").write(str(os.getpid()))
    time.sleep(600)
"""


@pytest.mark.processes
@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_reference_and_removes_the_files(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(WAITS)
    command = subprocess.Popen(
        [sys.executable, "-m", "trireme", "verify", "--steps", "2", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "reference").exists() or not (tmp_path / "reference").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    command.send_signal(number)
    killed = number == signal.SIGKILL  # then no file is removed
    assert command.wait(60) == (-number if killed else 130)
    pid = int((tmp_path / "reference").read_text())
    while pid in psutil.pids():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert killed or not list(tmp_path.glob("trireme-verify-*"))


@pytest.mark.processes
@pytest.mark.thorough
def test_json_is_valid_where_numbers_are_not_finite(tmp_path: Path) -> None:
    program = WAITS.replace("torch.ones(1, 1)", "torch.full((1, 1), float('nan'))")
    (tmp_path / "program.py").write_text(program.partition("if optimizer.worker")[0])
    command = [sys.executable, "-m", "trireme", "verify", "--steps", "2", "--json", "-"]
    ended = subprocess.run(
        [*command, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout, parse_constant=lambda name: pytest.fail(name))
    assert found[0]["outcome"] == "same"
