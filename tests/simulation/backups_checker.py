"""Checks that backups have each verdict before a worker is sent it."""

from __future__ import annotations

from collections.abc import Sequence

from tests.simulation.dealing import Violation
from trireme.ps.messages import Applied, Duplicate, RejectedVerdict, Stale, Verdict
from trireme.ps.shard.push_table import PushTable
from trireme.wire.handshake import Identity


def check_verdict_at_backups(
    task: Identity, verdict: Verdict, tables: Sequence[PushTable | None]
) -> None:
    """Checks that all copies of a shard know a verdict, as a worker is told it.

    Args:
        task: the worker.
        verdict: the verdict that the worker is sent.
        tables: the exactly-once table of the server that tells it, and those of the backups that
            live and are of the same generation.

    Raises:
        Violation: a backup does not know it.
    """
    said = verdict.original if isinstance(verdict, Duplicate) else verdict
    if not isinstance(said, (Applied, Stale, RejectedVerdict)) or tables[0] is None:
        return
    record = tables[0].records.get(task.index)
    if record is None or record.incarnation != task.incarnation:
        return  # another process of the worker has come since
    sequence = next((number for number, each in record.verdicts.items() if each == said), 0)
    for table in tables[1:]:
        if table is None:
            continue
        copied = table.records.get(task.index)
        decided = (0, 0) if copied is None else (copied.incarnation, copied.sequence)
        if decided < (task.incarnation, sequence):
            raise Violation(f"{task.task} is told {said} of push {sequence}; not a backup")
