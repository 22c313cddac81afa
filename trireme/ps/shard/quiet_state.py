"""The quiet state of a shard: all that it knows but what is under way.

A shard is quiet when it has stopped at a common cut: no decision is half made. The state of a
generation's shards begins with the quiet state of the shards before. What was under way, pushes
that are not decided and answers that are withheld, is asked again by its workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from trireme.ps.leader.example_ledgers import ExamplesState
from trireme.ps.messages import GroupSpec, LayoutSpec, OptimizerSpec
from trireme.ps.rule import Rule
from trireme.ps.shard.push_table import RecordState
from trireme.ps.shard.state import ModelDescription, ShardState
from trireme.ps.shard.values.snapshot_tensors import Tensors
from trireme.ps.table_spec import TableSpec

if TYPE_CHECKING:
    from trireme.ps.tables import ShardTables


class QuietState(msgspec.Struct, frozen=True, array_like=True):
    """What is the same in every shard, but for `last` to `topics`, which are the leader's."""

    # of the model that was shown, with the present hyper-parameters
    task: str
    layout: LayoutSpec
    optimizer: OptimizerSpec
    rule: Rule
    step: int  # the global step of the values
    records: tuple[RecordState, ...]  # the exactly-once table
    retired: tuple[int, ...]  # the workers that train no more
    counters: dict[str, int]  # the counts
    last: int | None = None  # the job's last step; None for none
    under_way: tuple[int, ...] = ()  # the workers that compute an update
    examples: ExamplesState = ExamplesState()  # the ledgers of the data sets
    # the sizes of the bytes that workers share: (topic, worker, size)
    topics: tuple[tuple[str, int, int], ...] = ()
    tables: tuple[TableSpec, ...] = ()  # the sparse tables of the model

    @property
    def shown(self) -> ModelDescription:
        """The model that was shown, with the shards of then."""
        from trireme.ps.layout import Layout

        return ModelDescription(
            self.task, Layout(self.layout), self.optimizer, self.rule, self.tables
        )


class Quiet(msgspec.Struct, frozen=True):
    """A quiet state with its tensors."""

    state: QuietState  # the state
    tensors: Tensors  # the values, and the optimizer's state: live tensors of the shard
    topics: Sequence[torch.Tensor] = ()  # the bytes of the state's topics, in their order
    # the live tables of the shard, or of several; None where their rows come later
    tables: Sequence[ShardTables] | None = ()


def export(state: ShardState) -> Quiet | None:
    """Returns a shard's quiet state; None where no values are loaded."""
    shown, values = state.shown, state.values
    if not state.loaded or shown is None or values is None:
        return None
    leader = state.leader
    topics = [
        (topic, worker, data)
        for topic, left in (leader.topics if leader else {}).items()
        for worker, data in left.items()
    ]
    quiet = QuietState(
        task=shown.task,
        layout=shown.layout.spec,
        optimizer=with_hyper(shown.optimizer, state.hyper),
        rule=shown.rule,
        step=state.step,
        records=state.table.export_records(),
        retired=tuple(sorted(state.participants.retired)),
        counters=dict(state.counters),
        last=leader.ending.last if leader else None,
        under_way=tuple(sorted(leader.ending.under_way)) if leader else (),
        examples=leader.examples.export() if leader else ExamplesState(),
        topics=tuple((topic, worker, data.numel()) for topic, worker, data in topics),
        tables=shown.tables,
    )
    tables = () if state.tables is None else (state.tables,)
    return Quiet(quiet, values.live(state=True), [data for _, _, data in topics], tables)


def restore(state: ShardState, quiet: Quiet) -> None:
    """Gives a shard whose values and tables are there the rest of a quiet state."""
    before = quiet.state
    # A chief that finds other shards without values replaces these: its view is later than 1.
    state.step, state.loaded_in = before.step, 1
    state.table.resume(before.records)
    state.counters.update(before.counters)
    if (leader := state.leader) is not None:
        leader.loaded = True
        leader.ending.resume(before.last, before.under_way)
        leader.examples.resume(before.examples)
        for (topic, worker, _), data in zip(before.topics, quiet.topics, strict=True):
            leader.topics.setdefault(topic, {})[worker] = data


def with_hyper(optimizer: OptimizerSpec, hyper: Sequence[GroupSpec] | None) -> OptimizerSpec:
    """Returns an optimizer with its present hyper-parameters; None for those it began with."""
    if hyper is None:
        return optimizer
    groups = zip(optimizer.groups, hyper, strict=True)
    made = (GroupSpec(now.values, group.optimizer) for group, now in groups)
    return OptimizerSpec(optimizer.name, tuple(made))


def united(quiets: Sequence[Quiet]) -> Quiet:
    """Returns the quiet state of one shard that takes over slots of several.

    Args:
        quiets: the shards', in the order of their slots. They have stopped at one cut, so that all
            but the tensors, and what only shard 0 has, is the same.
    """
    tensors = [entry for quiet in quiets for entry in quiet.tensors]
    tables = [each for quiet in quiets for each in quiet.tables or ()]
    return Quiet(quiets[0].state, tensors, quiets[0].topics, tables)
