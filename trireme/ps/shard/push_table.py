"""The exactly-once table: the verdict on every push, by (worker, incarnation, sequence).

It changes together with the parameters and is part of every snapshot. A verdict is kept until the
worker acknowledges it, however long that takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from trireme.ps.extra import bytes_in
from trireme.ps.flat import PartBuffer
from trireme.ps.leader.decisions import PushId
from trireme.ps.messages import Applied, Push, RejectedVerdict, Stale, WorkerProgress
from trireme.ps.shard.participants import Participant

Decided = Applied | Stale | RejectedVerdict  # a verdict that decides a push: a repeat gets the same


class Pending(msgspec.Struct, eq=False):
    """A push whose update is not applied yet."""

    owner: Participant
    push: Push
    route: object  # where the answer goes; replaced when the worker comes back on a new connection
    gradients: PartBuffer  # the update; nobody writes to it until the answer is sent
    since: float  # when the push came, by the shard's clock
    # whether it was answered, though its update may still be applied: its worker is out of the job
    answered: bool = False

    @property
    def id(self) -> PushId:
        return *self.owner, self.push.sequence

    def kept(self) -> Pending:
        """Returns a copy that counts as answered and shares no memory with the worker."""
        extra = tuple(map(bytes, bytes_in(self.push.extra)))
        push = msgspec.structs.replace(self.push, extra=extra)
        gradients = self.gradients.copy()
        return msgspec.structs.replace(self, push=push, gradients=gradients, answered=True)


class WorkerRecord(msgspec.Struct, array_like=True):
    """One worker's line."""

    incarnation: int = 0  # the newest one seen
    sequence: int = 0  # the last decided push of that incarnation
    # what became of the pushes whose answers the worker may not have yet
    verdicts: dict[int, Decided] = msgspec.field(default_factory=dict)
    # counts over all incarnations
    applied: int = 0
    stale: int = 0


class PushTable:
    """Every worker's record."""

    def __init__(self) -> None:
        self.records: dict[int, WorkerRecord] = {}
        # the decided pushes of those that train by the leader's order, for the staleness bound
        self.clocks: dict[tuple[int, int], int] = {}

    def admit(self, worker: int, incarnation: int) -> WorkerRecord:
        """Returns the worker's record; a newer incarnation begins again at sequence 0."""
        record = self.records.setdefault(worker, WorkerRecord())
        if incarnation > record.incarnation:
            record.incarnation, record.sequence = incarnation, 0
            record.verdicts.clear()
        return record

    def count(self, members: Sequence[tuple[int, int]]) -> None:
        """Counts the pushes of these incarnations; a newcomer's from the slowest's on."""
        start = min([self.clocks[who] for who in members if who in self.clocks], default=0)
        self.clocks = {who: self.clocks.get(who, start) for who in members}

    def decide(self, owner: Participant, sequence: int, verdict: Decided) -> None:
        """Records the verdict on a push; of an incarnation that was replaced, only counts it."""
        record = self.records[owner.worker]
        record.applied += isinstance(verdict, Applied)
        record.stale += isinstance(verdict, Stale)
        if owner in self.clocks:
            self.clocks[owner] += 1
        if owner.incarnation != record.incarnation:
            return
        assert sequence == record.sequence + 1, (
            f"worker:{owner.worker}: push {sequence} decided after {record.sequence}"
        )
        record.sequence = sequence
        record.verdicts[sequence] = verdict

    def forget_acknowledged(self, worker: int, acknowledged: int) -> None:
        """Forgets the verdicts that a worker has acknowledged: those up to a sequence."""
        verdicts = self.records[worker].verdicts
        for sequence in [*verdicts]:
            if sequence <= acknowledged:
                del verdicts[sequence]

    def slowest(self) -> int:
        """Returns the lowest clock of the workers that train."""
        return min(self.clocks.values(), default=0)

    def export(self) -> tuple[WorkerProgress, ...]:
        return tuple(
            WorkerProgress(worker, each.incarnation, each.sequence, each.applied, each.stale)
            for worker, each in sorted(self.records.items())
        )

    def resume(self, records: Mapping[int, WorkerRecord]) -> None:
        """Goes on with copies of another table's records."""
        self.records = {
            worker: msgspec.structs.replace(each, verdicts=dict(each.verdicts))
            for worker, each in records.items()
        }

    def restore(self, rows: Iterable[WorkerProgress]) -> None:
        """Takes over the counts, not the sequence numbers: those were of other processes."""
        self.records = {
            row.worker: WorkerRecord(applied=row.applied, stale=row.stale) for row in rows
        }
