"""A view: the coordinator's numbered, immutable answer to who takes part."""

from __future__ import annotations

import msgspec

from trireme.wire.message import Index, Name, Number

__all__ = ["VIEWS_OF_TERM", "ServerEntry", "View", "WorkerEntry", "first_view", "term_of"]

VIEWS_OF_TERM = 1 << 32
"""How many views one term of the coordinator may make: their numbers tell terms apart."""


def first_view(term: int) -> int:
    """Returns the number of the first view that a coordinator makes in a term, from 1 on."""
    return (term - 1) * VIEWS_OF_TERM + 1


def term_of(number: int) -> int:
    """Returns in which term of the coordinator the view of a number was made."""
    return (number - 1) // VIEWS_OF_TERM + 1


class ServerEntry(msgspec.Struct, frozen=True, array_like=True):
    """One parameter server of a view.

    Attributes:
        index: the server's task index.
        incarnation: which start of this task; grows by one with every new process.
        address: where it listens, with its scheme, such as `tcp://127.0.0.1:2222`.
    """

    index: Index
    incarnation: Number
    address: Name


class WorkerEntry(msgspec.Struct, frozen=True, array_like=True):
    """One live worker of a view.

    Attributes:
        index: the worker's task index.
        incarnation: which start of this task; grows by one with every new process.
    """

    index: Index
    incarnation: Number


class View(msgspec.Struct, frozen=True, array_like=True):
    """Who takes part, from one change of membership to the next.

    Attributes:
        number: 1 for the first view of a job, then one more with every change. Every request to
            a parameter server carries it. A coordinator that is started again within a job goes
            on at a number beyond all of its last term's: see `term_of`.
        servers: by index, lowest first.
        workers: the live ones that still train, by index, lowest first.
    """

    number: Number
    servers: tuple[ServerEntry, ...]
    workers: tuple[WorkerEntry, ...]

    @property
    def chief(self) -> int | None:
        """The index of the chief: the live worker with the lowest index; None without workers."""
        return self.workers[0].index if self.workers else None
