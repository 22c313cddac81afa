"""Views: the coordinator's numbered, immutable lists of the job's members."""

from __future__ import annotations

import msgspec

from trireme.wire.message import Index, Name, Number

_VIEWS_OF_TERM = 1 << 32  # at most: so a view's number determines its term


def first_view(term: int) -> int:
    """Returns the number of the first view that a coordinator makes in a term, from 1 on."""
    return (term - 1) * _VIEWS_OF_TERM + 1


class ServerEntry(msgspec.Struct, frozen=True, array_like=True):
    """One parameter server of a view; its incarnation grows with every new process."""

    index: Index
    incarnation: Number
    address: Name


class WorkerEntry(msgspec.Struct, frozen=True, array_like=True):
    """One live worker of a view."""

    index: Index
    incarnation: Number


class ShardEntry(msgspec.Struct, frozen=True, array_like=True):
    """One shard of a view: the slots [start, stop) of the flat vectors, and who holds them.

    Attributes:
        primary: the server that takes the workers' requests.
        backups: the servers that confirm every update before anybody hears of it.
        joining: the servers that receive a copy; backups from the view after `CaughtUp` on.
    """

    start: Number
    stop: Number
    primary: Index
    backups: tuple[Index, ...] = ()
    joining: tuple[Index, ...] = ()

    @property
    def copies(self) -> tuple[int, ...]:
        """The servers that hold all of it: the primary first."""
        return (self.primary, *self.backups)


class View(msgspec.Struct, frozen=True, array_like=True):
    """The members of a job, from one change of membership to the next.

    Attributes:
        number: grows with every change, over the terms of the coordinator; in each push and pull.
        servers, workers: the live ones, by index. Indices may be missing.
        shards: the shards, in the order of their slots.
        generation: the number of this division into shards; grows with each reconfiguration.
        next_shards: the shards of the next generation while a reconfiguration is under way.
        life: how many times the job went back to a checkpoint, as all copies of a shard were lost.
        saved: the last step, once the chief has saved it. A worker that came back late may have
            made further steps, and then has them saved too.
    """

    number: Number
    servers: tuple[ServerEntry, ...]
    workers: tuple[WorkerEntry, ...]
    shards: tuple[ShardEntry, ...] = ()
    generation: Number = 1
    next_shards: tuple[ShardEntry, ...] = ()
    life: Number = 0
    saved: Number | None = None

    @property
    def chief(self) -> int | None:
        """The index of the chief: the live worker with the lowest index; None without workers."""
        return self.workers[0].index if self.workers else None

    @property
    def bounds(self) -> tuple[int, ...]:
        """The slots at which shards begin, and the number of slots."""
        return (*(shard.start for shard in self.shards), self.shards[-1].stop)

    def has_saved(self, step: int) -> bool:
        """Returns whether a chief has saved a step, or a later one, as the last."""
        return self.saved is not None and self.saved >= step

    def primary(self, shard: int) -> int:
        """Returns the server with the primary of a shard: without shards, that of its index."""
        return self.shards[shard].primary if self.shards else shard

    def primary_name(self, shard: int) -> str:
        return f"ps:{self.primary(shard)}"

    def server(self, index: int) -> ServerEntry | None:
        return next((entry for entry in self.servers if entry.index == index), None)


class LastChief:
    """Decides for one worker, after its last update, whether it saves the job's last step.

    The chief does. If it is lost before it has, the live worker with the lowest index takes over,
    until it has saved or a worker with a lower index is back. Further steps, of a worker that came
    back when the others had ended, are saved once more.
    """

    def __init__(self, worker: int) -> None:
        self.saves: bool | None = None  # None until its last update
        self._worker = worker

    def settle(self, is_chief: bool) -> None:
        """Settles whether this worker saves, before a chief may save and leave."""
        if self.saves is None:
            self.saves = is_chief

    def reopen(self) -> None:
        """Lets the chief be another worker again, as training goes on."""
        self.saves = None

    def awaits(self, view: View | None, step: int) -> bool:
        """Returns whether another worker is to save the last step, and has not yet."""
        return self.saves is False and view is not None and not view.has_saved(step)

    def follow(self, view: View | None, step: int) -> bool:
        """Takes over from a lost chief or hands over; returns whether `saves` has changed."""
        before = self.saves
        if before is None or view is None or view.has_saved(step):
            return False
        self.saves = view.chief == self._worker
        return self.saves != before
