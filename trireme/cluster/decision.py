"""A decision of the membership: a new state, and instructions with a reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from trireme.cluster.messages import JobOver
from trireme.cluster.placement import Shards
from trireme.cluster.state import State, Task
from trireme.wire.message import Message


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on a connection; as the answer to a request, with its sequence."""

    connection: int
    message: Message
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection after earlier messages are sent. No `Closed` event needs to follow."""

    connection: int


Instruction = Send | Close


class Decision(NamedTuple):
    """The result of one event, or of several that came together.

    Attributes:
        state: the new state.
        instructions: what to do, in this order.
        reason: why, for the log, a line for each event; not empty where there are instructions.
    """

    state: State
    instructions: tuple[Instruction, ...]
    reason: str


class DecisionBuilder:
    """Builds one decision. It exists only during one `step`, and is the only mutable object.

    Attributes:
        now: the time of the event.
        state: the state so far.
        newcomers: the connections of tasks that have just joined and must be informed.
        shards: the shards of the newest view, as the event has changed them; () if it has not.
    """

    def __init__(self, now: float, state: State) -> None:
        self.now = now
        self.state = state
        self.newcomers: list[int] = []
        self.shards: Shards = ()
        self._instructions: list[Instruction] = []
        self._reasons: list[list[str]] = []  # by event

    def decision(self) -> Decision:
        """Returns the decision."""
        reason = "\n".join("; ".join(reasons) for reasons in self._reasons if reasons)
        return Decision(self.state, tuple(self._instructions), reason)

    def update_task(self, task: Task) -> None:
        """Replaces a task in the state."""
        self.state = replace(self.state, tasks={**self.state.tasks, task.name: task})

    def begin_event(self) -> None:
        """Notes that what follows is due to a further event: its reason is a line of its own."""
        self._reasons.append([])

    def add_reason(self, reason: str) -> None:
        """Adds to the decision's reason."""
        if not self._reasons:
            self.begin_event()
        self._reasons[-1].append(reason.replace("\n", " "))

    def send(self, connection: int, message: Message, sequence: int = 0) -> None:
        """Adds an instruction to send."""
        self._instructions.append(Send(connection, message, sequence))

    def close(self, connection: int) -> None:
        """Adds an instruction to close."""
        self._instructions.append(Close(connection))

    def broadcast(self, message: Message) -> None:
        """Adds instructions to send to every connected task."""
        for task in self.state.tasks.values():
            if task.connection is not None:
                self.send(task.connection, message)

    def end(self, over: JobOver) -> None:
        """Ends the job and informs every task. Does nothing if the job has ended already."""
        if self.state.over is not None:
            return
        self.state = replace(
            self.state, phase=over.outcome, reason=over.reason, over=over, over_since=self.now
        )
        self.newcomers.clear()
        self.add_reason(f"the job is over, {over.outcome}: {over.reason}")
        self.broadcast(over)
