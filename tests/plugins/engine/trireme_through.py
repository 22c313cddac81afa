"""`--on through`: each task is started through a command, such as `ip netns exec HOST`."""

import shlex
from collections.abc import Sequence
from typing import Annotated

import msgspec

from trireme.errors import UsageError
from trireme.job_config import JobConfig, Option
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.engines import EngineType, engine_options
from trireme.launch.launcher import Job
from trireme.launch.output import Console
from trireme.launch.run_directory import RunDirectory


class ThroughOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options `--through-command` and `--through-hosts`."""

    command: Annotated[
        str, Option("COMMAND", "through: what starts each task; {host} is the task's host")
    ] = ""
    hosts: Annotated[
        str, Option("A,B,...", "through: the hosts, which the tasks take in turn (default one)")
    ] = "one"


def check(config: JobConfig) -> None:
    if not engine_options(config, ThroughOptions).command.strip():
        raise UsageError("--on through starts tasks through a command: give --through-command")


def run(job: Job, directory: RunDirectory, console: Console) -> int:
    from trireme.launch.local import run_local, task_command

    options = engine_options(job.task.config, ThroughOptions)
    hosts = options.hosts.split(",")

    def command(task: TaskConfig, program: Sequence[str]) -> Sequence[str]:
        host = hosts[task.number % len(hosts)]
        through = [word.replace("{host}", host) for word in shlex.split(options.command)]
        return [*through, *task_command(task, program)]

    return run_local(job, directory, console, command)


THROUGH = EngineType(
    "this host, through a command", "trireme_through:run", ThroughOptions, check, one_host=True
)
