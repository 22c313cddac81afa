"""The curves of a worker, with a job that only says how things are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.session.worker.test_recorder import worker_of
from trireme.dashboards.recording import Curves
from trireme.launch.config.task_config import TaskConfig
from trireme.ps.messages import Applied
from trireme.session.result import StepResult
from trireme.session.worker.recorder import Recorder


def test_who_becomes_chief_tells_the_bytes_of_its_steps_since_the_last_record(
    tmp_path: Path,
) -> None:
    worker = worker_of(TaskConfig(job="j", index=1, workers=2, servers=1), tmp_path)
    curves = worker.observers["curves"] = Curves(worker)
    recorder = Recorder(worker)
    logged: list[dict[str, Any]] = []
    curves.log = lambda values, run, step: logged.append(dict(values))
    for step in range(1, 121):
        worker.lifecycle.is_chief = step > 100
        worker.global_step = step
        worker.backend.bytes_sent += 500
        worker.backend.bytes_received += 700
        result = StepResult(torch.tensor(1.0), [], {}, 10)
        result.verdict, result.steps, result.global_step = Applied(step), 1, step
        recorder.step(result, 0.0, 0.125)
    recorder.close()
    assert [values["speed/compute_seconds"] for values in logged] == [0.125, 0.125]
    assert [values["speed/push_seconds"] for values in logged] == [0.0, 0.0]
    assert [values["bytes/pushed_per_step"] for values in logged] == [500, 500]
    assert [values["bytes/pulled_per_step"] for values in logged] == [700, 700]
    assert logged[-1]["updates/applied_total"] == 120
