"""`trireme` with its tasks on several hosts: `python -m tests.chaos.launch HOSTS.json run ...`.

Everything is as in `trireme run` on one host, but that each task is a process of a host of the
file, which are network namespaces of this machine, and listens at that host's address. Connections
between the hosts are encrypted with `--tls`, and plain without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from tests.faults.hosts import Host
from trireme.cli import main
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.launcher import Job
from trireme.launch.local import HostEngine, run_local, task_command
from trireme.launch.output import Console
from trireme.launch.run_directory import RunDirectory


class Hosts(msgspec.Struct):
    """The hosts of a job.

    Attributes:
        own: the address of the launcher's own host, where the coordinator is.
        hosts: the others; servers and workers are dealt to them by their index.
    """

    own: str
    hosts: list[Host]

    def of(self, index: int) -> Host:
        """Returns the host of a server or worker."""
        return self.hosts[index % len(self.hosts)]


def engine_on(hosts: Hosts) -> Callable[..., HostEngine]:
    """Returns a class of engines that start tasks on these hosts."""

    def command(config: TaskConfig, program: Sequence[str]) -> Sequence[str]:
        return hosts.of(config.index).command(task_command(config, program))

    class SeveralHosts(HostEngine):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.own_host = hosts.own
            self._build_command = command  # with one of its own no task is forked

        def start(self, config: TaskConfig) -> None:
            host = hosts.of(config.index)
            self._host = host.address
            self.nodes[config.name] = host.name
            super().start(config)

        def host(self, name: str) -> str:
            return self.nodes.get(name) or super().host(name)

    return SeveralHosts


def run_plainly(job: Job, directory: RunDirectory, console: Console) -> int:
    """As `run_local`, for a job that may do without TLS between hosts."""
    if not job.task.config.network.tls:
        options = job.task.config.replaced("hosts of a test", allow_plaintext=True)
        job = replace(job, task=msgspec.structs.replace(job.task, config=options))
    return run_local(job, directory, console)


if __name__ == "__main__":
    file, *words = sys.argv[1:]
    read = msgspec.json.decode(Path(file).read_bytes(), type=Hosts)
    with (
        mock.patch("trireme.launch.local.HostEngine", engine_on(read)),
        mock.patch("trireme.launch.local.run_local", run_plainly),
    ):
        sys.exit(main(words))
