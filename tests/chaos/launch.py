"""`trireme` with its tasks on several hosts: `python -m tests.chaos.launch HOSTS.json run ...`.

Everything is as in `trireme run` on one host, but that each task is a process of a host of the
file, which are network namespaces of this machine, and listens at that host's address. Connections
between the hosts are encrypted with `--tls`, and plain without it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest import mock

import msgspec

from tests.faults.hosts import Host
from trireme.cli import main
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.local import HostEngine, task_command


class Hosts(msgspec.Struct):
    """The hosts of a job.

    Attributes:
        own: the address of the launcher's own host, where the coordinator is.
        hosts: the others; servers and workers are dealt to them by their index.
    """

    own: str
    hosts: list[Host]

    def of(self, role: str, index: int) -> Host | None:
        """Returns a task's host; None for the launcher's own."""
        return None if role == "coordinator" else self.hosts[index % len(self.hosts)]


def engine_on(hosts: Hosts) -> Callable[..., HostEngine]:
    """Returns a class of engines that start tasks on these hosts."""

    class SeveralHosts(HostEngine):
        def start(self, config: TaskConfig) -> None:
            host = hosts.of(config.role, config.index)

            def command(config: TaskConfig, program: Sequence[str]) -> Sequence[str]:
                words = task_command(config, program)
                return words if host is None else host.command(words)

            self._host = hosts.own if host is None else host.address
            self._build_command = command
            if host is not None:
                self.nodes[config.name] = host.name
            if not config.config.tls:
                options = config.config.replaced("hosts of a test", allow_plaintext=True)
                config = msgspec.structs.replace(config, config=options)
            super().start(config)

        def host(self, name: str) -> str:
            return self.nodes.get(name) or super().host(name)

    return SeveralHosts


if __name__ == "__main__":
    file, *words = sys.argv[1:]
    read = msgspec.json.decode(Path(file).read_bytes(), type=Hosts)
    with mock.patch("trireme.launch.local.HostEngine", engine_on(read)):
        sys.exit(main(words))
