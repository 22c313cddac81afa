"""The quiet state of a shard: all that it knows but what is under way.

A shard is quiet when it has stopped at one decision: none is half made. The state of a
generation's shards begins with the quiet state of the shards before. What was under way, pushes
that are not decided and answers that are withheld, is asked again by its workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trireme.ps.extension import HeldExtension
from trireme.ps.extra import ShownExtension
from trireme.ps.leader.leader import LeaderState
from trireme.ps.messages import GroupSpec, LayoutSpec, OptimizerSpec
from trireme.ps.rule import Rule
from trireme.ps.shard.push_table import WorkerRecord
from trireme.ps.shard.state import ShardState
from trireme.ps.shard.values.snapshot_tensors import Tensors


class QuietState(msgspec.Struct, frozen=True, array_like=True):
    """What is the same in every shard, but for `leader`, which only shard 0 has."""

    # of the model that was shown, with the present hyper-parameters
    task: str
    layout: LayoutSpec
    optimizer: OptimizerSpec
    rule: Rule
    extension: ShownExtension | None
    step: int  # the global step of the values
    records: dict[int, WorkerRecord]  # the exactly-once table
    retired: tuple[int, ...]  # the workers that train no more
    counters: dict[str, int]
    clocks: dict[tuple[int, int], int]  # as in the table
    leader: LeaderState | None = None


class Quiet(msgspec.Struct, frozen=True):
    """A quiet state with its tensors."""

    state: QuietState
    tensors: Tensors  # the values, and the optimizer's state: live tensors of the shard
    # the extra values of the shard, or of several; None where they come later
    extra: Sequence[HeldExtension] | None = ()


def export(state: ShardState) -> Quiet | None:
    """Returns a shard's quiet state; None where no values are loaded."""
    shown, values = state.shown, state.values
    if not state.loaded or shown is None or values is None:
        return None
    groups = zip(shown.optimizer.groups, state.present, strict=True)
    present = tuple(GroupSpec(now.values, group.optimizer) for group, now in groups)
    quiet = QuietState(
        task=shown.task,
        layout=shown.layout.spec,
        optimizer=OptimizerSpec(shown.optimizer.name, present),
        rule=shown.rule,
        extension=shown.extension,
        step=state.step,
        records=state.table.records,
        retired=tuple(sorted(state.participants.retired)),
        counters=dict(state.counters),
        clocks=state.table.clocks,
        leader=state.leader.export() if state.leader is not None else None,
    )
    extra = () if state.extension is None else (state.extension,)
    return Quiet(quiet, values.live(state=True), extra)


def united(quiets: Sequence[Quiet]) -> Quiet:
    """Returns the quiet state of one shard that takes over slots of several.

    Args:
        quiets: the shards', in the order of their slots. They have stopped at one decision, so all
            but the tensors, and what only shard 0 has, is the same.
    """
    tensors = [entry for quiet in quiets for entry in quiet.tensors]
    extra = [each for quiet in quiets for each in quiet.extra or ()]
    return Quiet(quiets[0].state, tensors, extra)
