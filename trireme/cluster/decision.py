"""What the membership decides: instructions with a reason, and the draft they are gathered in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from trireme.cluster.messages import JobOver
from trireme.cluster.state import State, Task
from trireme.wire.message import Message

__all__ = ["Close", "Decision", "Draft", "Instruction", "Send"]


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message on a connection."""

    connection: int
    message: Message


@dataclass(frozen=True, slots=True)
class Close:
    """Close a connection, after what was sent on it. No `Closed` event needs to follow."""

    connection: int


Instruction = Send | Close


class Decision(NamedTuple):
    """What an event led to.

    Attributes:
        state: the new state.
        instructions: what to do, in this order.
        reason: why, for the log; never empty when there are instructions.
    """

    state: State
    instructions: tuple[Instruction, ...]
    reason: str


class Draft:
    """A decision in the making. It lives inside one `step` and is the only thing that changes.

    Attributes:
        now: the time of the event.
        state: the state so far.
        newcomer: the connection of a task that has just joined and must be told what it missed.
    """

    def __init__(self, now: float, state: State) -> None:
        self.now = now
        self.state = state
        self.newcomer: int | None = None
        self._instructions: list[Instruction] = []
        self._reasons: list[str] = []

    def decision(self) -> Decision:
        """Returns what has been gathered."""
        return Decision(self.state, tuple(self._instructions), "; ".join(self._reasons))

    def put(self, task: Task) -> None:
        """Replaces what is known of a task."""
        self.state = replace(self.state, tasks={**self.state.tasks, task.name: task})

    def because(self, reason: str) -> None:
        """Adds to the decision's reason."""
        self._reasons.append(reason)

    def send(self, connection: int, message: Message) -> None:
        """Adds an instruction to send."""
        self._instructions.append(Send(connection, message))

    def close(self, connection: int) -> None:
        """Adds an instruction to close."""
        self._instructions.append(Close(connection))

    def broadcast(self, message: Message) -> None:
        """Adds instructions to send to every connected task."""
        for task in self.state.tasks.values():
            if task.connection is not None:
                self.send(task.connection, message)

    def end(self, over: JobOver) -> None:
        """Ends the job and tells everybody, unless it has ended: the first reason is the one."""
        if self.state.over is not None:
            return
        self.state = replace(
            self.state, phase=over.outcome, reason=over.reason, over=over, over_since=self.now
        )
        self.newcomer = None
        self.because(f"the job is over, {over.outcome}: {over.reason}")
        self.broadcast(over)
