"""A worker's training: exchanges updates for new values until the job ends for all workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
from torch import nn

from trireme.errors import ConfigurationError, Fenced, JobFailed, WaitTimeout
from trireme.ps.messages import GroupSpec, OptimizerSpec, Span, Stale
from trireme.ps.optimizers import name_of, spec_of
from trireme.ps.results import PushResult
from trireme.ps.snapshot import ModelState
from trireme.ps.termination import after_the_end
from trireme.session.checkpoint.worker_checkpoints import WorkerCheckpoints
from trireme.session.hyperparameters import Hyperparameters
from trireme.session.lifecycle import Lifecycle

__all__ = ["Trainer", "UpdateTimes"]


class UpdateTimes(msgspec.Struct, frozen=True):
    """When the push and the wait of an update began and ended, on `time.monotonic`.

    With prefetch the wait is for the previous push, and comes first.
    """

    push_began: float = 0.0
    push_ended: float = 0.0
    wait_began: float = 0.0
    wait_ended: float = 0.0


class Trainer:
    """Makes one worker's updates.

    Args:
        lifecycle: the lifecycle of the worker, which has joined.
        checkpoints: saves the job.
        hyper: the optimizer's hyper-parameters.

    Attributes:
        rejoined: the number of times that this worker has rejoined the job; examples dealt to it
            before are dealt to other workers.
        update_times: the times of the last update.
    """

    def __init__(
        self, lifecycle: Lifecycle, checkpoints: WorkerCheckpoints, hyper: Hyperparameters
    ) -> None:
        setup = lifecycle.setup
        self.rejoined = 0
        self.update_times = UpdateTimes()
        self._lifecycle = lifecycle
        self._setup = setup
        self._backend = lifecycle.backend
        self._checkpoints = checkpoints
        self._hyper = hyper
        self._progress = lifecycle.progress
        # Servers hold none of their values, and receive no gradients of them.
        self._frozen: list[nn.Parameter] = [
            parameter
            for group in setup.optimizer.param_groups
            for parameter in group["params"]
            if not parameter.requires_grad
        ]
        # Otherwise the servers do not run the user's optimizer.
        self._tells_hyper = lifecycle.member is not None and setup.outer is None
        self._prefetches = setup.settings.prefetches and setup.process_group is None
        self._under_way = False  # an exchange whose result is not received yet
        self._stop_sent = False

    # -- joining --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Registers the model, and receives the values, which the chief loads.

        Another worker may become chief before values are loaded; the chief at that time loads them.
        """
        lifecycle, checkpoints = self._lifecycle, self._checkpoints
        while not self._start(lambda: checkpoints.first_state() if lifecycle.is_chief else None):
            lifecycle.come_back()
        checkpoints.follow_view()
        checkpoints.take_first()
        if self._backend.stopping:
            self._retire()
        self._hyper.advance(self._backend.global_step)

    def _start(self, first: Callable[[], ModelState | None]) -> bool:
        """Receives the job's values; returns False where this worker must rejoin the job first."""
        try:
            self._backend.start(self._optimizer_spec(), self._setup.settings.rule, first)
        except Fenced:
            return False
        return True

    def _optimizer_spec(self) -> OptimizerSpec:
        optimizer = self._setup.optimizer
        if self._setup.outer is not None:
            return self._setup.outer
        if not self._lifecycle.task.servers and name_of(optimizer) is None:
            return OptimizerSpec(type(optimizer).__name__, ())
        return spec_of(optimizer)

    # -- training -------------------------------------------------------------------------------

    @property
    def has_ended(self) -> bool:
        """Whether another update would come after the end.

        With prefetch a worker may hear of the end between two steps, when it asks a server for
        something else: the step to come finishes the push that is under way.
        """
        return self._backend.stopping and not self._under_way

    def after_the_end(self) -> ConfigurationError | SystemExit:
        """Returns what a program is told that makes an update after training has ended.

        An interrupted job ends the program, as its loop would go on for nothing.
        """
        if self._lifecycle.interrupted is not None:
            return SystemExit(130)
        return after_the_end(self._lifecycle.task.index, self._backend.global_step)

    def stop(self, reason: str) -> None:
        """Asks that the job end at the next step at which every worker can."""
        self._stop_sent = True
        self._backend.stop(reason)

    def begin_step(self) -> None:
        """Meets the other processes that make the step together with this one."""
        self._checkpoints.ask_all()
        self._backend.begin_step()

    def begin_update(self, weight: float, examples: Sequence[Span]) -> None:
        """Announces the `update` that follows backward, so that gradients can leave meanwhile.

        The flat gradients are zero, and will be backward's own.
        """
        self._backend.begin(weight, hyper=self._hyper_now(), examples=examples)

    def update(
        self,
        weight: float,
        examples: Sequence[Span],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> PushResult | None:
        """Pushes the gradients in the flat buffers, and receives new values.

        With prefetch, the values are those of the previous push. If the answer to the previous
        push was to stop, the gradients are not pushed.

        Args:
            weight: the number of examples that the gradient is the mean of.
            examples: the positions of the examples, where the ledger dealt them.
            meanwhile: called while the push is under way; it must not use the servers.

        Returns:
            The result of the push, or of the previous push with prefetch; None where there is none.

        Raises:
            ConfigurationError: a parameter that was frozen when training began requires a gradient.
        """
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise self._unfrozen(parameter)
        self._checkpoints.ask_all()
        backend, liveness = self._backend, self._lifecycle.liveness
        try:
            if self._prefetches:
                result = self._push_ahead(weight, examples)
            else:
                began = time.monotonic()
                backend.push(weight, hyper=self._hyper_now(), examples=examples)
                pushed = time.monotonic()
                meanwhile()
                waiting = time.monotonic()
                liveness.excuse = "it waits for its answer"
                result = backend.wait()
                self.update_times = UpdateTimes(began, pushed, waiting, time.monotonic())
                if result is not None and result.notice:
                    self._hyper.warn(result.notice)
        except Fenced:
            result = self.rejoin()
        liveness.stepped()
        self._decided(result)
        if not self._stop_sent and not backend.stopping:
            reason = self._lifecycle.interrupted
            if reason is not None:
                self.stop(reason)
        self._checkpoints.step_made(exchanged=result is not None)
        return result

    def _push_ahead(self, weight: float, examples: Sequence[Span]) -> PushResult | None:
        """Waits for the previous push, and pushes without waiting; returns the previous result."""
        backend = self._backend
        basis, waiting = backend.step, time.monotonic()
        self._lifecycle.liveness.excuse = "it waits for its answer"
        before = backend.wait() if self._under_way else None
        began = time.monotonic()
        self._under_way = False
        if before is None or not before.stop:
            backend.push(weight, hyper=self._hyper_now(), examples=examples, pulled=basis)
            self._under_way = True
        self.update_times = UpdateTimes(began, time.monotonic(), waiting, began)
        return before

    def _unfrozen(self, parameter: nn.Parameter) -> ConfigurationError:
        """Returns the error that a frozen parameter requires a gradient now; names it."""
        named = self._setup.model.named_parameters()
        name = next((name for name, each in named if each is parameter), "of the optimizer")
        return ConfigurationError(
            f"parameter {name!r} requires a gradient now, and did not when training began: it has "
            "no place in the job and would not be trained. To unfreeze it later, let it require a "
            "gradient when training begins, and call requires_grad_(False) on it after that: it is "
            "left alone as long as it has no gradient"
        )

    def _hyper_now(self) -> tuple[GroupSpec, ...] | None:
        return self._hyper.now() if self._tells_hyper else None

    def _decided(self, result: PushResult | None) -> None:
        """Advances the schedule, and retires where the push was told to stop."""
        if self._hyper.scheduler is not None:
            self._hyper.advance(self._backend.global_step)
        if result is not None and result.stop:
            self._retire()

    def complete(self) -> PushResult | None:
        """Waits for the push that is under way, if there is one, and returns its result.

        A worker that trains locally exchanges its updates since the last exchange.
        """
        backend, under_way = self._backend, self._under_way
        self._under_way = False
        self._lifecycle.liveness.excuse = "it waits for its answer"
        try:
            result = backend.wait() if under_way else backend.complete()
        except Fenced:
            result = self.rejoin()
        self._decided(result)
        return result

    def _retire(self) -> None:
        """Announces that this worker makes no more updates, after it has shared its state.

        The chief may finish and leave at any moment afterwards, so which worker is chief is settled
        before.
        """
        self._lifecycle.settle_chief()
        self._checkpoints.buffers.publish()
        self._checkpoints.leave_local_state()
        self._backend.retire()

    def come_back(self) -> None:
        """Rejoins the job where no push was under way; the job may have ended meanwhile."""
        self._decided(self.rejoin())

    def rejoin(self) -> PushResult:
        """Rejoins the job, which had given this worker up, with the present values.

        Returns:
            The result of the push that was under way: it counts as stale.

        Raises:
            JobFailed: the job is over, or this worker has several processes.
            WaitTimeout: the coordinator did not accept the worker again.
        """
        self._under_way = False
        backend = self._backend
        self._lifecycle.come_back()
        steps = backend.pending_steps  # `start` resets it
        while not self._start(lambda: None):  # the job has given it up again
            self._lifecycle.come_back()
        self._progress.warn("this worker was taken for lost and comes back")
        self.rejoined += 1
        return PushResult(Stale(backend.step), backend.step, 0, backend.stopping, steps)

    # -- the end --------------------------------------------------------------------------------

    def finish(self) -> None:
        """Waits until training has ended on all workers; the chief saves the final step."""
        lifecycle, backend, checkpoints = self._lifecycle, self._backend, self._checkpoints
        lifecycle.settle_chief()
        lifecycle.liveness.excuse = "it has ended training"
        if not backend.stopping:
            checkpoints.buffers.publish()
        checkpoints.last_step = backend.global_step
        if backend.stopping or backend.together:
            self._drain()
        checkpoints.last_step = backend.global_step
        checkpoints.finish()

    def _drain(self) -> None:
        """Waits until every worker has made its last update, and receives the final values.

        Where the coordinator gives this worker up meanwhile and accepts it again, the servers wait
        until the new incarnation has retired too.
        """
        while True:
            self._lifecycle.draining = True
            try:
                self._backend.drain()
                return
            except Fenced as fence:
                told = fence
            finally:
                self._lifecycle.draining = False
            try:
                self._lifecycle.come_back()
                self._retire()
            except (JobFailed, WaitTimeout):  # the job needs nothing more from this worker
                self._progress.warn(
                    f"this worker was taken for lost after its last update: its model stays as it "
                    f"was at step {self._backend.global_step} ({told})"
                )
                return
