"""A worker's membership in its job: joins, rejoins and leaves."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from trireme.cluster.member import Member
from trireme.cluster.member_protocol import MemberConfig
from trireme.cluster.messages import LastStepSaved, Outcome
from trireme.cluster.progress import LAST_COPY_TIMEOUTS, UNREACHED, is_absent
from trireme.cluster.view import LastChief, View
from trireme.errors import (
    ConnectTimeout,
    Fenced,
    JobFailed,
    ModelMismatchError,
    NetworkLost,
    TriremeError,
    WireError,
    WireTimeout,
)
from trireme.launch.config.task_config import BY_HAND
from trireme.launch.exit_reason import INTERRUPTED, LEFT, LONGEST_TEXT, describe
from trireme.printable import printable
from trireme.ps.client.lanes import RETRY_SECONDS, ClientOptions
from trireme.session.backends.base import Backend
from trireme.session.backends.local import Local
from trireme.session.backends.servers import ServerBackend
from trireme.session.backends.together import together
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.observers.liveness import Liveness
from trireme.session.observers.progress import Progress
from trireme.strategies import BACKENDS
from trireme.wire.handshake import new_epoch

_log = logging.getLogger(__name__)

_REJOIN_SECONDS = 30.0  # for the coordinator to be heard of after the last update
_UNANSWERED_SECONDS = 5.0  # after a signal, until a worker stops the job without the coordinator
_UNREACHED_SECONDS = 20.0  # beyond the heartbeat timeout, before a worker is absent
_TRAINED = ("training", "saving")  # the states of a worker whose model the servers have taken
_WAIT_SHOWN = 1.0  # seconds: shorter waits are not shown
_WAIT_SHOWN_AGAIN = 5.0  # seconds


class WaitCutShort(Exception):
    """A worker that waits for the others to end is to stop the job, to leave, or to save."""


class Lifecycle:
    """One worker's membership in its job, from joining to leaving."""

    backend: Backend  # from `join` on

    def __init__(self, setup: TrainingSetup, progress: Progress) -> None:
        self.setup = setup
        self.progress = progress
        self.task = setup.settings.task
        self.state = "new"
        self.member: Member | None = None  # the connection to the coordinator, where there is one
        self.servers: ServerBackend | None = None  # the backend, where there are servers
        self.liveness = Liveness()
        self.draining = False  # whether this worker has retired, and waits until the others have
        self.stop_sent = False
        self.left = False
        self._lost = False  # the job continues without this worker, which cannot come back
        self.exits = ExitStack()  # closed first when the worker leaves
        self._own_epoch = new_epoch()  # used where there is no coordinator
        self._joined = False
        self.departed = False  # whether this worker leaves alone, as a signal has asked it to
        self._signal = ""  # that asks this process to end
        self._signalled_at = 0.0
        self.last_chief = LastChief(self.task.index)

    # -- joining --------------------------------------------------------------------------------

    def join(self) -> Backend:
        setup, group = self.setup, self.setup.process_group
        if setup.settings.backend and not (self.task.servers or self.task.dry_run):
            self.liveness.watch()
            self.backend = together(setup.settings).backend(
                setup, self._say_waiting, self.liveness.doing
            )
        elif group is not None and not group.is_chief:
            self.backend = together(setup.settings).other_process(setup)
        elif not self.task.coordinator:
            self.backend = Local(setup.flat, setup.optimizer)
        else:
            self.backend = self.servers = self._join_servers()
        self._joined = True
        return self.backend

    def _join_servers(self) -> ServerBackend:
        setup, flat, group = self.setup, self.setup.flat, self.setup.process_group
        self.enter("joining", f"the coordinator at {self.task.coordinator}")
        secret = bytes.fromhex(self.task.secret)
        config = MemberConfig(
            coordinator=self.task.coordinator,
            job=self.task.job,
            role="worker",
            index=self.task.index,
            secret=secret,
            certificates=self.task.own_certificates,
            host=self.task.host,
            connect_timeout=self.task.connect_timeout,
        )
        self.member = member = Member(config)
        self.liveness.watch()
        with self.member.change():
            self.member.extra_status = self._status
            self.member.able = lambda: not self._unreached()
        incarnation = self.member.join()
        self.enter("waiting for the cluster")
        self.member.wait_for_view(
            timeout=self.task.config.timeouts.join_timeout + 60.0, on_waiting=self.progress.waiting
        )
        last_copy = LAST_COPY_TIMEOUTS * self.task.config.timeouts.heartbeat_timeout
        options = ClientOptions(
            job=self.task.job,
            secret=secret,
            certificates=self.task.own_certificates,
            worker=self.task.index,
            incarnation=incarnation,
            epoch=self.member.epoch,
            # Until the coordinator has given up the last copy of a shard, and made a new view.
            retry_seconds=max(RETRY_SECONDS, last_copy + _UNREACHED_SECONDS),
            rejoin_seconds=self.task.config.timeouts.rejoin_timeout,
            reaches_coordinator=lambda: member.away_since is None,
            share_memory=self.task.config.shares_memory,
            waiting=self._say_waiting,
            hurries=lambda: bool(self._signal or self.interrupted),
        )
        processes = None if group is None else together(setup.settings).processes(setup)
        if setup.outer is None:
            return ServerBackend(options, self.member, flat, processes)
        backend: Callable[..., ServerBackend] = BACKENDS.imported("local", "open")
        return backend(options, self.member, flat, setup.optimizer, processes)

    def _unreached(self) -> str:
        """Returns the servers for which this worker stays out of its job; "" for none."""
        silent = None if self.servers is None else self.servers.silent
        patience = _UNREACHED_SECONDS + self.task.config.timeouts.heartbeat_timeout
        if silent is None or not is_absent(time.monotonic(), silent[0], patience):
            return ""
        return silent[1]

    def _status(self) -> Mapping[str, int | str]:
        """Returns what each heartbeat adds to the reported status; in the member's thread."""
        unreached = self._unreached()
        return {**self.liveness.status(), **({UNREACHED: unreached} if unreached else {})}

    def _say_waiting(self, reason: str, names: Sequence[str], seconds: float) -> None:
        if self.draining and self.task.name in names:
            raise Fenced(f"the servers wait for {self.task.name}, which has retired", 0)
        if seconds >= _WAIT_SHOWN:
            self.progress.waiting_for_update(reason, names, seconds)
        unheard = self.interrupted is not None and not self.stop_sent
        if self.draining and (unheard or self.dismissed is not None or self.leads):
            raise WaitCutShort

    def come_back(self) -> None:
        """Waits until this worker is in the view again, as a new incarnation if it was given up."""
        if self.member is None or self.setup.process_group is not None:
            self._lost = True
            raise JobFailed(
                f"{self.task.name} was taken for lost, and a worker of several processes cannot "
                "come back: --max-restarts starts it again"
            )
        timeout = self.task.config.timeouts.rejoin_timeout
        self.backend.come_back(self.member.wait_until_back(timeout=timeout))

    # -- the worker's role -----------------------------------------------------------------------

    @property
    def epoch(self) -> str:
        """A random name of this start of the job, which no other start has."""
        return self._own_epoch if self.member is None else self.member.epoch

    @property
    def is_chief(self) -> bool:
        """Whether this worker leads; after its last update, whether it saves: see `LastChief`."""
        if self.last_chief.saves is not None:
            return self.last_chief.saves
        group = self.setup.process_group
        if group is not None and not group.is_chief:
            return False
        return self.member is None or self.leads

    @property
    def leads(self) -> bool:
        """Whether this is the live worker with the lowest index by the newest view."""
        return self.view is not None and self.view.chief == self.task.index

    @property
    def awaits_chief(self) -> bool:
        """Whether, after training, another worker is to save the last step and has not yet."""
        member = self.member
        if member is None or self.dismissed or self._cut_off or self.last_step_is_saved:
            return False
        if member.ended and member.over is None:
            return False
        return self.last_chief.awaits(self.view, self.backend.global_step)

    @property
    def last_step_is_saved(self) -> bool:
        over = None if self.member is None else self.member.over
        if over is not None and over.outcome != "failed":
            return True
        return self.view is not None and self.view.has_saved(self.backend.global_step)

    @property
    def _cut_off(self) -> bool:
        since = None if self.member is None else self.member.away_since
        return since is not None and time.monotonic() - since >= _REJOIN_SECONDS

    def wait_for_chief(self) -> bool:
        """Waits, after training, until another worker has saved the last step, or is lost."""
        member, began = self.member, time.monotonic()
        assert member is not None  # else this worker awaits nobody
        before = member.incarnation, self.life

        def changed() -> bool:
            replaced = (member.incarnation, self.life) != before
            return replaced or self.leads or bool(member.over) or not self.awaits_chief

        shown = began
        while not member.wait_until(changed, time.monotonic() + _WAIT_SHOWN):
            now = time.monotonic()
            if now - shown >= _WAIT_SHOWN_AGAIN:
                shown = now
                self.progress.waiting_for_update("the last checkpoint", self._chief, now - began)
        if self.last_step_is_saved:
            return True
        if member.over is not None:
            member.check()
        return (member.incarnation, self.life) == before

    def warn_if_unheard(self) -> None:
        """Warns where this worker ends though it has not heard that the last step is saved."""
        if self._cut_off and self.last_chief.awaits(self.view, self.backend.global_step):
            self.progress.warn(
                f"the coordinator has been away for {_REJOIN_SECONDS:.0f} s: this worker ends, and "
                f"does not know whether {', '.join(self._chief)} has saved the last step"
            )

    @property
    def _chief(self) -> tuple[str, ...]:
        workers = () if self.view is None else self.view.workers
        return tuple(f"worker:{worker.index}" for worker in workers[:1])

    def directory_lost(self) -> bool:
        """Waits for the news of why another worker has taken over the run directory."""
        member = self.member
        if member is None:
            return False
        before = member.incarnation, self.view_number

        def heard() -> bool:
            replaced = (member.incarnation, self.view_number) != before
            return replaced or self.last_step_is_saved or bool(member.over) or not self.leads

        found = member.wait_until(heard, time.monotonic() + _REJOIN_SECONDS)
        if member.over is not None and not self.last_step_is_saved:
            member.check()
        return found

    def last_step_saved(self) -> None:
        if self.member is not None and self.is_chief:
            self.member.tell((LastStepSaved(self.backend.global_step),))

    @property
    def view(self) -> View | None:
        return None if self.member is None else self.member.view

    @property
    def dismissed(self) -> str | None:
        """Why this worker is to leave the job, which goes on without it; None where it stays."""
        dismissed = None if self.member is None else self.member.dismissed
        return None if dismissed is None else dismissed.reason

    @property
    def life(self) -> int:
        return 0 if self.view is None else self.view.life

    @property
    def view_number(self) -> int:
        return 0 if self.view is None else self.view.number

    def interrupt(self, signal: str) -> None:
        """Takes a signal that asks this process to end. Safe in a signal handler.

        The coordinator decides whether this worker leaves alone or the job stops.
        """
        self._signal, self._signalled_at = signal, time.monotonic()
        if self.member is not None:
            self.member.signal(signal, stops=signal != "SIGTERM")
        elif self._joined:
            self.backend.interrupted = True

    @property
    def interrupted(self) -> str | None:
        """Why the job stops before its end, at a step that all agree on; None if it does not."""
        member = self.member
        if member is None:
            others = self._joined and self.backend.interrupted
            return self._signal or ("a signal to another process" if others else None)
        if member.interrupted is not None:
            return member.interrupted.reason
        unanswered = time.monotonic() - self._signalled_at >= _UNANSWERED_SECONDS
        if self._signal and unanswered and member.dismissed is None:
            return f"{self._signal} to {self.task.name}, which the coordinator has not answered"
        return None

    @property
    def was_interrupted(self) -> bool:
        over = None if self.member is None else self.member.over
        return over is not None and over.outcome == "interrupted"

    @property
    def ended_early(self) -> str | None:
        """Why this worker ends before its job has reached its end; None if it does not."""
        return self._signal if self.departed else self.interrupted

    @property
    def exit_status(self) -> int:
        return LEFT if self.departed else INTERRUPTED if self.interrupted else 0

    def depart(self) -> bool:
        """Returns whether the job goes on without this worker, and notes if a signal is why."""
        self.departed = bool(self._signal) and self.dismissed is not None
        return self.dismissed is not None

    def lost_with(self, error: BaseException) -> str:
        """Returns the name of the task whose loss ended the job, as far as this worker knows."""
        over = None if self.member is None else self.member.over
        if over is not None:
            return over.culprit if over.outcome == "failed" else ""
        # The coordinator cannot name a task that was lost together with it, such as ps:0 by hand.
        return error.server if isinstance(error, WireError) else ""

    def report(self, status: Mapping[str, float | str]) -> None:
        if self.member is not None:
            self.member.report({"state": self.state, **status})

    def enter(self, state: str, detail: str = "") -> None:
        self.state = state
        self.progress.state(state, detail)
        self.report({})

    # -- leaving --------------------------------------------------------------------------------

    def leave(self, outcome: Outcome, reason: str = "", *, reported: bool = True) -> None:
        """Ends this worker's part in the job, once; one that is not `reported` counts as lost."""
        if self.left:
            return
        self.left = True
        # The error itself is shown elsewhere.
        self.enter(outcome, "" if outcome == "failed" else reason)
        group = self.setup.process_group
        try:
            self.exits.close()
        finally:
            if self.member is not None:
                if reported:
                    self.member.leave(outcome, reason)
                self.member.close()
            if self._joined:
                self.backend.close()
            if group is not None and outcome != "failed":
                group.close(together=True)

    def fail(self, error: BaseException) -> None:
        """Tells the job that this worker failed, and why.

        Where the launcher will start it again, or it was cut off for too long, the job continues
        without it; so does one that was started by hand, where the servers refuse its model.
        """
        text = printable(str(error)[:LONGEST_TEXT], keep="\n")
        reason = f"{type(error).__name__}: {text}".strip()
        comes_back = self.task.restarts_left > 0 and describe(error).worth_a_restart
        cut_off = self._lost or isinstance(error, ConnectTimeout | NetworkLost | WireTimeout)
        mismatch = isinstance(error, ModelMismatchError) and self.state not in _TRAINED
        refused = mismatch and self.task.job == BY_HAND
        try:
            self.leave("failed", reason, reported=not (comes_back or cut_off or refused))
        except TriremeError as another:
            _log.warning("while failing: %s", another)
