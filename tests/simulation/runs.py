"""One schedule from its first view to its end, and beyond: its last copy is loaded and goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from tests.simulation.expected_values import Violation
from tests.simulation.final_checks import joined
from tests.simulation.makers import Makers
from tests.simulation.model import LATE, SLOTS, Model, layout_over, same_state, tables_of
from tests.simulation.network import Weather
from tests.simulation.schedule import Schedule
from tests.simulation.world import World
from trireme.cluster.view import View, WorkerEntry
from trireme.ps.client.operations import Copy
from trireme.ps.flat import as_bytes
from trireme.ps.layout import equal_bounds
from trireme.ps.messages import Attach
from trireme.ps.shard.instructions import Instruction, Reply, Send
from trireme.ps.shard.participants import Participant
from trireme.ps.shard.shard import Shard
from trireme.ps.snapshot import ModelState, disassemble
from trireme.ps.snapshot_messages import Load, Snapshot, TakeSnapshot

_RESUMED = 3
"""One in so many jobs goes on from its last copy."""

_LOADER = Participant(0, 1)


def simulate(
    schedule: Schedule, makers: Makers | None = None, note: Callable[[str], None] | None = None
) -> Counter[str]:
    """Runs a job; loads its last copy into another number of servers, and may go on from there.

    Args:
        schedule: the job.
        makers: of its servers and clients, where they shall not be the real ones.
        note: told what happens, line by line.

    Returns:
        How often what happened.

    Raises:
        Violation: something happened that must never happen.
    """
    makers = makers or Makers()
    first = World(schedule, makers, note=note)
    counts = first.run()
    if first.last is not None:
        check_reload(schedule, first.last)
        if schedule.seed % _RESUMED == 0:
            counts += World(resumed(schedule, first.last), makers, first.last, note).run()
            counts["resumed"] += 1
    return counts


def resumed(schedule: Schedule, state: ModelState) -> Schedule:
    """Returns a short job without faults that goes on from a copy, on other servers."""
    return replace(
        schedule,
        servers=schedule.resumed_servers,
        rule=msgspec.structs.replace(schedule.rule, max_steps=state.step + 3),
        weather=Weather(),
        crashes=(),
        evictions=(),
        cuts=(),
        vanishing=None,
        faults=(),
        grows_at=None,
        replicas=min(schedule.replicas, schedule.resumed_servers),
        stop_at=None,
    )


def snapshots(shards: Sequence[Shard]) -> Copy:
    """Copies the state of all shards of a job, whose messages reach each other at once."""
    found: dict[int, tuple[Snapshot, list[memoryview]]] = {}

    def carry_out(shard: Shard, instructions: Sequence[Instruction]) -> None:
        for each in instructions:
            if isinstance(each, Send):
                other = shards[each.shard]
                carry_out(other, other.heard(0.0, shard.number, each.message))
            elif isinstance(each, Reply) and isinstance(each.message, Snapshot):
                payload = [as_bytes(tensor) for tensor in each.payload if tensor.numel()]
                found[shard.number] = each.message, payload
        if shard.due:
            carry_out(shard, shard.go_on())

    for shard in shards:
        carry_out(shard, shard.request(0.0, None, _LOADER, TakeSnapshot(1, True)))
    return [copy for _, copy in sorted(found.items())]


def check_reload(schedule: Schedule, state: ModelState) -> None:
    """Loads a copy into another number of fresh shards, and copies it from there.

    Raises:
        Violation: the second copy is not the first.
    """
    model = Model(schedule.momentum, schedule.seed)
    bounds = equal_bounds(SLOTS, schedule.resumed_servers)
    layout = layout_over(bounds, whole=LATE.name in state.values)
    shards = [Shard(server) for server in range(schedule.resumed_servers)]
    for server, shard in enumerate(shards):
        shard.view(0.0, View(1, (), (WorkerEntry(0, 1),)))
        attach = Attach(1, layout.spec, model.optimizer, schedule.rule, schedule.extension)
        shard.request(0.0, None, _LOADER, attach)
        tensors = [*disassemble(layout, state, server), *tables_of(layout, state, server)]
        specs = tuple(spec for spec, _ in tensors)
        consumed = state.consumed if server == 0 else ()
        load = Load(1, state.step, specs, state.workers, consumed)
        shard.request(0.0, None, _LOADER, load, tensors)
    copies = snapshots(shards)
    if not same_state(joined(layout, copies), state):
        raise Violation(
            f"a copy of {schedule.servers} servers is another one after it was loaded into "
            f"{schedule.resumed_servers}"
        )
