"""What a task's configuration says of the task."""

from __future__ import annotations

import pytest

from trireme.job_config import JobConfig
from trireme.launch.config.task_config import TaskConfig


@pytest.mark.parametrize(
    ("asked", "number", "port"), [(None, 1, None), (0, 1, 0), (9400, 0, 9400), (9400, 2, 9402)]
)
def test_metrics_are_served_where_they_are_asked_for(
    asked: int | None, number: int, port: int | None
) -> None:
    task = TaskConfig(job="j", number=number, config=JobConfig(metrics_port=asked))
    assert task.scrape_port == port
