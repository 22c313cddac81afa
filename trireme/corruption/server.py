"""What a server checks: pushes as they come, its memory between updates, and copies of shards.

At each check every copy of a shard takes digests right after the update that makes the step, and
the backups send theirs to the primary, which judges when it has all. Nobody waits for that.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from trireme.corruption.digests import Seal, digest, mend
from trireme.corruption.findings import Findings, differing
from trireme.corruption.judge import Verdict, judge
from trireme.corruption.naming import Held, by_parameter, described
from trireme.corruption.settings import Budget, Settings
from trireme.errors import CorruptedValues, FrameError, WireError
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import Push
from trireme.ps.replication.log import ReplicationLog
from trireme.ps.replication.replica import Replica
from trireme.ps.server.handler import ShardHandler
from trireme.ps.server.service import ServerPart
from trireme.ps.shard.values.parameters import Values
from trireme.ps.shard.watch import Watch
from trireme.wire.connection import Incoming
from trireme.wire.message import Message, Number
from trireme.wire.service import Link

_log = logging.getLogger(__name__)

_MOST_STEPS = 8
"""Of so many checks digests are kept that lack those of others."""

_MOST_REFUSALS = 3
"""So often a gradient may come other than it was sent before its memory counts as bad."""


class CopyDigests(Message, frozen=True, array_like=True):
    """A backup to the primary of its shard: the digests of its tensors, right after a step."""

    kind: ClassVar[int] = 114
    shard: Number
    generation: Number
    step: Number
    suspect: bool  # whether its memory has changed by itself since the check before
    digests: bytes


class Checks:
    """The part of a server that checks its copies of shards."""

    messages: tuple[type[Message], ...] = (CopyDigests,)

    def __init__(self, handler: ShardHandler) -> None:
        self.handler = handler
        self.settings = Settings.of(handler.config)
        self.budget = Budget()
        self.findings = Findings(_log.warning)
        if self.settings.every:
            handler.watch = lambda number: CopyWatch(self, number)
            for number, replica in handler.replicas.by_shard.items():
                replica.shard.state.watch = handler.watch(number)

    @property
    def task(self) -> str:
        return f"ps:{self.handler.index}"

    def replica(self, shard: int) -> Replica[Link] | None:
        return self.handler.replicas.by_shard.get(shard)

    # -- the service's handler -------------------------------------------------------------------

    def authenticated(self, link: Link) -> None:
        """Does nothing: a backup that has digests sends them."""

    def received(self, link: Link, incoming: Incoming) -> None:
        """Takes the digests of a backup."""
        message, task = incoming.message, link.identity.task
        assert isinstance(message, CopyDigests)
        if link.identity.role != "ps":
            raise FrameError(f"{task} has no copy of a shard")
        replica = self.handler.replicas.local(message.shard)
        watch = None if replica is None else replica.shard.state.watch
        if replica is None or replica.generation != message.generation:
            return  # the shards were divided anew meanwhile
        if isinstance(watch, CopyWatch):
            taken = tuple(np.frombuffer(message.digests, np.uint64).tolist())
            watch.take(message.step, task, taken, suspect=message.suspect)

    def closed(self, link: Link, error: WireError | None) -> None:
        """Does nothing: what is missing is judged without."""

    def tick(self, now: float) -> None:
        """Does nothing: time changes nothing here."""


class _Kept(NamedTuple):
    """What an update has left, with its digests."""

    values: Values
    changes: int
    live: Sequence[Held]
    seal: Seal
    vectors: int  # the digest of the values alone, as answers carry it


class CopyWatch(Watch):
    """Checks one copy of a shard."""

    def __init__(self, checks: Checks, number: int) -> None:
        self._checks = checks
        self._number = number
        self._step = 0  # before the update under way
        self._kept: _Kept | None = None
        self._suspect = False  # since the last check
        self._names: Sequence[str] = ()  # of the tensors that have digests
        self._copies: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)  # by step and task
        self._suspects: set[str] = set()
        self._refused = 0

    def accepts(self, task: str, push: Push, gradients: PartBuffer) -> bool:
        checks = self._checks
        due = checks.settings.due(push.pulled, push.pulled + max(push.steps, 1))
        if not push.digest or not (due or checks.budget.allows()):
            return True
        with checks.budget.spending():
            same = digest(gradients.vectors) == push.digest
        if same:
            self._refused = 0
            return True
        action = checks.settings.action
        self._refused += 1
        self._checks.findings.add(
            f"a gradient on its way from {task} to {checks.task} has changed, after step "
            f"{push.pulled}",
            stops=action == "stop" or self._refused > _MOST_REFUSALS,
        )
        return action == "warn"  # else it comes again, over another link

    def before_change(self, step: int, values: Values) -> None:
        kept, self._step, checks = self._kept_of(values), step, self._checks
        self._kept = None
        if kept is None:
            return
        tensors = [tensor for _, tensor in kept.live]
        with checks.budget.spending():
            if digest(tensors) == kept.seal.digest:
                return
        flip, action = kept.seal.find(tensors), checks.settings.action
        every = "its values, or the optimizer's state"
        what = described(values.buffer.layout, kept.live, flip, every)
        primary = self._log is not None
        self._suspect = action == "warn" or flip is None
        self._checks.findings.add(
            f"memory of {checks.task}, {'primary' if primary else 'backup'} of shard "
            f"{self._number}, has changed by itself after step {step}: {what}",
            stops=action == "stop",
        )
        if action == "heal" and flip is not None:
            mend(tensors, flip)
        elif action == "heal" and primary:
            self._leave("it cannot be put back")

    def after_change(self, step: int, values: Values) -> None:
        checks = self._checks
        due = checks.settings.due(self._step, step)
        self._kept = None
        if not (due or checks.budget.allows()):
            return
        with checks.budget.spending():
            live = values.live(state=True)
            seal, vectors = Seal([t for _, t in live]), digest(values.buffer.vectors)
        self._kept = _Kept(values, values.changes, live, seal, vectors)
        if due:
            self._check(step, values, live)

    def digest(self, values: Values, sent: Sequence[torch.Tensor]) -> int:
        kept = self._kept_of(values)
        whole = kept is not None and len(sent) == len(values.buffer.vectors)
        return kept.vectors if kept is not None and whole else 0

    def _kept_of(self, values: Values) -> _Kept | None:
        """Returns what the last update has left, unless values were loaded or written since."""
        kept = self._kept
        same = kept is not None and kept.values is values and kept.changes == values.changes
        return kept if same else None

    def status(self) -> Mapping[str, float | str]:
        return self._checks.findings.status()

    # -- copies ----------------------------------------------------------------------------------

    @property
    def _log(self) -> ReplicationLog[Link] | None:
        """The log of the shard, if this is its primary."""
        replica = self._checks.replica(self._number)
        return None if replica is None else replica.log

    def _check(self, step: int, values: Values, live: Sequence[Held]) -> None:
        checks, replica = self._checks, self._checks.replica(self._number)
        suspect, self._suspect = self._suspect, False
        if replica is None or (replica.log is not None and not replica.log.backups):
            return
        named = by_parameter(values.buffer.layout, live)
        self._names = tuple(named)
        taken = tuple(digest([tensor]) for tensor in named.values())
        if replica.log is not None:
            self.take(step, checks.task, taken, suspect=suspect)
        elif replica.source is not None:
            data = np.array(taken, np.uint64).tobytes()
            where = self._number, replica.generation, step
            replica.source.offer(CopyDigests(*where, suspect, data))

    def take(self, step: int, task: str, digests: tuple[int, ...], *, suspect: bool) -> None:
        """Takes the digests of a copy, in the primary, and judges where all are there."""
        log = self._log
        self._copies[step][task] = digests
        self._suspects |= {task} if suspect else set()
        copies = self._copies[step]
        if log is not None and len(copies) == 1 + len(log.backups) and self._checks.task in copies:
            del self._copies[step]
            self._judge(step, copies)
        for old in sorted(self._copies)[:-_MOST_STEPS]:
            del self._copies[old]

    def _judge(self, step: int, copies: Mapping[str, tuple[int, ...]]) -> None:
        verdict = judge(copies, self._suspects)
        self._suspects.clear()
        if verdict is None:
            self._checks.findings.settled(self._number)
            return
        action = self._checks.settings.action
        text = differing(verdict, copies, f"shard {self._number}", step, self._names)
        stops = action == "stop" or (action == "heal" and not verdict.decided)
        self._checks.findings.add(text, self._number, stops=stops)
        if action == "heal":
            self._refill(verdict)

    def _refill(self, verdict: Verdict) -> None:
        log, view = self._log, self._checks.handler.replicas.view
        for task in verdict.wrong:
            if task == self._checks.task:
                self._leave(f"{', '.join(verdict.good)} have it as it should be")
            server = view.server(int(task.partition(":")[2]))
            if server is not None and log is not None:
                log.useless.add((server.index, server.incarnation))

    def _leave(self, why: str) -> None:
        """Ends this server, so that a backup takes its place; stops the job if there is none."""
        log = self._log
        text = f"{self._checks.task} holds corrupted values of shard {self._number}: {why}"
        if log is None or not log.backups:
            self._checks.findings.add(text, stops=True)
        error = CorruptedValues(f"{text}; it leaves, to be filled anew")
        error.others_go_on = True
        raise error


SERVERS = ServerPart(Checks)
