"""What a worker counts of itself, with a supervisor that only says how things are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from trireme.launch.task_config import TaskConfig
from trireme.ps.messages import Applied
from trireme.session.options import Options
from trireme.session.progress import SilentProgress
from trireme.session.recorder import Recorder
from trireme.session.result import StepResult
from trireme.session.supervisor import Exchange


def supervisor(task: TaskConfig) -> Any:
    """A worker of a job with a server, not its chief yet."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    return SimpleNamespace(
        task=task,
        global_step=0,
        is_chief=False,
        together=False,
        state="training",
        bytes_pushed=0,
        bytes_pulled=0,
        exchange=Exchange(),
        optimizer=torch.optim.SGD([parameter], lr=0.1),
        buffers=SimpleNamespace(share=lambda: None),
        storage=SimpleNamespace(saved=0, failed=0),
        mean=lambda values, counts: dict(values),
        lags=dict,
        report=lambda status: None,
    )


def test_who_becomes_chief_tells_the_bytes_of_its_steps_since_the_last_record(
    tmp_path: Path,
) -> None:
    worker = supervisor(TaskConfig(job="j", index=1, workers=2, servers=1))
    recorder = Recorder(worker, SilentProgress(), tmp_path, Options(log_every=10), 1, None)
    logged: list[dict[str, Any]] = []
    recorder.log = lambda values, run: logged.append(dict(values))  # type: ignore[method-assign]
    for step in range(1, 121):
        worker.is_chief = step > 100
        worker.global_step = step
        worker.bytes_pushed += 500
        worker.bytes_pulled += 700
        result = StepResult(torch.tensor(1.0), [], {}, 10)
        result.verdict, result.steps, result.global_step = Applied(step), 1, step
        recorder.step(result, 0.0, 0.0)
    recorder.close()
    assert [values["bytes/pushed_per_step"] for values in logged] == [500, 500]
    assert [values["bytes/pulled_per_step"] for values in logged] == [700, 700]
    assert logged[-1]["updates/applied_total"] == 120
