"""Two lines for loops that Trireme does not own: an optimizer whose `step` pushes and pulls."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.launch.here import task_here
from trireme.launch.program_end import ProgramEnd
from trireme.ps.dense import FlatModel
from trireme.session.options import OptionValues, make_options
from trireme.session.progress import make_progress
from trireme.session.replica import named_groups
from trireme.session.rules import outer_of, prefetches, rule_of
from trireme.session.signals import Signals
from trireme.session.stop_sign import StopSign
from trireme.session.supervisor import Supervisor
from trireme.session.training import Training

__all__ = ["DistributedOptimizer", "distribute"]

_NOT_OURS = ("precision", "accumulate", "l2", "nan", "hooks", "scheduler")


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    run_dir: str | Path | None = None,
    max_steps: int | None = None,
    **options: Unpack[OptionValues],
) -> DistributedOptimizer:
    """Joins the job that this process was launched for, and returns an optimizer for it.

    Use it in the place of the one given: `zero_grad()`, `backward()`, `step()` as always. Its
    `step` pushes the gradients and brings the new values into the model. Under plain `python` it
    updates the model itself. The process leaves the job when it ends; leave earlier with `close`.
    At Ctrl-C and SIGTERM the workers stop at a step that all agree on, and the chief saves it.

    Args:
        model: on its device, with the parameters that the optimizer was built from.
        optimizer: one that the parameter server has; learning-rate schedulers may act on what is
            returned as they would on this one.
        run_dir: where checkpoints go; the launcher's `--run-dir` takes precedence.
        max_steps: the global step at which `should_stop` becomes true.
        options: those of `Session` that are not about computing the gradient.

    Raises:
        ConfigurationError: an option that belongs to the loop itself.
        TriremeError: what keeps this process from taking part.
    """
    foreign = sorted(set(options) & set(_NOT_OURS))
    if foreign:
        raise ConfigurationError(
            f"distribute has no option {foreign[0]!r}: the loop is yours, and so is this; "
            "`trireme.Session` has it"
        )
    chosen = make_options(options)
    task = task_here()
    flat = FlatModel(
        named_groups(model, optimizer),
        servers=max(task.servers, 1),
        shared=task.servers > 0,
        staged=prefetches(task, chosen),
    )
    rule = rule_of(task, chosen, max_steps)
    progress = make_progress(task.display, max_steps=max_steps)
    directory = task.run_dir or run_dir
    training = Training(
        model,
        optimizer,
        flat,
        rule,
        chosen,
        Path(directory) if directory else None,
        prefetches(task, chosen),
        outer=outer_of(task, chosen, optimizer),
    )
    supervisor = Supervisor(task, training, progress)
    supervisor.start()
    return DistributedOptimizer(optimizer, flat, supervisor)


class DistributedOptimizer(torch.optim.Optimizer):
    """Stands in for an optimizer whose updates are made by the job.

    It is made by `distribute`. Parameter groups, and so schedulers, are the given optimizer's own.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, flat: FlatModel, supervisor: Supervisor
    ) -> None:
        # Not Optimizer.__init__: the groups shall be the very same objects.
        self.__dict__.update(optimizer.__dict__)
        self._flat = flat
        self._supervisor = supervisor
        self._closed = False
        self._finished = False
        self._end = ProgramEnd()
        self._end.watch()
        self._handlers = Signals(supervisor.interrupt)
        self._handlers.install()
        atexit.register(self._at_exit)

    @property
    def global_step(self) -> int:
        """The global step of the values that are in the model."""
        return self._supervisor.global_step

    @property
    def should_stop(self) -> StopSign:
        """`should_stop()` returns whether training should end; agreed by all workers."""
        supervisor = self._supervisor
        return StopSign(lambda: supervisor.should_stop)

    @property
    def is_chief(self) -> bool:
        """Whether this is the live worker with the lowest index."""
        return self._supervisor.is_chief

    def step(self, closure: Callable[[], Any] | None = None, *, examples: float = 1.0) -> Any:
        """Pushes the gradients and brings the new values into the model.

        As `Session.step`, it makes no update after training has ended: leave the loop when
        `should_stop()` says so.

        Args:
            closure: computes the loss and the gradients anew, as for any optimizer.
            examples: how many examples the gradient is the mean of, where workers' batches differ.

        Returns:
            What the closure returned.

        Raises:
            ConfigurationError: training has ended, and what it led to is saved.
            SystemExit: with status 130, where training has ended because the job was interrupted.
            JobFailed: the job has ended elsewhere; says where and why.
        """
        loss = None
        self._end.goes_on()
        if self._supervisor.should_stop:
            self._finish_training()
            raise self._supervisor.after_the_end()
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._supervisor.update(examples, ())
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets the gradients to zero in place, whichever is asked for: they are views."""
        self._flat.zero_gradients()

    def save(self) -> None:
        """Saves a checkpoint now; the chief only, elsewhere nothing."""
        if self._supervisor.is_chief:
            self._supervisor.save()

    def close(self) -> None:
        """Saves, and leaves the job. May be repeated."""
        if self._closed:
            return
        self._closed = True
        self._let_go()
        try:
            self._finish_training()
        except BaseException as error:
            self._supervisor.fail(error)
            raise
        self._supervisor.leave("interrupted" if self._supervisor.interrupted else "finished")

    def _finish_training(self) -> None:
        if not self._finished:
            self._finished = True
            self._supervisor.complete()
            self._supervisor.finish_training()

    def _at_exit(self) -> None:
        """Leaves as the program ended: with the exception that it failed with, if it did."""
        error = self._end.error
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._let_go()
            if isinstance(error, KeyboardInterrupt):
                self._supervisor.leave("interrupted", "KeyboardInterrupt in the script")
            else:
                self._supervisor.fail(error)

    def _let_go(self) -> None:
        """Gives back what was taken over of the process."""
        self._handlers.restore()
        self._end.forget()
        atexit.unregister(self._at_exit)
