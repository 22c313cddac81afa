"""What another launcher says of a process, and the task that this makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from trireme.environments.by_hand import manual_task, task_options
from trireme.environments.cluster import ClusterTask
from trireme.errors import ConfigurationError
from trireme.launch.config.sources import read_config, read_file
from trireme.launch.config.task_config import TaskConfig, fresh_job


@dataclass(frozen=True, slots=True)
class Launched:
    """A process that another launcher started."""

    by: str  # the launcher's name, for messages
    # one of a group that holds a model, without options; or a task of a cluster with servers
    task: TaskConfig | ClusterTask
    options: Mapping[str, str | None] = field(default_factory=dict)  # that the launcher gave


def task_of(launched: Launched, environ: Mapping[str, str], directory: Path | None) -> TaskConfig:
    """Returns the task of a process, with the options of its job."""
    file = read_file(None, directory)
    if isinstance(launched.task, ClusterTask):
        config = read_config(launched.options, environ, file, task_options())
        return manual_task(launched.task, config, environ)
    config, task = read_config(launched.options, environ, file), launched.task
    if config.tasks.ps:
        raise ConfigurationError(
            f"ps is {config.tasks.ps} ({config.origin('ps')}), and {launched.by} starts "
            "workers alone: start a job with parameter servers by `trireme run` or `trireme task`, "
            "or leave ps out"
        )
    config = config.replaced(launched.by, workers=task.workers)
    config.check_together(0)
    return msgspec.structs.replace(
        task,
        job=task.job or fresh_job(),
        config=config,
        # All processes write to one terminal or file, without their names before the lines.
        display="none" if task.group.rank else "plain",
    )
