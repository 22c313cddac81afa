"""The life of a worker in its job: joins, initialises or restores, saves, stops, leaves.

    joining -> waiting for the cluster -> initialising or restoring -> training -> saving
            -> finished | failed | interrupted

The name, and what it looks after, are those of the classic `tf.train.Supervisor`.
"""

from __future__ import annotations

import io
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from trireme.cluster.messages import Outcome
from trireme.cluster.rendezvous import Member, MemberConfig
from trireme.cluster.view import View
from trireme.errors import ConfigurationError, Fenced, JobFailed, TriremeError, WireError
from trireme.launch.detect import TaskConfig
from trireme.launch.outcome import describe
from trireme.ps.client import Client, ClientOptions
from trireme.ps.ending import after_the_end
from trireme.ps.host_link import aggregator_address
from trireme.ps.local import LocalClient
from trireme.ps.messages import GroupSpec, OptimizerSpec, Span, Stale, Verdict
from trireme.ps.optim import name_of, spec_of
from trireme.ps.results import PushResult, ServerClock
from trireme.ps.snapshot import ModelState
from trireme.session.averager import Averager
from trireme.session.buffers import Buffers
from trireme.session.checkpoint import CheckpointData
from trireme.session.checkpointer import Checkpointer
from trireme.session.frozen import Frozen
from trireme.session.progress import Progress
from trireme.session.pulse import Pulse
from trireme.session.rescue import LACKS, Rescue
from trireme.session.storage import Storage
from trireme.session.training import Training
from trireme.wire.handshake import new_epoch

if TYPE_CHECKING:
    from trireme.session.crew import CrewFollower, CrewLeader
    from trireme.session.gang_client import GangClient

    _AnyClient = Client | Averager | LocalClient | GangClient | CrewLeader | CrewFollower

__all__ = ["Exchange", "Supervisor"]

_log = logging.getLogger(__name__)

_DISAGREEMENT = (
    "Each worker counts its own steps then; where they have made different numbers of them, they "
    "disagree, and the servers take the settings of each update."
)
_REJOIN_SECONDS = 30.0  # for the coordinator to take a worker in again that it had given up
_WAIT_SHOWN = 1.0  # seconds: servers tell all who wait, and nobody wants to read of milliseconds


class Exchange(msgspec.Struct, frozen=True):
    """When the parts of an update began and ended, on `time.monotonic`.

    With prefetch the wait, for the push before, comes first.
    """

    push_began: float = 0.0
    push_ended: float = 0.0
    wait_began: float = 0.0
    wait_ended: float = 0.0


class Supervisor:
    """Keeps one worker's part of a job going.

    Args:
        task: who this process is.
        training: what is trained.
        progress: told of each state, and of whom we wait for.
    """

    def __init__(self, task: TaskConfig, training: Training, progress: Progress) -> None:
        self.task = task
        self.state = "new"
        self.restored_from: int | None = None
        self.rejoined = 0  # how often; what was dealt before is dealt to others then
        self._training = training
        self._progress = progress
        self._member: Member | None = None
        self._own_epoch = new_epoch()  # where no coordinator has made one
        self._client: _AnyClient | None = None
        self._gang_client: GangClient | None = None  # the client, where a gang trains by itself
        self._connections: Client | None = None  # to the servers, whatever the client is
        self._averager: Averager | None = None
        self._copied: CheckpointData | None = None  # not written yet: see `_save_if_due`
        options = training.options
        self.storage = Storage(task, training.run_dir, options.checkpoint, progress)
        self._view: View | None = None  # the last one that was looked at
        self._last_step: int | None = None  # of the values that are here while training ends
        self._interrupted: str | None = None
        self._stop_sent = False
        self._chief_at_end: bool | None = None
        self._frozen = Frozen(training.model, training.optimizer)
        self._scheduler = _scheduler(training)
        # Counted here: not every scheduler counts for itself.
        self._scheduled = getattr(self._scheduler, "last_epoch", 0)
        self._left = False
        self._noted_change = False
        self._groups_then: list[tuple[Any, ...]] = []
        self._hyper_then: tuple[GroupSpec, ...] = ()
        self._comes_back = False
        self._under_way = False  # a push that nobody has waited for
        self.exchange = Exchange()  # of the last update
        self.pulse = Pulse()

    # -- joining --------------------------------------------------------------------------------

    def start(self) -> None:
        """Joins the job, and has the values of its first, or its restored, step.

        Raises:
            TriremeError: whatever keeps this worker from taking part; the job is told.
        """
        try:
            self._join()
            self.storage.epoch = self.epoch
            self.buffers = Buffers(self.task, self._training, self.client)
            self._checkpointer = Checkpointer(
                self.task, self._training, self.buffers, self._progress, self.epoch
            )
            self._initialise()
        except TriremeError as error:
            self.fail(error)
            raise
        except BaseException:
            self.storage.close()  # a console lives on, and may try again
            raise
        self.storage.begin(self.global_step, restored=self.restored_from is not None)
        if self.task.servers and self.is_chief:
            self._progress.message(self.storage.durability)

    def begin_training(self) -> None:
        """Says that training begins: from now on this process may be asked to stop."""
        self._enter("training")

    def _join(self) -> None:
        training, gang = self._training, self._training.gang
        if gang is not None and not self.task.servers:
            from trireme.session.gang_client import GangClient  # loads slowly: gangs only

            self._client = self._gang_client = GangClient(
                gang,
                training.part or training.flat,
                training.optimizer,
                clip_norm=training.options.clip_norm,
                agree_on_skips=training.options.nan == "skip",
                waiting=self._say_waiting,
            )
            return
        if gang is not None and not gang.is_chief:
            from trireme.session.crew import CrewFollower

            assert training.part is not None
            averages = training.outer is not None
            self._client = CrewFollower(gang, training.part, training.flat, averages=averages)
            return
        if not self.task.coordinator:
            self._client = LocalClient(training.flat, training.optimizer)
            return
        self._enter("joining", f"the coordinator at {self.task.coordinator}")
        secret = bytes.fromhex(self.task.secret)
        config = MemberConfig(
            coordinator=self.task.coordinator,
            job=self.task.job,
            role="worker",
            index=self.task.index,
            secret=secret,
            connect_timeout=self.task.connect_timeout,
        )
        self._member = Member(config)
        self.pulse.watch()
        self._member.observe(self.pulse.status)
        incarnation = self._member.join()
        self._enter("waiting for the cluster")
        self._member.wait_for_view(
            timeout=self.task.join_timeout + 60.0, on_waiting=self._progress.waiting
        )
        self._connections = connections = Client(
            ClientOptions(
                job=self.task.job,
                secret=secret,
                worker=self.task.index,
                incarnation=incarnation,
                epoch=self._member.epoch,
                share_memory=self.task.transport == "auto",
                aggregator=aggregator_address(self.task.coordinator)
                if self.task.host_aggregator
                else None,
                overlap=self.task.overlap,
                waiting=self._say_waiting,
                hurries=lambda: self.interrupted is not None,
            ),
            self._member,
            training.flat,
        )
        client: Client | Averager = connections
        if training.outer is not None:
            client = self._averager = Averager(connections, training.flat, training.optimizer)
        self._client = client
        if gang is not None:
            from trireme.session.crew import CrewLeader

            assert training.part is not None
            self._client = CrewLeader(gang, training.part, training.flat, client)

    def _say_waiting(self, reason: str, names: Sequence[str], seconds: float) -> None:
        if seconds >= _WAIT_SHOWN:
            self._progress.waiting_for_update(reason, names, seconds)

    def _initialise(self) -> None:
        """Shows the model; as chief loads the values; pulls them.

        Until values are loaded the chief may change: whoever is chief then, loads.
        """
        training, client = self._training, self.client
        while True:
            try:
                loaded = client.attach(self._optimizer_spec(), training.rule)
                if not loaded and self.is_chief:
                    client.load(self._first_state())
                client.pull()
                break
            except Fenced:
                self._renew()
        self._follow_view()
        if not self.is_chief:
            self.buffers.take()
        self._take_local_state()
        self.buffers.spread()
        if client.stopping:
            self._retire()
        if self._scheduler is not None:
            self._advance_scheduler(self._scheduler)

    def _optimizer_spec(self) -> OptimizerSpec:
        optimizer = self._training.optimizer
        if self._training.outer is not None:
            return self._training.outer
        if not self.task.servers and name_of(optimizer) is None:
            return OptimizerSpec(type(optimizer).__name__, ())
        return spec_of(optimizer)

    def _renew(self) -> None:
        """Waits until this worker is in the view; under a new incarnation if it was given up."""
        client = self.client
        if self._member is None or not isinstance(client, Client | Averager):
            raise JobFailed(
                f"{self.task.name} was taken for lost, and a worker of several processes cannot "
                "come back: --max-restarts starts it again"
            )
        incarnation = self._member.wait_until_back(timeout=_REJOIN_SECONDS)
        if incarnation > client.options.incarnation:
            client.renew(incarnation)

    def _first_state(self) -> ModelState:
        """Returns the chief's own first values, or the newest good checkpoint's."""
        training = self._training
        self.storage.open(self._view_number)
        checkpoint = self._checkpointer.find()
        if checkpoint is None:
            self._enter("initialising")
            training.flat.collect_values()
            state = ModelState(
                0, {n: p.detach().cpu() for n, p in training.flat.parameters.items()}
            )
        else:
            self._enter("restoring", f"step {checkpoint.step}")
            self.restored_from = checkpoint.step
            state = self._checkpointer.restore(checkpoint, self._averager)
        self.buffers.hand_out()
        return state

    def _take_local_state(self) -> None:
        if self._averager is not None and not self._averager.take_state() and self.global_step:
            self._progress.message(
                f"this worker's optimizer begins with fresh state at step {self.global_step}"
            )

    # -- training -------------------------------------------------------------------------------

    @property
    def client(self) -> _AnyClient:
        """The parameter server."""
        assert self._client is not None, "the supervisor was not started"
        return self._client

    @property
    def epoch(self) -> str:
        """Which start of the job this is: no two starts have the same, on whatever run directory.

        The coordinator makes it when the job starts. Without one, this process has its own.
        """
        return self._own_epoch if self._member is None else self._member.epoch

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's optimizer."""
        return self._training.optimizer

    @property
    def global_step(self) -> int:
        """The global step of the values that this worker has."""
        return self.client.step

    @property
    def bytes_pushed(self) -> int:
        """Bytes of updates that this worker has sent to the servers; see `Client`."""
        return self.client.bytes_sent

    @property
    def bytes_pulled(self) -> int:
        """Bytes of values that it has received from them; see `Client`."""
        return self.client.bytes_received

    @property
    def is_chief(self) -> bool:
        """Whether this is the live worker with the lowest index.

        After training, whether it was so at its end: the others do not take over from a chief that
        has done what was left to do and has gone.
        """
        if self._chief_at_end is not None:
            return self._chief_at_end
        if self._training.gang is not None and not self._training.gang.is_chief:
            return False
        if self._member is None:
            return True
        view = self._member.view
        return view is not None and view.chief == self.task.index

    def lags(self) -> dict[int, int]:
        """Returns by how many pushes each worker is behind the one that has made most of them.

        Nothing where this process does not talk to servers itself.
        """
        if not isinstance(self._client, Client):
            return {}
        made: dict[int, int] = {}
        for line in self._client.status()[0].workers:
            made[line.worker] = made.get(line.worker, 0) + line.applied + line.stale
        return {worker: max(made.values()) - count for worker, count in sorted(made.items())}

    @property
    def should_stop(self) -> bool:
        """Whether the job has reached its end; agreed by all workers."""
        return self.client.stopping

    @property
    def has_ended(self) -> bool:
        """Whether another update would come after the end.

        With prefetch a worker may hear of the end between two steps, when it asks a server for
        something else: the step to come finishes the push that is under way.
        """
        return self.client.stopping and not self._under_way

    def after_the_end(self) -> ConfigurationError | SystemExit:
        """Returns what a program is told that makes an update after training has ended.

        An interrupted job ends the program, as its loop would go on for nothing.
        """
        if self.interrupted is not None:
            return SystemExit(130)
        return after_the_end(self.task.index, self.global_step)

    @property
    def interrupted(self) -> str | None:
        """Why the job was asked to stop before its end; None if it was not."""
        if self._interrupted is None and self._member is not None:
            return self._member.stop_requested
        return self._interrupted

    def interrupt(self, reason: str) -> None:
        """Asks that the job be stopped at a step that all agree on. Safe in a signal handler."""
        self._interrupted = reason

    def stop(self, reason: str) -> None:
        """Asks that the job end at the next step at which every worker can."""
        self._stop_sent = True
        self.client.stop(reason)

    @property
    def updates_early(self) -> bool:
        """Whether `begin_update` may be of use."""
        return isinstance(self.client, Client) and self.client.pushes_early

    def begin_step(self) -> None:
        """Meets the other processes that make the step together with this one."""
        if self._gang_client is not None:
            self._gang_client.wants_save = self._wants_save()
            self._gang_client.begin_step()

    def _wants_save(self) -> bool:
        """Whether to save after the step to come: all take part, and the chief's clock counts."""
        return self.is_chief and self.storage.due(self.global_step + 1)

    def begin_update(self, weight: float, examples: Sequence[Span]) -> None:
        """Announces the `update` that follows backward, so that gradients can leave meanwhile.

        The flat gradients are zero, and will be backward's own.
        """
        if isinstance(self.client, Client):
            self.client.begin(weight, hyper=self._hyper(), examples=examples)

    def update(
        self,
        weight: float,
        examples: Sequence[Span],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> PushResult | None:
        """Pushes the gradients that are in the flat buffers, and has the new values.

        With prefetch, the values are those that the push before brought back; and if that one was
        told to stop, these gradients are not pushed at all.

        Args:
            weight: how many examples the gradient is the mean of.
            examples: which they are, where the ledger dealt them.
            meanwhile: what can be done while the push is under way, without the servers.

        Returns:
            What became of this push, with prefetch of the one before; None where there was none.
        """
        client = self._client
        assert client is not None, "the supervisor was not started"
        self._frozen.check()
        if self._averager is not None:
            self._averager.wants_save = self._wants_save()
        try:
            result = self._exchange(client, weight, examples, meanwhile)
        except Fenced:
            result = self.rejoin()
        self.pulse.stepped()
        self._decided(result)
        if not self._stop_sent and not client.stopping:
            reason = self.interrupted
            if reason is not None:
                self._stop_sent = True
                client.stop(reason)
        if self._member is not None and self._member.view is not self._view:
            self._follow_view()
        if self.storage.scheduled:
            self._save_if_due(exchanged=result is not None)
        return result

    def _exchange(
        self,
        client: _AnyClient,
        weight: float,
        examples: Sequence[Span],
        meanwhile: Callable[[], None],
    ) -> PushResult | None:
        if not isinstance(client, Client) or not self._training.prefetch:
            began = time.monotonic()
            client.push(weight, hyper=self._hyper(), examples=examples)
            pushed = time.monotonic()
            meanwhile()
            waiting = time.monotonic()
            self.pulse.excuse = "it waits for its answer"
            result = client.wait()
            self.exchange = Exchange(began, pushed, waiting, time.monotonic())
            if result is not None and result.notice and not self._noted_change:
                self._noted_change = True
                self._progress.warn(result.notice)
            return result
        basis, waiting = client.step, time.monotonic()
        self.pulse.excuse = "it waits for its answer"
        before = client.wait() if self._under_way else None
        began = time.monotonic()
        self._under_way = False
        if before is None or not before.stop:
            client.push(weight, hyper=self._hyper(), examples=examples, pulled=basis)
            self._under_way = True
        self.exchange = Exchange(began, time.monotonic(), waiting, began)
        return before

    def _decided(self, result: PushResult | None) -> None:
        """Does what follows from a push that was decided."""
        if self._scheduler is not None:
            self._advance_scheduler(self._scheduler)
        if result is not None and result.stop:
            self._retire()

    def complete(self) -> PushResult | None:
        """Waits for the push that is under way, if there is one; returns what became of it.

        A worker that trains by itself exchanges what it has learned since the last exchange.
        """
        client = self.client
        averages = self._training.outer is not None
        if not self._under_way and not averages:
            return None
        self._under_way = False
        self.pulse.excuse = "it waits for its answer"
        try:
            if averages:
                assert not isinstance(client, Client | LocalClient)
                result = client.complete()
            else:
                result = client.wait()
        except Fenced:
            result = self.rejoin()
        self._decided(result)
        return result

    def _retire(self) -> None:
        """This worker makes no more updates: what the others want of it, it leaves them first."""
        self.buffers.share()
        if self._averager is not None:
            self._averager.leave_state()
        self.client.retire()

    def rejoin(self) -> PushResult:
        """Goes on with today's values: this worker had been taken for lost.

        Returns:
            The verdict of what was under way: it counts as stale.

        Raises:
            JobFailed: the job is over, or this worker has several processes.
            WaitTimeout: the coordinator did not take it in again.
        """
        self._under_way = False
        while True:
            self._renew()
            client = self.client
            assert isinstance(client, Client | Averager)
            steps = client.made if isinstance(client, Averager) else 1  # before `pull` begins anew
            try:
                client.attach(self._optimizer_spec(), self._training.rule)
                pulled = client.pull()
                break
            except Fenced:
                continue  # given up once more
        self._progress.warn("this worker was taken for lost and comes back")
        self.rejoined += 1
        return PushResult(Stale(pulled.step), pulled.step, 0, pulled.stop, steps)

    def _hyper(self) -> tuple[GroupSpec, ...] | None:
        """Returns the hyper-parameters as they are now; the same object while they are the same.

        None where the user's optimizer is not the servers'.
        """
        if self._member is None or self._training.outer is not None:
            return None
        groups = self._training.optimizer.param_groups
        now = [tuple(group.values()) for group in groups]  # the parameters are the same objects
        if now != self._groups_then:
            if self._groups_then and self._scheduler is None:
                self._note_change()
            self._groups_then = now
            self._hyper_then = spec_of(self._training.optimizer).groups
        return self._hyper_then

    def _note_change(self) -> None:
        """Says once what it means that the program itself changes the learning rate.

        In rounds the servers compare what workers say of it.
        """
        if self._noted_change or self._training.rule.synchronous or self.task.workers == 1:
            return
        self._noted_change = True
        self._progress.warn(
            f"the program changes the optimizer's learning rate, or another setting, by itself. "
            f"{_DISAGREEMENT} Let a session count the job's steps (scheduler=...), or set the rate "
            "by global_step"
        )

    def _advance_scheduler(self, scheduler: Any) -> None:
        """Brings the learning rate to the global step: schedules count the job's steps."""
        while self._scheduled < self.global_step:
            scheduler.step()
            self._scheduled += 1

    # -- saving ---------------------------------------------------------------------------------

    @property
    def _view_number(self) -> int:
        """Of the view in which this worker is what it is."""
        view = self._member.view if self._member is not None else None
        return 0 if view is None else view.number

    def _follow_view(self) -> None:
        """Has the run directory as chief, and gives it back as anything else."""
        self._view = self._member.view if self._member is not None else None
        self.storage.follow(self._view_number, chief=self.is_chief)

    def _save_if_due(self, *, exchanged: bool) -> None:
        """Saves where that is due.

        Of workers that train by themselves, each leaves the state of its optimizer right after the
        exchange whose step is saved. When the next one is over all of them have, and the copy that
        was made of that step is written.

        Args:
            exchanged: whether the servers have answered since the last time.
        """
        asks = self._averager or self._gang_client
        if exchanged:
            self._write()
        self.storage.look()
        due = self.storage.due(self.global_step) if asks is None else asks.saves
        if due:
            self.storage.begun(self.global_step)
            if self.is_chief or self.together:
                self._copy()
        if self._averager is None:
            self._write()

    def save(self) -> None:
        """Copies a consistent state and has it written in the background."""
        if self._averager is not None:
            self._averager.leave_state()
        self._copy()
        self._write()

    def _copy(self) -> None:
        """Copies a consistent state; what was copied before is written first."""
        if not self.storage.scheduled:
            return
        self._write()
        with self.pulse.excused("it saves"):
            state = self.client.snapshot(state=True)
        if not self.storage.has(state.step) and self.is_chief:  # else it only takes part
            self._copied = self._checkpointer.checkpoint_of(state)

    def _write(self, *, last: bool = False) -> None:
        """Has what was copied written in the background; the last one, before this returns."""
        data = self._copied
        if data is None:
            return
        self._copied = None
        if self._averager is not None:
            data = self._checkpointer.with_local(data, self._averager)
        if last:
            self.storage.submit_last(data, self._view_number)
        else:
            self.storage.submit(data, self._view_number)

    def finish_training(self) -> None:
        """Training has ended: waits until it has for everybody; the chief saves."""
        self._chief_at_end = self.is_chief
        self.pulse.excuse = "it has ended training"
        if not self.should_stop:
            self.buffers.share()
        self._last_step = self.global_step
        if self.should_stop or self.together:
            self._drain()
        self._last_step = self.global_step
        self.buffers.settle()
        if self.is_chief and self._training.run_dir is not None:
            self._enter("saving")
            self._write()
            self.storage.settle(at_the_end=True)
            if self._averager is not None:
                self._averager.leave_state()
            self._copy()
            self._write(last=True)

    def _drain(self) -> None:
        """Waits until every worker has made its last update, and has the values then."""
        try:
            self.client.drain()
        except Fenced as fence:  # nothing is asked of this worker any more
            self._progress.warn(
                f"this worker was taken for lost after its last update: its model stays as it was "
                f"at step {self.global_step} ({fence})"
            )

    def take_saved(self) -> list[Path]:
        """Returns the checkpoints that were completed since this was last asked."""
        return self.storage.take_completed()

    # -- leaving --------------------------------------------------------------------------------

    def leave(self, outcome: Outcome, reason: str = "", details: str = "") -> None:
        """Ends this worker's part of the job. May be repeated: the first one counts."""
        if self._left:
            return
        self._left = True
        # Why it failed is shown by whoever shows the error itself.
        self._enter(outcome, "" if outcome == "failed" else reason)
        try:
            self.storage.close()
        finally:
            if self._member is not None:
                if not self._comes_back:
                    self._member.leave(outcome, reason, details)
                self._member.close()
            if self._client is not None:
                self._client.close()
            gang = self._training.gang
            if gang is not None and outcome != "failed":
                gang.close(together=True)

    @property
    def together(self) -> bool:
        """Whether all processes of the job make each step together, without servers."""
        return self._gang_client is not None

    def mean(self, values: Mapping[str, float], *, counts: bool) -> dict[str, float]:
        """Returns the means over the replicas that step together; elsewhere this worker's own."""
        if self._gang_client is not None:
            return self._gang_client.mean(values, counts=counts)
        return dict(values)

    def fail(self, error: BaseException) -> None:
        """Tells the job that this worker failed, and why.

        Unless the launcher will start it again: then only its connection breaks, and the job goes
        on without this incarnation.
        """
        self._rescue(error)
        text = io.StringIO()
        traceback.print_exception(error, file=text)
        reason = f"{type(error).__name__}: {error}".strip()
        self._comes_back = self.task.restarts_left > 0 and describe(error).worth_a_restart
        try:
            self.leave("failed", reason, text.getvalue())
        except TriremeError as another:
            _log.warning("while failing: %s", another)

    def _rescue(self, error: BaseException) -> None:
        """Saves the values that are here where a server was lost, and says what is lost with it."""
        lost = self._lost_with(error)
        if (
            not lost.startswith(("ps:", "coordinator:"))
            or self.state not in ("training", "saving")
            or self._left
            or describe(error).kind != "victim"
        ):
            return
        if self._averager is not None:
            self._averager.go_back()
        step = self.global_step if self._last_step is None else self._last_step
        rescue = Rescue(
            lost,
            step,
            self._view_number,
            self.is_chief,
            self._checkpointer.lost_with_servers(),
            self._rescued(lost, step),
        )
        try:
            loss = rescue.save(self.storage)
        except Exception as failure:  # nothing shall hide why the job is over
            loss = f"and the values could not be saved: {type(failure).__name__}: {failure}"
        if loss:
            said = f"{lost} was lost at step {step} or a little later: {loss}"
            self._progress.warn(said)
            if isinstance(error, JobFailed | WireError):
                error.loss = said

    def _lost_with(self, error: BaseException) -> str:
        """Returns the name of the task with which the job was lost, as far as this worker knows."""
        over = None if self._member is None else self._member.over
        if over is not None:
            return over.culprit if over.outcome == "failed" else ""
        # Who was lost together with its coordinator, as ps:0 by hand, is named by nobody else.
        return error.server if isinstance(error, WireError) else ""

    def _rescued(self, lost: str, step: int) -> Callable[[dict[str, Any]], CheckpointData]:
        """Returns what makes a checkpoint of the values that are here."""
        values = self._training.flat.parameters

        def made(before: dict[str, Any]) -> CheckpointData:
            state = ModelState(step, {name: p.detach().cpu().clone() for name, p in values.items()})
            lacks = list(self._checkpointer.lost_with_servers())
            kept = {name: before.get(name, {}) for name in ("consumed", "sizes")}
            more = {LACKS: lacks, "rescued_from": lost, **kept}
            return self._checkpointer.checkpoint_of(state, more)

        return made

    def trace(self, action: Literal["start", "stop", "read"]) -> list[ServerClock]:
        """As `Client.trace`; nothing where this process has no connection to servers."""
        return [] if self._connections is None else self._connections.trace(action)

    @property
    def verdicts(self) -> Sequence[Verdict]:
        """What each server said of the last push; nothing as for `trace`."""
        return () if self._connections is None else self._connections.verdicts

    def report(self, status: Mapping[str, float | str]) -> None:
        """Says how it goes with the next heartbeat."""
        if self._member is not None:
            self._member.report({"state": self.state, **status})

    def _enter(self, state: str, detail: str = "") -> None:
        self.state = state
        self._progress.state(state, detail)
        if self._member is not None:
            self._member.report({"state": state})


def _scheduler(training: Training) -> Any:
    make = training.options.scheduler
    if make is None:
        return None
    if isinstance(make, torch.optim.lr_scheduler.LRScheduler):
        scheduler: Any = make
        if make.optimizer is not training.optimizer:
            raise ConfigurationError(
                f"the {type(make).__name__} given as scheduler is over another optimizer than the "
                "session's: give the session that very optimizer too, or a function that builds "
                f"the scheduler: scheduler=lambda optimizer: {type(make).__name__}(optimizer, ...)"
            )
    else:
        scheduler = make(training.optimizer)
    if not callable(getattr(scheduler, "step", None)):
        raise ConfigurationError(
            f"the function given as scheduler returned {scheduler!r}: it must return a scheduler "
            "of torch.optim.lr_scheduler"
        )
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ConfigurationError(
            "ReduceLROnPlateau needs a metric at each step, which a session cannot give it: use a "
            "schedule of the step count, such as ExponentialLR or OneCycleLR"
        )
    # Servers make the steps, and a restored schedule is moved on before any: torch would warn.
    training.optimizer._opt_called = True  # type: ignore[attr-defined]
    return scheduler
