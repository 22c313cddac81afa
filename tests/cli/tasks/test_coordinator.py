"""The coordinator on a thread of its launcher's process."""

from __future__ import annotations

import io
import threading

from tests.conformance import PATIENCE
from trireme.cli.tasks.coordinator import HostedCoordinator
from trireme.cluster.messages import CLUSTER_MESSAGES
from trireme.cluster.spec import OBSERVER
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.output import BackgroundConsole
from trireme.wire.connection import Connection
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.message import Catalog
from trireme.wire.transport import connect


class HeldTerminal(io.StringIO):
    """What a terminal is after Ctrl-S: a write to it lasts until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        self.written.set()
        self.released.wait(PATIENCE)
        return super().write(text)


def test_a_held_terminal_does_not_hold_the_coordinator() -> None:
    """Its tasks would take it for lost: it warns of strangers, whoever they are."""
    terminal = HeldTerminal()
    task = TaskConfig(
        job="job-1", role="coordinator", servers=1, secret="ab", listen="tcp://127.0.0.1:0"
    )
    console = BackgroundConsole(terminal, terminal, {})
    coordinator = HostedCoordinator(console, task, lambda: None)
    try:
        stranger = connect(coordinator.address, timeout=PATIENCE)
        stranger.write([bytes(64)])
        assert terminal.written.wait(PATIENCE)
        stream = connect(coordinator.address, timeout=PATIENCE)
        observer = Connection(stream, Catalog(CLUSTER_MESSAGES))
        identity = Identity("job-1", OBSERVER)
        authenticate(observer, identity, b"\xab", server="coordinator:0", timeout=PATIENCE / 2)
        observer.close()
        stranger.close()
    finally:
        terminal.released.set()
        coordinator.close()
        console.__exit__()
    assert "coordinator: closed the connection of" in terminal.getvalue()
