"""What a worker counts of itself, with a job that only says how things are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from trireme.launch.config.task_config import TaskConfig
from trireme.ps.messages import Applied
from trireme.session.observers.progress import Progress
from trireme.session.options import Options
from trireme.session.result import StepResult
from trireme.session.settings import Settings
from trireme.session.worker.recorder import Recorder
from trireme.session.worker.worker import UpdateTimes


def worker_of(task: TaskConfig, run_dir: Path) -> Any:
    """A worker of a job with a server, not its chief yet."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    return SimpleNamespace(
        task=task,
        setup=SimpleNamespace(
            settings=Settings(task, Options(log_every=10), run_dir),
            optimizer=optimizer,
            process_group=None,
        ),
        progress=Progress(),
        global_step=0,
        first_step=0,
        observers={},
        warn_as_chief=lambda text: None,
        lifecycle=SimpleNamespace(
            is_chief=False, servers=None, state="training", report=lambda status: None
        ),
        backend=SimpleNamespace(
            group=None, bytes_sent=0, bytes_received=0, mean=lambda values, counts: dict(values)
        ),
        update_times=UpdateTimes(),
        buffers=SimpleNamespace(publish=lambda: None),
        storage=SimpleNamespace(saved=0, failed=0, alarm="", submitted=None),
    )


def test_the_last_report_keeps_the_durations_of_the_last_step_that_was_reported(
    tmp_path: Path,
) -> None:
    worker = worker_of(TaskConfig(job="j", index=0, workers=1, servers=1), tmp_path)
    reported: list[dict[str, Any]] = []
    worker.lifecycle.report = lambda status: reported.append(dict(status))
    recorder = Recorder(worker)
    worker.update_times = UpdateTimes(2.0, 3.0, 3.0, 5.0)
    result = StepResult(torch.tensor(1.0), [], {}, 7)
    result.verdict, result.steps, result.global_step = Applied(1), 1, 1
    recorder.step(result, began=1.0, computed=2.0)  # the first step is reported at once
    recorder.training_ended()
    recorder.close()
    first, last = reported
    durations = {"compute_seconds": 1.0, "push_seconds": 1.0, "wait_seconds": 2.0}
    assert durations.items() <= first.items()
    assert durations.items() <= last.items()
    assert last["examples_per_second"] == first["examples_per_second"] > 0
