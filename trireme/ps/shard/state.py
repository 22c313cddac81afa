"""The state of one shard, which its parts share."""

from __future__ import annotations

from collections import Counter

from trireme.ps.layout import Layout
from trireme.ps.rule import Rule
from trireme.ps.shard.dedup import PushTable
from trireme.ps.shard.example_ledgers import ExampleBook
from trireme.ps.shard.model_agreement import ShownModel
from trireme.ps.shard.participants import Participants
from trireme.ps.shard.snapshot_barrier import SnapshotBarrier
from trireme.ps.shard.values.parameters import Values
from trireme.ps.termination import Ending

__all__ = ["ShardState"]


class ShardState:
    """What one server holds and knows.

    Args:
        server: the server's index.

    Attributes:
        server: the same.
        step: the global step of the values.
        loaded: whether values are loaded.
        shown: what the first worker has shown; None before.
        rule: the shown one.
        synchronous: whether the rule is; asked several times a push.
        values: the values; None before a worker has shown its model.
        counters: how often each verdict was given, and the like.
        participants: the workers of the newest view.
        table: the exactly-once table.
        ending: when the job ends.
        examples: the ledgers of the data sets.
        barrier: what a consistent cut holds back.
    """

    def __init__(self, server: int) -> None:
        self.server = server
        self.step = 0
        self.loaded = False
        self.shown: ShownModel | None = None
        self.rule = Rule()
        self.synchronous = False
        self.values: Values | None = None
        self.counters: Counter[str] = Counter()
        self.participants = Participants()
        self.table = PushTable()
        self.ending = Ending(decides=server == 0)
        self.examples = ExampleBook()
        self.barrier = SnapshotBarrier()

    @property
    def layout(self) -> Layout | None:
        """What lies where; None before the first worker has shown its model."""
        return None if self.shown is None else self.shown.layout
