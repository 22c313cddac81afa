"""The job of a program's own loop: what the optimizers that `distribute` returns have in common."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from trireme.errors import ConfigurationError, TriremeError
from trireme.launch.process_setup.leaving import leave
from trireme.launch.process_setup.program import report_failure
from trireme.loops.batch_watch import BatchWatch
from trireme.loops.gradient_watch import GradientWatch
from trireme.loops.kept_state import KeptState
from trireme.loops.loop_data import LoopData
from trireme.loops.program_end import ProgramEnd
from trireme.ps.optimizers import JointOptimizer
from trireme.session.model.module_names import called_modules
from trireme.session.model.trained import clip
from trireme.session.observers.liveness import line_of_program
from trireme.session.result import StepResult
from trireme.session.worker.job import Job


class LoopJob:
    """A worker's part of a job whose loop is the program's own."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self.job = job
        self.model = model
        self._worker = worker = job.worker
        self._setup = setup = worker.setup
        if setup.part is None:
            setup.flat.keeps_views = False  # the loop may look at gradients, and change them
        self._averaged: set[int] = set()  # the optimizers whose gradients are the mean already
        self._watch = GradientWatch(())
        self._take_parameters()
        self._batches = BatchWatch(model)
        self.loss: torch.Tensor | float | None = None  # that the program has logged last
        self.data = LoopData(job, self._batches.examples)
        self.kept = KeptState(worker)
        self._restored = worker.checkpoints.restored_from
        self._life = worker.life  # how often the job had gone back
        self._ready = time.monotonic()  # since when the program computes the next step
        self._size = 0  # of the batches of the last step; below 0 after a warning of sizes
        self._began = False  # the step that the next update is of
        if setup.part is not None and worker.backend.together:
            for module in (each for held in setup.part.modules for each in called_modules(held)):
                module.register_forward_pre_hook(self._begin_with_forward)
        self._end = ProgramEnd(self._explain)
        self._end.watch()
        atexit.register(self._at_exit)
        job.before_end = self._end_together
        job.exits.callback(self._release)
        _JOINED.append(self)

    def _take_parameters(self) -> None:
        self.parameters = self._setup.parameters_of_each()
        self._watch.close()
        mesh = self._setup.settings.mesh  # FSDP averages gradients in backward, others in `step`
        here = self._setup.reducer is not None and mesh.dp > 1 and mesh.fsdp == 1
        if here or self._averages_on_servers:
            self._watch = GradientWatch(parameter for each in self.parameters for parameter in each)

    def may_update(self) -> bool:
        self._end.goes_on()
        return self.job.may_update()

    def _begin_with_forward(self, module: nn.Module, args: object) -> None:
        """Begins a step before its first forward pass, which waits for the other processes."""
        if module.training and torch.is_grad_enabled():
            self._begin_step()

    def _begin_step(self) -> None:
        if not self._began:
            self._began = True
            if self._worker.begin_step():
                self._take_parameters()

    def take_parameters(self) -> None:
        """Takes over what the optimizer was given, with servers: before a gradient is computed."""
        worker = self._worker
        ready = worker.task.servers and worker.backend.grows and not worker.backend.stopping
        if ready and worker.take_parameters():
            self._take_parameters()

    def update(
        self, optimizer: int, examples: float | None, closure: Callable[[], Any] | None = None
    ) -> None:
        """Makes one update of the job from the gradients of one optimizer, by its index.

        They are the mean of `examples`, by default of the batches that the job has dealt. A closure
        recomputes loss and gradients, where the optimizer calls it in its step.
        """
        weighed = examples is not None
        examples = self.data.examples(examples)
        if not weighed:
            self._check_dealt()
        if closure is not None:
            closure = partial(self._evaluated, closure, examples)
        worker = self._worker
        self._follow_life()
        worker.backend.closure = closure
        began, computed = self._ready, time.monotonic()
        averaged = optimizer in self._averaged
        self._check_gradients(optimizer)
        self._averaged.discard(optimizer)
        with self._chosen(optimizer):
            if not averaged:
                self._begin_step()
                self._reduce(examples)
            self._clip()
            self._began = False
            with self._leaving_others(optimizer):
                pushed = worker.update(examples, self.data.spans())
            self.data.updated()
            self.drop_extra_gradients()
        self._follow_life()
        restored, self._restored = self._restored, None
        if restored and not (self.data.deals or worker.hyper.counted or self.kept.held):
            worker.progress.warn(
                f"the job goes on at step {restored}, and this loop at its beginning: its epochs "
                "and schedules are not restored. Let the job deal the data (optimizer.epochs, "
                "optimizer.prepare), or begin at optimizer.loop_steps"
            )
        self._batches.compare(worker)
        number = self._batches.take_examples()
        if not (weighed or self.data.deals):
            self._check_sizes(number)
        result = StepResult(self.loss, [], {}, number, worker.global_step)
        if pushed is not None:
            result.decide(pushed)
        self._ready = time.monotonic()
        result.seconds = self._ready - began
        self.job.recorder.step(result, began, computed)
        if worker.storage.completed:
            self.job.announce_checkpoints()
        if worker.lifecycle.exit_status or worker.lifecycle.dismissed:
            # At exit this process leaves the job first: it calls the other functions itself then.
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)
        self._watch.forget(self.parameters[optimizer])

    def _follow_life(self) -> None:
        """Puts back what the loop keeps, where the job has gone back to an earlier step."""
        if self._life != self._worker.life:
            self._life = self._worker.life
            self.kept.go_back()
            self._worker.progress.warn(
                "of what this loop has beside the model, such as its schedules and counters, only "
                "that goes back with the job which optimizer.keep has"
            )

    def _check_sizes(self, number: int) -> None:
        """Warns, once, where batches differ in size and the mean over workers takes them alike."""
        before, sizes = self._size or number, self._batches.sizes
        if not self._weighs_workers or self._size < 0 or not number:
            return
        # Twice as many are those of a step that a GradScaler has skipped, too.
        self._size = -1 if number % before or len(sizes) > 1 else before
        if self._size < 0:
            small, *_, large = sorted(sizes) if len(sizes) > 1 else sorted([before, number])
            self._worker.progress.warn(
                f"the batches of this loop differ in size ({small} and {large} examples), "
                "and the gradient of each worker counts alike in the mean: where those of one step "
                "differ, that is not the mean over all examples. Say "
                "optimizer.step(examples=len(batch)), or the number of tokens where the loss is "
                "their mean; or let the job deal the data (optimizer.epochs)"
            )

    def _check_dealt(self) -> None:
        """Warns, once, where the end of an epoch makes steps that one process does not make."""
        sizes, what = [len(batch) for batch in self.data.used], ""
        if len(set(sizes)) > 1:
            what = f"has batches of {min(sizes)} to {max(sizes)} examples: it counts by their sum"
        elif self.data.mixes_epochs and self._averages_on_servers:
            what = "has batches of two epochs, as this loop asks for batches ahead of its steps"
        if what and self._weighs_workers and self._size >= 0:
            self._size = -1
            self._worker.progress.warn(
                f"a step at the end of an epoch {what}, which one process does not make. "
                "DataLoader(drop_last=True), or sizes that divide an epoch, make both the same"
            )

    @property
    def _weighs_workers(self) -> bool:
        averages = self._averages_on_servers or self._setup.reducer is not None
        return averages and self._setup.replicas > 1

    def synchronize(self, optimizer: int, examples: float | None) -> None:
        """Averages the gradients over the processes that make the step together with this one."""
        if self._setup.reducer is None or self._worker.backend.stopping:
            return
        examples = self.data.examples(examples)
        self._check_gradients(optimizer)
        with self._chosen(optimizer):
            self._begin_step()
            self._reduce(examples)
        self._averaged.add(optimizer)
        self._watch.moved(self.parameters[optimizer])

    def _reduce(self, examples: float) -> None:
        setup, reducer = self._setup, self._setup.reducer
        if reducer is None:
            return
        if setup.part is None:
            setup.flat.gather_gradients()
        factor = reducer.scale_factor(examples)()
        setup.agree_on_optimizer()
        if factor != 1.0:
            setup.trained.scale_gradients(factor)
        reducer.begin()
        reducer.finish()

    def _clip(self) -> None:
        limit = self._setup.settings.clip_norm
        if limit is not None:
            clip(self._setup.trained, limit, self._setup.extension)

    def _evaluated(self, closure: Callable[[], Any], examples: float) -> Any:
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            self._reduce(examples)
            self._clip()
        group = self._setup.process_group
        if group is None or not isinstance(loss, (torch.Tensor, float)):
            return loss
        mine = loss.item() if isinstance(loss, torch.Tensor) else loss
        total, count = group.total([mine * examples, examples])()
        mean = total / count if count else 0.0
        return loss.new_tensor(mean) if isinstance(loss, torch.Tensor) else mean

    @property
    def _averages_on_servers(self) -> bool:
        settings = self._setup.settings
        several = settings.task.servers > 0 and settings.task.workers > 1
        return several and settings.rule.synchronous and self._setup.outer is None

    def _check_gradients(self, optimizer: int) -> None:
        """Warns, once, where the loop has changed gradients that are this process's alone."""
        written, hooked = self._watch.written(self.parameters[optimizer]), self._watch.hooked
        if not (written or hooked):
            return
        advice = (
            "give distribute(..., clip_norm=...) and clip nothing in the loop; instead of a "
            "GradScaler, compute in bfloat16"
        )
        if not self._averages_on_servers:
            if optimizer in self._averaged and not hooked:
                return
            advice = f"call optimizer.synchronize() right after backward, or {advice}"
        self._watch.close()
        if self._worker.lifecycle.is_chief:  # all of them run the same program
            what = "written to the gradients (clip_grad_norm_, clip_grad_value_, GradScaler)"
            if not written:
                what = "changed the gradients by a hook (register_hook)"
            self._worker.progress.warn(
                f"before the step at {line_of_program()}, the program has {what}: they are of this "
                "worker alone, and are averaged later. To change their mean, as one process does, "
                f"{advice}"
            )

    def drop_extra_gradients(self) -> None:
        """Drops the gradients of extra values, also where a loop calls the model's `zero_grad`."""
        if self._setup.extension is not None:
            self._setup.extension.forget()

    @contextmanager
    def _chosen(self, optimizer: int) -> Iterator[None]:
        """Chooses one of several optimizers for the block, which sees its gradients alone."""
        joint = self._setup.optimizer
        if not isinstance(joint, JointOptimizer):
            yield
            return
        joint.chosen = optimizer
        others = [p for i, each in enumerate(self.parameters) if i != optimizer for p in each]
        kept = [parameter.grad for parameter in others]
        if self._setup.part is None:  # the flat gradients are overwritten meanwhile
            kept = [None if gradient is None else gradient.clone() for gradient in kept]
        for parameter in others:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(others, kept, strict=True):
                parameter.grad = gradient
            self._watch.moved(others)

    def _leaving_others(self, optimizer: int) -> AbstractContextManager[None]:
        """Lets graphs over the values of the other optimizers live on, unless these change.

        A GAN's loop may go back through one fake batch for both of its steps.
        """
        others = [p for i, each in enumerate(self.parameters) if i != optimizer for p in each]
        if not others or not self._worker.task.servers or self._setup.part is not None:
            return nullcontext()
        return self._setup.flat.left_alone(others)

    def _end_together(self) -> None:
        """Takes part, after this loop has ended, until those of the worker's other processes have.

        Without servers every process makes the same number of steps, which the backend checks.
        """
        worker, group, reducer = self._worker, self._setup.process_group, self._setup.reducer
        if group is None or reducer is None or group.mesh.sharded or worker.backend.together:
            return
        while not worker.backend.stopping:  # a step without examples if others make one with some
            worker.begin_step()
            if group.count(0.0)() == 0.0:
                group.vote()  # all loops have ended: there is no such step
                return
            self._setup.agree_on_optimizer(takes_part=False)
            self._setup.flat.zero_gradients()
            self._setup.flat.gather_gradients()
            reducer.begin()
            reducer.finish()
            worker.update(0.0, ())
            self._batches.compare(worker)

    def _explain(self, error: BaseException | None) -> TriremeError | None:
        if error is None:
            self.job.leave(None)
            return None
        self._worker.note(error)
        task, rule = self._worker.task, self._setup.settings.rule
        mixed = task.servers and task.workers > 1
        mixed = mixed and not (rule.synchronous and self._setup.outer is None)
        if mixed and len(self.parameters) > 1 and _OLD_GRAPH in str(error):
            return ConfigurationError(
                "backward went through a graph that is older than a step in between, which has "
                "brought other values than it was computed from. Those of the other optimizers "
                "come with each step too, as other workers change them meanwhile: compute their "
                "outputs again after the step (fake = generator(noise)), make both backward passes "
                "before the first step, or train with --strategy sync"
            )
        group = self._setup.process_group
        return None if group is None else group.why_broken(error)

    def _at_exit(self) -> None:
        """Leaves the job. Nothing that a function at exit raises changes the exit status."""
        failed = self._end.error
        try:
            self.job.leave(failed)
        except KeyboardInterrupt:
            pass  # the worker has left, and nothing else is to come
        except SystemExit:
            leave(self._worker.lifecycle.exit_status)
        except Exception as error:
            if failed is not None:
                raise
            leave(report_failure(error, "", None))

    def _release(self) -> None:
        _JOINED.remove(self)
        self._batches.close()
        self._watch.close()
        self.data.close()
        self._end.forget()
        atexit.unregister(self._at_exit)


_OLD_GRAPH = "modified by an inplace operation"
"""What autograd says of a graph over values that were written to since."""

_JOINED: list[LoopJob] = []
"""The job that this process takes part in; a process is in one job at a time."""


def refuse_second() -> None:
    """Checks that this process is in no job."""
    if _JOINED:
        raise ConfigurationError(
            "this program has joined its job already, by an earlier call of distribute: give all "
            "optimizers in one call, distribute(model, [first, second]) or by name in a dict, "
            "which returns as many; or close() what the earlier call returned"
        )
