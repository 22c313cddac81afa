"""Records what the processes that hold one model compute, and when: for pictures of a schedule."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from trireme.monitor.stage_operation import StageOperation
from trireme.session.model.process_group import ProcessGroup


class OperationLog:
    """The operations of this process, while they are recorded.

    Attributes:
        operations: what has been recorded; None while nothing is. What computes appends to it.
        graph: the graph that is computed, placed on devices; None for the stages of a pipeline, and
            before the first step.
    """

    graph: Any = None

    def __init__(self, process_group: ProcessGroup) -> None:
        self._members = process_group
        self.operations: list[StageOperation] | None = None
        self._readers = 0

    @property
    def about(self) -> str:
        """A short description of the schedule."""
        return ""

    def begin(self) -> int:
        """Begins to record; returns the mark to give to `end`. Several readers may record."""
        if self.operations is None:
            self.operations = []
        self._readers += 1
        return len(self.operations)

    def end(self, mark: int) -> list[StageOperation]:
        """Returns what was recorded since `begin`; the last reader's ends recording."""
        found = (self.operations or [])[mark:]
        self._readers -= 1
        if not self._readers:
            self.operations = None
        return found

    def gather(
        self, operations: Sequence[StageOperation], step: int, deadline: float
    ) -> list[StageOperation]:
        """Returns the operations of all processes of the chief's replica; empty elsewhere."""
        process_group = self._members
        process_group.put(
            f"work/{step}/{process_group.rank}", msgspec.msgpack.encode(list(operations))
        )
        found: list[StageOperation] = []
        for rank in process_group.part_leaders() if process_group.is_chief else ():
            while (data := process_group.get(f"work/{step}/{rank}")) is None:
                if time.monotonic() > deadline:
                    return []
                time.sleep(0.01)
            found += msgspec.msgpack.decode(data, type=list[StageOperation])
        return found
