"""Replication, receive buffers, reconfiguration, journals with one bug each: all must be found.

Each replaces a part of the real code while a job runs. Some were in the real code until the
simulator met them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import msgspec

from trireme.cluster import coordinator, reconcile
from trireme.cluster.messages import ReadyToSwitch
from trireme.cluster.state import State
from trireme.cluster.view import View
from trireme.ps.replication import replicas
from trireme.ps.replication.log import ReplicationLog, _Receiver
from trireme.ps.replication.messages import Replicate
from trireme.ps.replication.replica import Replica
from trireme.ps.replication.replicas import Replicas
from trireme.ps.server.receive_buffer import ReceiveBuffer
from trireme.ps.shard.instructions import Instruction, Reply
from trireme.ps.shard.push_table import PushTable
from trireme.ps.shard.quiet_state import Quiet, united
from trireme.ps.shard.rounds import Mean

Patch = Callable[[], AbstractContextManager[Any]]


def answers_before_its_backups_confirm() -> AbstractContextManager[Any]:
    """A primary tells at once what can be lost with it."""

    def hold(self: Any, instructions: list[Instruction]) -> list[Instruction]:
        return instructions

    return patch.object(ReplicationLog, "hold", hold)


def promotes_without_the_table() -> AbstractContextManager[Any]:
    """A backup that becomes the primary does not know what was decided."""
    take_role = Replica.take_role

    def forgets(self: Any, view: View) -> Any:
        before = self.primary
        out = take_role(self, view)
        if self.primary and not before and self.began:
            table, self.shard.state.table = self.shard.state.table, PushTable()
            for worker, record in table.records.items():
                self.shard.state.table.admit(worker, record.incarnation)
            self.shard.state.table.count([*table.clocks])
        return out

    return patch.object(Replica, "take_role", forgets)


def drops_an_entry() -> AbstractContextManager[Any]:
    """A backup leaves out one entry of many."""
    replicate = Replica.replicate

    def drops(self: Any, message: Replicate, *said: Any) -> Any:
        if self._position % 7 == 6 and message.position == self._position + 1:
            self._position += 1
            self._note_since(message.position, message.since)
            return iter(())
        return replicate(self, message, *said)

    return patch.object(Replica, "replicate", drops)


def gives_gradients_back_at_once() -> AbstractContextManager[Any]:
    """The memory of a push is given out while a round counts on it, or other shards lack theirs."""
    take = ReceiveBuffer.take

    def gives(self: Any, *said: Any) -> Any:
        staging = take(self, *said)
        staging.release()
        return staging

    return patch.object(ReceiveBuffer, "take", gives)


def gives_gradients_back_before_its_backups_confirm() -> AbstractContextManager[Any]:
    """The memory of a push is given out while an entry may have to be sent from it again."""
    hold = ReplicationLog.hold

    def gives(self: Any, instructions: list[Instruction]) -> list[Instruction]:
        at_once = hold(self, instructions)
        for each in instructions:
            if isinstance(each, Reply) and (staging := getattr(each.route, "staging", None)):
                staging.release()
        return at_once

    return patch.object(ReplicationLog, "hold", gives)


def answers_when_its_backups_are_gone() -> AbstractContextManager[Any]:
    """A primary that was replaced does not wait for a backup that it has lost, and goes on."""

    def lost(self: Any, link: Any) -> None:
        for server, receiver in [*self._receivers.items()]:
            if receiver.link is link:
                del self._receivers[server]
                self.backups -= {server}

    return patch.object(ReplicationLog, "lost", lost)


def goes_on_alone_after_it_was_replaced() -> AbstractContextManager[Any]:
    """A primary answers, without backups, though the view names another one."""
    take = Replicas.take

    def ignores(self: Any, now: float, view: View) -> Any:
        mine = [r for r in self.by_shard.values() if r.primary and r.began]
        held = {each.primary for each in view.shards}
        if mine and self._server not in held and view.life == self.view.life:
            for replica in mine:
                for withheld in replica.log.members((), ()):
                    yield replica, withheld
        else:
            yield from take(self, now, view)

    return patch.object(Replicas, "take", ignores)


def forgets_one_shards_table() -> AbstractContextManager[Any]:
    """The shards that follow one of the old ones do not know what that had decided."""

    def forgets(quiets: Sequence[Quiet]) -> Quiet:
        whole = united(quiets)
        if quiets[0].tensors[0][0].start == 0:
            return whole
        replace = msgspec.structs.replace
        records = {
            worker: replace(record, sequence=0, verdicts={})
            for worker, record in whole.state.records.items()
        }
        return replace(whole, state=replace(whole.state, records=records))

    return patch.object(replicas, "united", forgets)


def restarts_without_its_view() -> AbstractContextManager[Any]:
    """A coordinator that is started again does not know its last view."""
    resumed = coordinator.resumed

    def forgets(now: float, state: State) -> State:
        return msgspec.structs.replace(resumed(now, state), view=None, reconfiguration=None)

    return patch.object(coordinator, "resumed", forgets)


def counts_the_ready_of_an_earlier_view() -> AbstractContextManager[Any]:
    """The shards are switched that had stopped, though another view has let them go on since."""
    renew_view = reconcile.renew_view

    def keeps(builder: Any) -> bool:
        before = builder.state.reconfiguration
        renewed = renew_view(builder)
        if before is not None and builder.state.reconfiguration is not None:
            builder.state = msgspec.structs.replace(builder.state, reconfiguration=before)
        return renewed

    return patch.object(reconcile, "renew_view", keeps)


def compares_only_positions() -> AbstractContextManager[Any]:
    """A backup that has heard entries of the primary before counts as equal to the present one."""
    return patch.object(Replica, "_since_at", lambda self, position: 0)


def waits_for_who_lacks_entries() -> AbstractContextManager[Any]:
    """A primary waits for a backup that it cannot bring up to date."""
    follow = Replica.follow

    def waits(self: Any, link: Any, message: Any) -> Any:
        out = follow(self, link, message)
        if self.log is not None:
            self.log.useless.clear()
        return out

    return patch.object(Replica, "follow", waits)


def late_openers_count() -> AbstractContextManager[Any]:
    """What an old connection is for replaces what the new one is for; it always comes late."""
    followed = Replicas.followed

    def follows(self: Any, link: Any, message: Any) -> Any:
        taken = followed(self, link, message)
        openers = self.__dict__.setdefault("openers", {})
        key = link.identity.index, message.shard
        early, openers[key] = openers.get(key), (link, message)
        late = None if taken is None or early is None else followed(self, *early)
        return taken if late is None else (taken[0], [*taken[1], *late[1]])

    def superseded(self: Any, link: Any, message: Any) -> bool:
        return False

    return patch.multiple(Replicas, followed=follows, _is_superseded=superseded)


def forgets_that_it_has_stopped() -> AbstractContextManager[Any]:
    """A shard whose backup connects again does not tell that it has stopped."""
    follow, reports = Replica.follow, Replica.reports

    def follows(self: Any, link: Any, message: Any) -> Any:
        self.quiet_in = self.shard.stopped and self.shard.state.participants.view.number
        return follow(self, link, message)

    def quietly(self: Any) -> list[Any]:
        told = reports(self)
        quiet = getattr(self, "quiet_in", 0)
        return [e for e in told if not (isinstance(e, ReadyToSwitch) and e.view == quiet)]

    return patch.multiple(Replica, follow=follows, reports=quietly)


def counts_on_who_lacks_rows() -> AbstractContextManager[Any]:
    """A replica has caught up before all of its rows have come."""
    return patch.object(_Receiver, "holds", property(lambda self: self.confirmed))


def answers_with_later_values() -> AbstractContextManager[Any]:
    """Withheld answers carry values that have changed within the same event."""

    def happen(
        self: Any,
        now: float,
        who: Any,
        route: Any,
        message: Any,
        what: Any,
        raw: Any = (),
        lent: Any = None,
    ) -> Any:
        log = self.log
        if log.active:
            yield from log.append(now, who, message, raw, lent)
            self._note_since(log.position, log.since)
        all_of_it = [*self.shard.request(now, route, who, message, what)]
        while self.shard.due:
            all_of_it += self.shard.go_on()
        yield from log.hold(all_of_it) if log.active else all_of_it

    return patch.object(Replica, "_happen", happen)


def counts_rows_of_the_empty() -> AbstractContextManager[Any]:
    """The rows of a push that weighs nothing are updated too."""
    rows = Mean.extra

    def counts(self: Any, members: Any, scale: float = 1.0) -> Any:
        replace = msgspec.structs.replace
        weighty = [replace(each, push=replace(each.push, weight=1.0)) for each in members]
        return rows(self, weighty, scale)

    return patch.object(Mean, "extra", counts)
