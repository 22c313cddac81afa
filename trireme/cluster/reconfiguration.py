"""The views of a running job: who is a member, and where the copies of each shard lie.

A view that is made because somebody was lost promotes backups. Where all copies of a shard were
lost, the job begins another life: fresh shards, which are filled from the newest checkpoint.
When all is quiet, the placement is improved by reconfigurations, one at a time: a view announces
the next shards, their primaries stop at a common cut and say that they are ready, another view
switches.

Two servers may not reach each other, though both reach the coordinator. A primary that makes no
progress with another server says so. Then one of the two gives its copies up in the next view, and
gets none for a while, which doubles each time: the other one, or the primary itself where that is
the primary of shard 0, which all need. That waits until the server that keeps its copies has heard
the coordinator after the first report: one that receives nothing makes no progress either, and is
about to be lost.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from trireme.cluster.messages import (
    CaughtUp,
    CopyLost,
    HeartbeatHeard,
    LinkLost,
    ReadyToSwitch,
    ViewChanged,
)
from trireme.cluster.placement import (
    Shards,
    balanced,
    caught_up,
    emptied,
    first_division,
    step_towards,
    surviving,
)
from trireme.cluster.progress import BUSY
from trireme.cluster.spec import task_name
from trireme.cluster.state import DecisionBuilder, Reconfiguration, State, Task
from trireme.cluster.view import ServerEntry, ShardEntry, View, WorkerEntry, first_view
from trireme.printable import counted

REBALANCE_SECONDS = 30.0
"""Nothing is planned for so long, at most, after the loss of a server whose process is started
anew. So its slots do not move twice."""

SWITCH_SECONDS = 30.0  # after as long a reconfiguration is given up, and planned again

_SILENT_INTERVALS = 3  # of heartbeats: a server that is silent so long has not only lost a link

SHUNNED_TIMEOUTS, MOST_SHUNNED_TIMEOUTS = 3, 60
"""For so many heartbeat timeouts a server with a broken link gets no copy: first, and at most."""


def renew_view(builder: DecisionBuilder) -> bool:
    """Issues a new view if the members or their shards have changed; returns whether it did.

    A further reconfiguration is only announced by a view of its own.
    """
    state = builder.state
    before = state.view
    if before is None:
        view = _first_view(state)
    elif before.servers and not state.left_to_go_on("ps"):
        return False  # it waits for a server; a view without one would be of no use
    else:
        view = _with_shards(builder, _with_members(before, state))
        if view == before:
            view = _with_plan(builder, view)
        if view == before:
            return False
        view = replace(view, number=max(before.number + 1, first_view(state.term)))
    announces = bool(view.next_shards) and (before is None or not before.next_shards)
    if announces:
        under_way: Reconfiguration | None = Reconfiguration(view.number, builder.now)
    else:
        under_way = builder.state.reconfiguration if view.next_shards else None
        if under_way is not None:  # each view has a cut of its own, at which all shards stop
            under_way = replace(under_way, view=view.number, ready=())
    builder.state = replace(builder.state, view=view, reconfiguration=under_way)
    builder.add_reason(_describe(view))
    builder.broadcast(ViewChanged(view))
    return True


def take_caught_up(builder: DecisionBuilder, task: Task, message: CaughtUp) -> None:
    """A primary says that a joining copy is complete. What comes too late is ignored."""
    shard = _shard_of(builder.state, task, message)
    if shard is not None and message.server in shard.joining:
        builder.shards = caught_up(_shards(builder.state), message.shard, message.server)
        shunned = {s: note for s, note in builder.state.shunned.items() if s != message.server}
        builder.state = replace(builder.state, shunned=shunned)
        server = task_name("ps", message.server)
        builder.add_reason(f"{server} holds all of shard {message.shard} now")


def take_copy_lost(builder: DecisionBuilder, task: Task, message: CopyLost) -> None:
    """A primary says that a copy is of no use as it is. What comes too late is ignored."""
    shard = _shard_of(builder.state, task, message)
    if shard is not None and message.server in (*shard.backups, *shard.joining):
        builder.shards = emptied(_shards(builder.state), message.shard, message.server)
        server = task_name("ps", message.server)
        builder.add_reason(f"the copy of shard {message.shard} at {server} is to be filled again")


def take_link_lost(builder: DecisionBuilder, task: Task, message: LinkLost) -> None:
    """A primary says that it makes no progress with another server. What comes late is ignored."""
    state = builder.state
    shard, leader = _shard_of(state, task, message), _shards(state)[0].primary
    if shard is None or message.server not in (*shard.backups, *shard.joining, leader):
        return
    other = state.tasks[task_name("ps", message.server)]
    soon = _SILENT_INTERVALS * state.policy.heartbeat_interval
    if other.state != "live" or builder.now - other.heard > soon:
        return  # it does not reach the coordinator either: it comes back, or is about to be lost
    if BUSY in other.status:
        return  # no matter of a link either: the primary repeats it with its next heartbeats
    loser, keeper = (task, other) if message.server == leader else (other, task)
    first, last = state.unlinked.get(loser.index, (builder.now, -math.inf))
    if builder.now - last > soon:
        first = builder.now
        builder.add_reason(f"{task.name} makes no progress with {other.name}: do both hear this?")
        for each in (task, other):
            if each.connection is not None:
                builder.send(each.connection, HeartbeatHeard(first))  # they answer at once
    unlinked = {**state.unlinked, loser.index: (first, builder.now)}
    builder.state = state = replace(state, unlinked=unlinked)
    if keeper.hears < first:
        return  # the primary repeats it with its next heartbeats here too
    shards = _shards(state)
    for number in range(len(shards)):
        shards = emptied(shards, number, loser.index)
    until, times = state.shunned.get(loser.index, (0.0, 0))
    builder.shards = shards
    if builder.now >= until:
        timeouts = min(SHUNNED_TIMEOUTS << times, MOST_SHUNNED_TIMEOUTS)
        seconds = timeouts * state.policy.heartbeat_timeout
        note = {loser.index: (builder.now + seconds, times + 1)}
        builder.state = replace(state, shunned={**state.shunned, **note})
        builder.add_reason(
            f"{task.name} and {other.name} make no progress with each other: {loser.name} gets no "
            f"copy for {seconds:.0f} s"
        )


def take_ready(builder: DecisionBuilder, task: Task, message: ReadyToSwitch) -> None:
    """A primary says that its shard has stopped. What comes too late is ignored."""
    under_way = builder.state.reconfiguration
    if under_way is None or message.view < under_way.view:
        return
    if not _is_primary(builder.state, task, message.generation, message.shard):
        return
    ready = tuple(sorted({*under_way.ready, message.shard}))
    builder.state = replace(builder.state, reconfiguration=replace(under_way, ready=ready))


def is_needed(state: State, server: int) -> bool:
    """Returns whether a shard of the newest view, or of the next ones, lies on a server."""
    view = state.view
    return view is not None and any(
        server in (*shard.copies, *shard.joining) for shard in (*view.shards, *view.next_shards)
    )


# The parts of a view -----------------------------------------------------------------------------


def _first_view(state: State) -> View:
    hosts = {task.index: task.host for task in state.of("ps") if task.active}
    shards = first_division(hosts, state.policy.slots, state.policy.replicas)
    return _with_members(View(first_view(state.term), (), (), shards), state)


def _with_members(view: View, state: State) -> View:
    servers = [task for task in state.of("ps") if task.active]
    workers = state.of("worker")
    return replace(
        view,
        servers=tuple(ServerEntry(s.index, s.incarnation, s.address) for s in servers),
        workers=tuple(WorkerEntry(w.index, w.incarnation) for w in workers if w.active),
        saved=max((w.saved for w in workers if w.saved is not None), default=None),
    )


def _with_shards(builder: DecisionBuilder, view: View) -> View:
    """Returns a view whose shards lie on live servers; or those after the switch."""
    state = builder.state
    shards = surviving(builder.shards or view.shards, state.holders)
    if shards is None:
        return _another_life(builder, view)
    under_way = state.reconfiguration
    if under_way is None:
        return replace(view, shards=shards)
    if (shards, surviving(view.next_shards, state.holders)) != (view.shards, view.next_shards):
        builder.add_reason("the reconfiguration is given up")
        return replace(view, shards=shards, next_shards=())
    if len(under_way.ready) == len(shards):
        return replace(
            view, shards=view.next_shards, next_shards=(), generation=view.generation + 1
        )
    if builder.now - under_way.since >= SWITCH_SECONDS:
        waited = [shard for shard in range(len(shards)) if shard not in under_way.ready]
        names = ", ".join(f"{at} on {task_name('ps', shards[at].primary)}" for at in waited)
        builder.add_reason(f"the reconfiguration is given up: it waited for shard {names}")
        builder.state = replace(state, plan_after=builder.now + SWITCH_SECONDS)
        return replace(view, shards=shards, next_shards=())
    return replace(view, shards=shards)


def _another_life(builder: DecisionBuilder, view: View) -> View:
    hosts = _hosts(builder.state)
    lost = [
        f"{shard.start}-{shard.stop - 1}"
        for shard in view.shards
        if not any(server in builder.state.holders for server in shard.copies)
    ]
    builder.add_reason(
        f"all copies of the slots {', '.join(lost)} are lost: the job goes back to its newest "
        "checkpoint"
    )
    return replace(
        view,
        shards=first_division(hosts, builder.state.policy.slots, builder.state.policy.replicas),
        next_shards=(),
        generation=view.generation + 1,
        life=view.life + 1,
    )


def _with_plan(builder: DecisionBuilder, view: View) -> View:
    """Returns a view that announces the next reconfiguration, if one is due."""
    state, now = builder.state, builder.now
    patience = min(REBALANCE_SECONDS, state.policy.wait_for_restart)
    comes_back = any(
        task.state == "disconnected" or (task.state == "lost" and now - task.since < patience)
        for task in state.of("ps")
        if not task.dismissed
    )
    busy = view.next_shards or any(shard.joining for shard in view.shards)
    if not view.shards or busy or comes_back or now < state.plan_after:
        return view
    shunned = {server for server, (until, _) in state.shunned.items() if now < until}
    hosts = {server: host for server, host in _hosts(state).items() if server not in shunned}
    if not hosts or any(shard.primary in shunned for shard in view.shards):
        return view  # no cut can be made
    wanted = balanced(view.shards, hosts, state.policy.replicas)
    return replace(view, next_shards=step_towards(view.shards, wanted))


def _hosts(state: State) -> dict[int, str]:
    live = state.left_to_go_on("ps")
    staying = [task for task in live if not task.dismissed]
    return {task.index: task.host for task in staying or live}


def _shards(state: State) -> Shards:
    return state.view.shards if state.view else ()


def _shard_of(
    state: State, task: Task, message: CaughtUp | CopyLost | LinkLost
) -> ShardEntry | None:
    """Returns the shard of which a message speaks; None if it speaks of what is no more."""
    if not _is_primary(state, task, message.generation, message.shard):
        return None
    server = state.tasks.get(task_name("ps", message.server))
    live = message.server in state.holders
    if not live or server is None or server.incarnation != message.incarnation:
        return None
    return _shards(state)[message.shard]


def _is_primary(state: State, task: Task, generation: int, shard: int) -> bool:
    """Returns whether a task is primary of a shard in the newest view, as what it is now."""
    view = state.view
    return (
        view is not None
        and view.generation == generation
        and shard < len(view.shards)
        and view.shards[shard].primary == task.index
        and task.index in state.holders
    )


def _describe(view: View) -> str:
    workers = ", ".join(str(worker.index) for worker in view.workers)
    text = (
        f"view {view.number}: workers {workers or 'none'}, {counted(len(view.servers), 'server')}"
    )
    if view.generation > 1 or any(shard.backups or shard.joining for shard in view.shards):
        text += f", generation {view.generation}: {_placement(view.shards)}"
    if view.next_shards:
        text += f"; to be {_placement(view.next_shards)}"
    return text


def _placement(shards: Shards) -> str:
    """Returns a text such as `0-127 on ps:0+1, 128-255 on ps:1 (joining: ps:2)`."""
    return ", ".join(
        f"{shard.start}-{shard.stop - 1} on ps:{'+'.join(map(str, shard.copies))}"
        + (f" (joining: ps:{'+'.join(map(str, shard.joining))})" if shard.joining else "")
        for shard in shards
    )
