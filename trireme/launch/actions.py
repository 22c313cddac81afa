"""The actions that a job's supervision asks its launcher to take."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Action", "Kill", "Notify", "Restart", "RestartAll", "Terminate"]


@dataclass(frozen=True, slots=True)
class Terminate:
    """Ask a task to end, with SIGTERM."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End a task and its children at once, with SIGKILL."""

    name: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Start a worker again. After that it may be started again `left` more times."""

    name: str
    left: int


@dataclass(frozen=True, slots=True)
class RestartAll:
    """Start the whole job again. All of its tasks have ended."""


@dataclass(frozen=True, slots=True)
class Notify:
    """Show a line to the user."""

    text: str


Action = Terminate | Kill | Restart | RestartAll | Notify
