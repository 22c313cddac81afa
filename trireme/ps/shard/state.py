"""The state of one shard, which its parts share."""

from __future__ import annotations

from collections import Counter

from trireme.ps.layout import Layout
from trireme.ps.rule import Rule
from trireme.ps.shard.dedup import PushTable
from trireme.ps.shard.example_ledgers import ExampleLedgers
from trireme.ps.shard.model_agreement import ShownModel
from trireme.ps.shard.participants import Participants
from trireme.ps.shard.snapshot_barrier import SnapshotBarrier
from trireme.ps.shard.values.parameters import Values
from trireme.ps.termination import Ending

__all__ = ["ShardState"]


class ShardState:
    """The state of one shard.

    Args:
        server: the server's index.

    Attributes:
        server: the same.
        step: the global step of the values.
        loaded: whether values are loaded.
        shown: what the first worker has shown; None before.
        rule: the rule of what was shown.
        synchronous: whether the rule is synchronous; read several times a push.
        values: the values; None before a worker has shown its model.
        counters: how many pushes had each verdict, and other counts.
        participants: the workers of the newest view.
        table: the exactly-once table.
        ending: decides when the job ends.
        examples: the ledgers of the data sets.
        barrier: holds decisions back during a consistent cut.
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
        self.examples = ExampleLedgers()
        self.barrier = SnapshotBarrier()

    @property
    def layout(self) -> Layout | None:
        """The model's layout; None before the first worker has shown it."""
        return None if self.shown is None else self.shown.layout
