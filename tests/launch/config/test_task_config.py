"""What a task's configuration says of the task."""

from __future__ import annotations

from typing import Literal

import pytest

from trireme.job_config import JobConfig
from trireme.launch.config.task_config import TaskConfig


@pytest.mark.parametrize(
    ("asked", "role", "port"),
    [(None, "ps", None), (0, "ps", 0), (9400, "coordinator", 9400), (9400, "ps", 9402)],
)
def test_metrics_are_served_where_they_are_asked_for(
    asked: int | None, role: Literal["coordinator", "ps"], port: int | None
) -> None:
    index = 1 if role == "ps" else 0
    config = JobConfig().replaced("a test", metrics_port=asked)
    task = TaskConfig(job="j", role=role, index=index, servers=2, config=config)
    assert task.scrape_port == port
