"""One worker of a job: joins it, exchanges updates for new values, and comes back."""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from trireme.errors import ConfigurationError, Fenced, Rejected
from trireme.launch.exit_reason import INTERRUPTED, LEFT
from trireme.ps.extra import ExtraRequest
from trireme.ps.messages import PushFields, Span, Stale
from trireme.ps.results import PushResult
from trireme.ps.snapshot import ModelState
from trireme.session.backends.base import Backend
from trireme.session.checkpoint.storage import Storage
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.observers.liveness import WAITS
from trireme.session.observers.progress import Progress
from trireme.session.worker.buffers import Buffers
from trireme.session.worker.checkpoints import WorkerCheckpoints
from trireme.session.worker.hyperparameters import Hyperparameters
from trireme.session.worker.lifecycle import Lifecycle
from trireme.session.worker.observer import observers_of
from trireme.session.worker.optimizer_parameters import OptimizerParameters
from trireme.session.worker.stopping import LastIteration, rolled_back
from trireme.tensors import digest, fill_local

_T = TypeVar("_T")


class UpdateTimes(msgspec.Struct, frozen=True):
    """When the push and the wait of an update began and ended; with prefetch the wait is first."""

    push_began: float = 0.0
    push_ended: float = 0.0
    wait_began: float = 0.0
    wait_ended: float = 0.0


class Worker:
    """A worker's part in its job: its updates, until the job ends for all workers."""

    backend: Backend  # these three from `start` on
    buffers: Buffers
    checkpoints: WorkerCheckpoints

    def __init__(self, setup: TrainingSetup, *, own_loop: bool = False) -> None:
        settings = setup.settings
        self.setup = setup
        self.task = settings.task
        shows = self.task.display != "none" and setup.shows_progress
        self.progress = Progress(sys.stdout if shows else None, max_steps=settings.max_steps)
        self.lifecycle = Lifecycle(setup, self.progress)
        self.storage = Storage(settings, self.progress)
        self.last_iteration = LastIteration()
        self.rejoined = 0  # times; examples dealt to it before are dealt to other workers
        self.passed = False  # whether the program's last loop has made all passes over its data
        self.update_times = UpdateTimes()
        self.push_under_way = False  # whose answer the next step receives, by prefetch
        self.life = 0  # how often the job was rolled back, as far as this worker knows
        self.lifecycle.exits.callback(self.storage.close)
        if setup.extension is not None:
            self.lifecycle.exits.callback(setup.extension.close)
        self.hyper = Hyperparameters(setup, self.progress)
        self.own_loop = own_loop  # whether the program computes the gradients
        self.observers = observers_of(self)
        self._parameters = OptimizerParameters(setup)
        self._pid = os.getpid()
        self._prefetches = settings.prefetches and setup.process_group is None
        self.first_step = 0  # the global step at which this process began

    @property
    def forked(self) -> bool:
        """Whether this is a child of the worker's process, which has its connections too."""
        return os.getpid() != self._pid

    def warn_as_chief(self, text: str) -> None:
        """Warns once in the job of what holds on all workers, which run the same program."""
        if self.lifecycle.is_chief:
            self.progress.warn(text)

    # -- joining --------------------------------------------------------------------------------

    def start(self) -> None:
        lifecycle, storage = self.lifecycle, self.storage
        self.backend = lifecycle.join()
        storage.epoch = lifecycle.epoch
        self.checkpoints = WorkerCheckpoints(lifecycle, storage)
        self.buffers = self.checkpoints.buffers
        self._receive_first()
        self.remember()
        self.first_step = self.global_step
        storage.begin(self.global_step, restored=self.checkpoints.restored_from is not None)
        if (extension := self.setup.extension) is not None:
            warning = extension.open(self._pull_extra, self.global_step)
            if warning:
                self.progress.warn(warning)
        for observer in self.observers.values():
            observer.on_start()

    def _receive_first(self) -> None:
        """Registers the model, and receives the values, which the chief loads.

        Another worker may become chief before values are loaded; the chief at that time loads them.
        """
        checkpoints = self.checkpoints
        while not self._start(checkpoints.first_state):
            self.lifecycle.come_back()
        self.life = self.lifecycle.life
        checkpoints.follow_view()
        checkpoints.take_first()
        if self.backend.stopping and not self.retire():
            self._receive_first()
            return
        self.hyper.advance(self.backend.global_step)

    def _start(self, first: Callable[[], ModelState]) -> bool:
        """Receives the job's values; returns False where this worker must rejoin the job first."""
        backend, setup = self.backend, self.setup
        backend.extension = setup.extension
        try:
            backend.start(
                setup.optimizer_spec,
                setup.settings.rule,
                lambda: first() if self.lifecycle.is_chief else None,
            )
        except Fenced:
            return False
        return True

    def _pull_extra(self, request: ExtraRequest) -> Any:
        return self.ask(lambda: self.backend.pull_extra(request))

    def ask(self, ask: Callable[[], _T]) -> _T:
        """Asks the servers; again, where the job has given this worker up meanwhile."""
        while True:
            try:
                return ask()
            except Fenced:
                self.come_back()

    # -- training -------------------------------------------------------------------------------

    @property
    def global_step(self) -> int:
        return self.backend.global_step

    @property
    def should_stop(self) -> bool:
        return self.backend.stopping

    def asked_to_stop(self) -> bool:
        """Returns whether training should end, and notes that the program's loop has asked."""
        return self.last_iteration.asked(self.backend.stopping or self.passed)

    def stop(self, reason: str) -> None:
        """Asks that the job end at the next step at which every worker can."""
        self.lifecycle.stop_sent = True
        self.ask(lambda: self.backend.stop(reason))

    def begin_step(self) -> bool:
        """Meets the processes of this step; returns whether the optimizer has other parameters."""
        if self.forked:
            raise ConfigurationError(
                "this process was forked from a worker of the job, and is none: only the process "
                "that has joined the job makes steps"
            )
        changed = self.take_parameters()
        self.checkpoints.ask_all()
        self.backend.begin_step()
        return changed

    def take_parameters(self) -> bool:
        """Takes over what the program has given the optimizer meanwhile; returns whether it has."""
        if not self._parameters.changed:
            return False
        if not self.backend.grows:
            self._parameters.check()
        if self.task.servers:
            self._add_parameters()
        else:
            self.backend.grow(self.setup.lay_out_again())
        self._parameters = OptimizerParameters(self.setup)
        return True

    def _add_parameters(self) -> None:
        setup, backend = self.setup, self.backend
        self._parameters.check_kept()
        self._check_writes()
        groups = setup.groups_now()
        computed = {  # the values that their gradients are of
            name: each.detach().clone()
            for group in groups
            for name, each in group
            if name not in setup.flat.parameters and each.grad is not None
        }
        while True:
            try:
                self._send_writes()
                backend.add_parameters(groups, setup.optimizer_spec)
                break
            except Fenced:
                self.come_back()
        for name, value in computed.items():
            parameter = setup.flat.parameters[name]
            if not torch.equal(parameter, value):
                if setup.settings.rule.synchronous:
                    raise ConfigurationError(
                        f"the first gradient of parameter {name!r}, which the optimizer was given, "
                        "was computed with other values than the chief's: seed torch before new "
                        "layers are built, or add them before zero_grad()"
                    )
                parameter.grad = None
        self.hyper.forget()
        setup.own_writes.remember(self.global_step)

    def write_values(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replaces values of trained parameters; see `Session.write_values`."""
        setup = self.setup
        for name, value in values.items():
            known = setup.flat.parameters.get(name)
            if known is None or known.shape != value.shape:
                has = "no such parameter" if known is None else f"shape {tuple(known.shape)} there"
                raise ConfigurationError(
                    f"write_values: {name!r} of shape {tuple(value.shape)}: the optimizer has {has}"
                )
        on_servers = setup.served
        with setup.own_writes.ours(values) if on_servers else nullcontext(), torch.no_grad():
            for held in (setup.trained, setup.flat) if on_servers else (setup.trained,):
                for name, value in values.items():
                    if name in held.parameters:
                        fill_local(held.parameters[name], value)
        if on_servers:
            written = {name: value.detach().cpu() for name, value in values.items()}
            digests = [(name, digest(written[name])) for name in sorted(written)]
            try:
                self.backend.write_values(written, zlib.crc32(repr(digests).encode()) | 1)
            except Fenced:
                self.come_back()
                self.write_values(values)

    def update(
        self,
        weight: float,
        examples: Sequence[Span],
        meanwhile: Callable[[], None] = lambda: None,
        *,
        counts: bool = True,
    ) -> PushResult | None:
        """Pushes the gradients in the flat buffers, and receives new values.

        With prefetch, the values are those of the previous push. If the answer to the previous
        push was to stop, the gradients are not pushed.
        """
        self._parameters.check_frozen()  # parts of a model follow the program within a step
        for observer in self.observers.values():
            observer.before_update(weight, examples)
        self._check_writes()
        self.checkpoints.ask_all()
        backend, lifecycle = self.backend, self.lifecycle
        try:
            self._send_writes()
            fields = PushFields(hyper=self.hyper.now(), examples=examples)
            if not counts:
                fields["steps"] = 0
            push = self._push_ahead if self._prefetches else self._push
            result = push(weight, fields, meanwhile)
        except Fenced:
            result = self.rejoin()
        except Rejected:
            self.remember()  # the answers have brought what others have learned
            raise
        lifecycle.liveness.stepped()
        for observer in self.observers.values():
            observer.after_update()
        result = self._decided(result)
        reason = None if lifecycle.stop_sent or backend.stopping else lifecycle.interrupted
        if reason is not None:
            self.stop(reason)
        self.updated(result)
        return result

    def updated(self, result: PushResult | None) -> None:
        """Ends an update: saves a checkpoint that is due; a worker that is dismissed retires."""
        backend, lifecycle = self.backend, self.lifecycle
        try:
            self.checkpoints.step_made(exchanged=result is not None)
        except Fenced:  # another worker is chief, and saves
            self.come_back()
        # Nothing is left to push, but with prefetch what is under way.
        if lifecycle.dismissed is not None and result is not None and not backend.stopping:
            backend.end()
            if not self.push_under_way:
                self.retire()  # the job needs nothing more from this worker
        self.remember()

    def _check_writes(self) -> None:
        if warning := self.setup.own_writes.check():
            self.progress.warn(warning)

    def _send_writes(self) -> None:
        """Sends what the program has written; servers of rounds have the values of its step."""
        backend = self.backend
        written = self.setup.own_writes.to_send(partial(backend.snapshot, state=False))
        if written is not None:
            backend.write_values(*written)

    def remember(self) -> None:
        self.setup.own_writes.remember(self.global_step)
        self._parameters.remember()

    def _push(
        self, weight: float, fields: PushFields, meanwhile: Callable[[], None]
    ) -> PushResult | None:
        backend, extension, began = self.backend, self.setup.extension, time.monotonic()
        if extension is not None:
            fields["extra"] = extension.request()
        fields["optimizer"] = getattr(self.setup.optimizer, "chosen", 0)
        backend.push(weight, **fields)
        pushed = time.monotonic()
        meanwhile()
        waiting = time.monotonic()
        self.lifecycle.liveness.excuse = WAITS
        result = backend.wait()
        if extension is not None:
            extension.bring(backend.brought)
        self.update_times = UpdateTimes(began, pushed, waiting, time.monotonic())
        if result is not None and result.notice:
            self.hyper.warn(result.notice)
        return result

    def _push_ahead(
        self, weight: float, fields: PushFields, meanwhile: Callable[[], None]
    ) -> PushResult | None:
        """Waits for the previous push, and pushes without waiting; returns the previous result."""
        backend = self.backend
        basis, waiting = backend.step, time.monotonic()
        self.lifecycle.liveness.excuse = WAITS
        before = backend.wait() if self.push_under_way else None
        began = time.monotonic()
        self.push_under_way = False
        if before is None or not (before.stop or self.lifecycle.dismissed is not None):
            fields["pulled"] = basis
            backend.push(weight, **fields)
            self.push_under_way = True
        self.update_times = UpdateTimes(began, time.monotonic(), waiting, began)
        return before

    def _decided(self, result: PushResult | None) -> PushResult | None:
        """Advances the schedule, and retires where the answer was to stop."""
        while True:
            if self.hyper.scheduler is not None:
                self.hyper.advance(self.backend.global_step)
            if result is None or not result.stop or self.retire():
                return result
            result = self.rejoin()

    def complete(self) -> PushResult | None:
        """Waits for the push that is under way, or exchanges local updates; returns the result."""
        backend, under_way = self.backend, self.push_under_way
        ended, before, life = backend.stopping, backend.global_step, self.life
        self.push_under_way = False
        self.lifecycle.liveness.excuse = WAITS
        try:
            result = backend.wait() if under_way else backend.complete()
        except Fenced:
            result = self.rejoin()
        result = self._decided(result)
        if ended and not backend.stopping:
            if self.life != life:
                raise rolled_back(before, backend.step, ended=self.task.name)
            backend.end()  # this answer is of a server that has taken another one's place
        self.remember()
        return result

    def retire(self) -> bool:
        """Announces that this worker makes no more updates; who is chief is settled before."""
        self.lifecycle.last_chief.settle(self.lifecycle.is_chief)
        try:
            self.checkpoints.buffers.publish()
            self.backend.leave_state()
            self.backend.retire()
        except Fenced:
            self.lifecycle.last_chief.reopen()
            return False
        return True

    def come_back(self) -> None:
        """Rejoins the job where no push was under way; the job may have ended meanwhile."""
        self._decided(self.rejoin())

    def rejoin(self) -> PushResult:
        """Rejoins the job, which had given this worker up, with the present values."""
        self.push_under_way = False
        backend, lifecycle, before = self.backend, self.lifecycle, self.backend.global_step
        lifecycle.last_chief.reopen()
        lifecycle.come_back()
        steps = backend.pending_steps  # `start` resets it
        # Where all copies of a shard were lost, no values are loaded any more.
        while not self._start(self.checkpoints.state_again):
            lifecycle.come_back()  # the job has given it up again
        if self.life == lifecycle.life:
            self.progress.warn("this worker was taken for lost and comes back")
        else:
            self.life = lifecycle.life
            self.checkpoints.take_first()
            self.hyper.rewind()
            self.progress.warn(str(rolled_back(before, backend.step)))
        self.rejoined += 1
        self.remember()
        return PushResult(Stale(backend.step), backend.step, 0, backend.stopping, steps)

    # -- the end --------------------------------------------------------------------------------

    def end(self) -> None:
        """Makes no more updates, though the job has no last step; `finish` waits for the others."""
        while self.task.servers and not self.backend.stopping and self.lifecycle.dismissed is None:
            if self.retire():
                self.backend.end()
            else:
                self.rejoin()

    def save(self) -> None:
        self.ask(self._save)

    def _save(self) -> None:
        if self.lifecycle.is_chief or self.setup.process_group is not None:
            self.checkpoints.save()

    def is_sound(self) -> bool:
        """Returns whether a gradient is to be used; else it is computed once more."""
        return all([observer.is_sound() for observer in self.observers.values()])

    def note(self, error: BaseException) -> None:
        """Has observers add to an error what is known of it."""
        for observer in self.observers.values():
            observer.on_fail(error)

    def fail(self, error: BaseException) -> None:
        """Tells the job why this worker failed; a second interrupt is no failure."""
        lifecycle = self.lifecycle
        ends = isinstance(error, SystemExit) and error.code in (None, 0, INTERRUPTED, LEFT)
        if ends or isinstance(error, KeyboardInterrupt):
            lifecycle.leave("interrupted", f"{type(error).__name__} in the script")
            return
        if lifecycle.state in ("training", "saving"):
            self.checkpoints.fail(error)
        lifecycle.fail(error)
