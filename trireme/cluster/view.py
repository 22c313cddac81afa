"""Views: the coordinator's numbered, immutable lists of the job's members."""

from __future__ import annotations

import msgspec

from trireme.wire.message import Index, Name, Number

VIEWS_OF_TERM = 1 << 32
"""How many views one term of the coordinator may make. So a view's number determines its term."""


def first_view(term: int) -> int:
    """Returns the number of the first view that a coordinator makes in a term, from 1 on."""
    return (term - 1) * VIEWS_OF_TERM + 1


def term_of(number: int) -> int:
    """Returns the coordinator's term in which the view with a number was made."""
    return (number - 1) // VIEWS_OF_TERM + 1


class ServerEntry(msgspec.Struct, frozen=True, array_like=True):
    """One parameter server of a view.

    Attributes:
        index: the server's task index.
        incarnation: the number of this start of the task; grows by one with every new process.
        address: the address at which it listens, with its scheme, such as `tcp://127.0.0.1:2222`.
    """

    index: Index
    incarnation: Number
    address: Name


class WorkerEntry(msgspec.Struct, frozen=True, array_like=True):
    """One live worker of a view.

    Attributes:
        index: the worker's task index.
        incarnation: the number of this start of the task; grows by one with every new process.
    """

    index: Index
    incarnation: Number


class ShardEntry(msgspec.Struct, frozen=True, array_like=True):
    """One shard of a view: a contiguous run of slots, and the servers that hold copies of it.

    Attributes:
        start, stop: the slots [start, stop) of the flat vectors.
        primary: the index of the server that takes the workers' requests.
        backups: the servers that confirm every update before anybody hears of it.
        joining: the servers that receive a copy, and are not counted on yet.
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
        number: 1 for the first view of a job, then one more with every change. Every request to a
            parameter server carries it. A coordinator that is started again within a job
            continues with numbers above those of its last term: see `term_of`.
        servers: the live parameter servers, by index. Indices may be missing.
        workers: the live workers that still train, by index.
        shards: the shards, in the order of their slots.
        generation: the number of this division of the slots into shards. It grows by one with each
            reconfiguration.
        next_shards: the shards of the next generation while a reconfiguration is under way; else
            empty.
        life: how many times the job was rolled back to a checkpoint, because all copies of a shard
            were lost.
        saved: the last step, once the chief has saved it; None before. A worker that came back late
            may have made further steps, and then has them saved too.
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

    @property
    def copies(self) -> int:
        """How many servers hold the shard that the fewest hold."""
        return min((len(shard.copies) for shard in self.shards), default=1)

    def has_saved(self, step: int) -> bool:
        """Returns whether a chief has saved a step, or a later one, as the last."""
        return self.saved is not None and self.saved >= step

    def primary(self, shard: int) -> int:
        """Returns the index of the server with the primary of a shard.

        Where no shards are named, each server has the one of its index.
        """
        return self.shards[shard].primary if self.shards else shard

    def primary_name(self, shard: int) -> str:
        """Returns the name of the server with the primary of a shard; see `primary`."""
        return f"ps:{self.primary(shard)}"

    def server(self, index: int) -> ServerEntry | None:
        """Returns a server's entry; None if it is not a member."""
        return next((entry for entry in self.servers if entry.index == index), None)


class LastChief:
    """Decides for one worker, after its last update, whether it saves the job's last step.

    The worker that is chief then saves it. If that worker is lost before it has, the live worker
    with the lowest index takes over, until it has saved or a worker with a lower index is back.
    Nobody takes over from a chief that has saved. A worker that came back when the others had ended
    may have made further steps: these are saved once more.

    Args:
        worker: the index of this worker.

    Attributes:
        saves: whether this worker saves the last step; None until its last update.
    """

    def __init__(self, worker: int) -> None:
        self.saves: bool | None = None
        self._worker = worker

    def settle(self, is_chief: bool) -> None:
        """Settles whether this worker saves, before a chief may save and leave."""
        if self.saves is None:
            self.saves = is_chief

    def reopen(self) -> None:
        """Lets the chief be another worker again, as training goes on."""
        self.saves = None

    def awaits(self, view: View | None, step: int) -> bool:
        """Returns whether another worker is to save the last step, and has not yet.

        Args:
            view: the newest view; None where there is no coordinator.
            step: the last step, as far as this worker knows.
        """
        return self.saves is False and view is not None and not view.has_saved(step)

    def follow(self, view: View | None, step: int) -> bool:
        """Takes over from a chief that is lost; hands over to one that came back.

        Args:
            view: the newest view; None where there is no coordinator.
            step: the last step, as far as this worker knows.

        Returns:
            Whether this worker saves now and did not before, or the other way round.
        """
        before = self.saves
        if before is None or view is None or view.has_saved(step):
            return False
        self.saves = view.chief == self._worker
        return self.saves != before
