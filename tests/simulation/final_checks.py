"""What is checked when a simulated job is over, and all has arrived that was on its way."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from tests.simulation.expected_values import Account, Violation
from tests.simulation.worker import DATASET, SIZE
from trireme.cluster.view import WorkerEntry
from trireme.ps.client.operations import Copy
from trireme.ps.extension import EXTRA
from trireme.ps.layout import Layout
from trireme.ps.messages import Lease, Leased, ServerStatus, Status
from trireme.ps.replication.replica import Replica
from trireme.ps.shard.instructions import Reply
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.shard import Shard
from trireme.ps.shard.values.snapshot_tensors import tensors_from
from trireme.ps.snapshot import ModelState, assemble

if TYPE_CHECKING:
    from tests.simulation.world import World


def check(world: World) -> None:
    """Checks a job that is over.

    Raises:
        Violation: it is not as it should be.
    """
    _check_outcome(world)
    primaries = [primary_of(world, shard) for shard in range(len(world.view.shards))]
    shards = [primary.shard for primary in primaries if primary is not None]
    _check_copies(world)
    if len(shards) < len(primaries) or not all(shard.state.loaded for shard in shards):
        world.counts["without values"] += 1
        state = world.coordinator.state
        assert state.over is not None
        if state.over.outcome != "failed" and world.last is None:
            raise Violation("the job is over, and nobody holds its values")
        return
    now = world.loop.now
    world.checker.check_end(
        world.view.life,
        [shard.watch.account for shard in shards],  # type: ignore[attr-defined]
        [
            answer_in(shard.request(now, None, Participant(0, 0), Status()), ServerStatus).workers
            for shard in shards
        ],
        finished=world.launcher.finished,
    )
    _check_saved(world, shards[0])
    _check_rest(world, shards[0])


def _check_saved(world: World, shard: Shard) -> None:
    """Where a worker has got as far as the end and the job has not failed, all of it is saved.

    An exception is a worker that came back after the others had saved and left, and that was lost
    before it had saved: its updates may be in no checkpoint.
    """
    state = world.coordinator.state
    assert state.over is not None
    late = any(task.state == "lost" and task.since > world.last_at for task in state.of("worker"))
    if state.over.outcome == "failed" or not world.launcher.finished or late:
        return
    saved = -1 if world.last is None else world.last.step
    if saved != shard.state.step:
        raise Violation(f"the job ended at step {shard.state.step}, and saved is {saved}")


def primary_of(world: World, shard: int) -> Replica[Any] | None:
    """Returns the primary of a shard by the newest view, where it lives and has taken that."""
    view = world.view
    server = world.launcher.servers.get(view.primary(shard))
    if server is None or server.handler.replicas.view.generation != view.generation:
        return None
    replica = server.handler.replicas.by_shard.get(shard)
    return replica if replica is not None and replica.primary else None


def account_of(world: World, shard: int) -> Account | None:
    """Returns the account of a shard's primary; see `primary_of`."""
    primary = primary_of(world, shard)
    account: Account | None = None if primary is None else primary.shard.watch.account  # type: ignore[attr-defined]
    return account


def _check_outcome(world: World) -> None:
    """Where every worker has said how it ended, the job ended so."""
    state = world.coordinator.state
    assert state.over is not None
    world.counts[f"job {state.over.outcome}"] += 1
    left = [task for task in state.of("worker") if task.state == "left"]
    said = {task.outcome for task in left if not task.dismissed}  # which have not finished the job
    if state.over.outcome == "failed":
        apart = world.coordinator.longest_without(state.over.culprit)
        cut_off = apart > world.policy.reconnect_grace and not world.schedule.survives
        # The chief is gone for good while the last of the others leaves, as a signal has asked it.
        gone = {f"worker:{each.worker}" for each in world.schedule.crashes if each.restart is None}
        alone = state.over.culprit in gone and said == {"interrupted"}
        if not (world.fails or cut_off or alone):
            raise Violation(f"the job failed: {state.over}")
        return
    if said and all(task.state in ("left", "expected") for task in state.tasks.values()):
        expected = "interrupted" if "interrupted" in said else "finished"
        if state.over.outcome != expected:
            raise Violation(f"the workers ended {said}, and the job so: {state.over}")


def _check_copies(world: World) -> None:
    """All copies of a shard are equal in every bit, where they have come equally far."""
    view, known = world.view, dict[int, Replica[Any]]()
    for shard, entry in enumerate(view.shards):
        for index in entry.copies:
            server = world.launcher.servers.get(index)
            if server is None or server.process.stopped:
                continue
            replicas = server.handler.replicas
            if replicas.view.number != view.number or shard not in replicas.by_shard:
                continue
            copy = replicas.by_shard[shard]
            other = known.setdefault(shard, copy)
            if other is not copy and copy.began:
                if other.position != copy.position:
                    world.counts["copies behind"] += 1
                    continue
                world.counts["equal copies"] += 1
                _check_equal(other.shard, copy.shard, f"the copies of shard {shard} differ")


def _check_equal(one: Shard, other: Shard, what: str) -> None:
    a, b = one.state, other.state
    if (a.step, a.loaded, a.table.records) != (b.step, b.loaded, b.table.records):
        raise Violation(f"{what}: steps {a.step} and {b.step}, or their tables")
    if _counted(a.counters) != _counted(b.counters):
        raise Violation(f"{what}: {a.counters} and {b.counters}")
    if a.values is None or b.values is None:
        return
    for (spec, x), (_, y) in zip(a.values.live(state=True), b.values.live(state=True), strict=True):
        if not np.array_equal(x.numpy(), y.numpy()):
            raise Violation(f"{what} in {spec}")
    if a.extension is not None and b.extension is not None:
        same = zip(a.extension.copy(), b.extension.copy(), strict=True)
        if not all(np.array_equal(x.numpy(), y.numpy()) for (_, x), (_, y) in same):
            raise Violation(f"{what} in their tables")


def _counted(counters: Counter[str]) -> dict[str, float]:
    return {name: count for name, count in counters.items() if count}


def _check_rest(world: World, shard: Shard) -> None:
    """A newcomer takes the job over: it must be dealt all that nobody finished."""
    newcomer, now = 900, world.loop.now
    view = replace(shard.state.participants.view, workers=(WorkerEntry(newcomer, 1),))
    view = replace(view, number=view.number + 1, next_shards=())
    dealing = shard.watch.account.dealing  # type: ignore[attr-defined]
    shard.view(now, view)
    count = dealing.frontier - len(dealing.applied) + 3
    lease = Lease(view.number, DATASET, SIZE, 1, count)
    leased = answer_in(shard.request(now, None, Participant(newcomer, 1), lease), Leased)
    dealing.check_rest(leased.spans)


def joined(layout: Layout, copy: Copy) -> ModelState:
    """Returns the state that a copy of all shards is."""
    parts = [(cut, tensors_from(cut.tensors, data)) for cut, data in copy]
    grown = copy[0][0].layout
    state = assemble(layout if grown is None else Layout(grown), parts)
    if not any(spec.key.startswith(EXTRA) for cut, _ in copy for spec in cut.tensors):
        return state
    from trireme.tables.job.table_extension import joined

    return dataclasses.replace(state, extra=joined([tensors for _, tensors in parts]))


def answer_in(instructions: Sequence[Any], wanted: Any) -> Any:
    """Returns the answer of a type that must be among instructions.

    Raises:
        Violation: it is not.
    """
    for instruction in instructions:
        if isinstance(instruction, Reply) and isinstance(instruction.message, wanted):
            return instruction.message
    raise Violation(f"{instructions} came where {wanted.__name__} was due")
