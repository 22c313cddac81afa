"""The job that the optimizers of a program's own loop take part in, from `distribute` on."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trireme.errors import ConfigurationError
from trireme.launch.program_end import ProgramEnd
from trireme.ps.joint import JointOptimizer
from trireme.session.assembly import Assembly
from trireme.session.choice import agree_on_optimizer
from trireme.session.last_iteration import LastIteration
from trireme.session.signals import Signals
from trireme.session.supervisor import Supervisor

__all__ = ["LoopJob", "refuse_second"]


class LoopJob:
    """A worker's part of a job whose loop is the program's own.

    Args:
        made: what is trained.
        supervisor: started already.
        clip_here: the L2 norm that this worker's gradients are scaled down to; None for none.
    """

    def __init__(self, made: Assembly, supervisor: Supervisor, clip_here: float | None) -> None:
        self.made = made
        self.supervisor = supervisor
        self._clip_here = clip_here
        self._of = made.parameters_of_each()
        if made.part is None:
            made.flat.keeps_views = False  # the loop may look at gradients, and change them
        self.last_iteration = LastIteration()
        self._closed = False
        self._finished = False
        self._end = ProgramEnd()
        self._end.watch()
        self._handlers = Signals(supervisor.interrupt)
        self._handlers.install()
        atexit.register(self._at_exit)
        _JOINED.append(self)

    # -- training -------------------------------------------------------------------------------

    def goes_on(self) -> bool:
        """Returns whether to make an update; not after the end, in the iteration in which it came.

        Raises:
            ConfigurationError: the loop goes on after training has ended; what it led to is saved.
            SystemExit: with status 130, where it has because the job was interrupted.
        """
        self._end.goes_on()
        if not self.supervisor.has_ended:
            return True
        if self.last_iteration.leaves_out():
            return False
        self._finish_training()
        raise self.supervisor.after_the_end()

    def update(self, optimizer: int, examples: float) -> None:
        """Makes one update of the job from the gradients that backward has left.

        Args:
            optimizer: which of several makes it; the gradients of the others' parameters stay.
            examples: how many examples the gradient is the mean of.
        """
        joint = self.made.optimizer
        if not isinstance(joint, JointOptimizer):
            self._update(examples)
            return
        joint.chosen = optimizer
        with self._alone(optimizer):
            self._update(examples)

    def _update(self, examples: float) -> None:
        if self.made.reducer is not None:
            self._make_mean(examples)
        if self._clip_here is not None:
            norm = self.made.trained.gradient_norm()
            factor = torch.clamp(self._clip_here / (norm + 1e-6), max=1.0)
            self.made.trained.scale_gradients(factor)
        self.supervisor.update(examples, ())

    @contextmanager
    def _alone(self, optimizer: int) -> Iterator[None]:
        """Has the parameters of one of several optimizers alone have gradients."""
        others = [
            p for index in range(len(self._of)) if index != optimizer for p in self._of[index]
        ]
        kept = [parameter.grad for parameter in others]
        if self.made.part is None:  # what lies in the flat gradients would be overwritten
            kept = [None if gradient is None else gradient.clone() for gradient in kept]
        for parameter in others:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in zip(others, kept, strict=True):
                parameter.grad = gradient

    def forget_gradients(self, optimizer: int, *, set_to_none: bool) -> None:
        """Forgets the gradients of one optimizer's parameters, or sets those there are to zero."""
        for parameter in self._of[optimizer]:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def _make_mean(self, examples: float) -> None:
        """Makes one gradient of those of all processes that step together."""
        made = self.made
        assert made.reducer is not None
        self.supervisor.begin_step()
        if made.part is None:
            made.flat.gather_gradients()
        share = made.reducer.share(examples)()
        agree_on_optimizer(made)
        if share != 1.0:
            made.trained.scale_gradients(share)
        made.reducer.begin()
        made.reducer.finish()

    def save(self) -> None:
        """As `Session.save`."""
        if self.supervisor.is_chief or self.made.gang is not None:
            self.supervisor.save()

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Saves, and leaves the job. May be repeated."""
        if self._closed:
            return
        self._let_go()
        try:
            self._finish_training()
        except BaseException as error:
            self.supervisor.fail(error)
            raise
        self.supervisor.leave("interrupted" if self.supervisor.interrupted else "finished")

    def _finish_training(self) -> None:
        if not self._finished:
            self._finished = True
            self._end_together()
            self.supervisor.complete()
            self.supervisor.finish_training()

    def _end_together(self) -> None:
        """Ends the training of all processes that step together, when this one's loop is over.

        It takes part in the step that the others may be making, with no examples of its own.
        """
        made, supervisor = self.made, self.supervisor
        gang, reducer = made.gang, made.reducer
        if gang is None or reducer is None or gang.mesh.sharded or not supervisor.together:
            return
        if supervisor.should_stop:
            return
        supervisor.stop("the program of another process has ended")
        supervisor.begin_step()
        if gang.count(0.0)() == 0.0:
            gang.vote()  # they all have ended: nobody makes that step
            return
        agree_on_optimizer(made, takes_part=False)
        made.flat.zero_gradients()
        made.flat.gather_gradients()
        reducer.begin()
        reducer.finish()
        supervisor.update(1.0, ())

    def _at_exit(self) -> None:
        """Leaves as the program ended: with the exception that it failed with, if it did."""
        error = self._end.error
        if error is None or self._closed:
            self.close()
            return
        self._let_go()
        if isinstance(error, KeyboardInterrupt):
            self.supervisor.leave("interrupted", "KeyboardInterrupt in the script")
        else:
            self.supervisor.fail(error)

    def _let_go(self) -> None:
        """Gives back what was taken over of the process."""
        self._closed = True
        _JOINED.remove(self)
        self._handlers.restore()
        self._end.forget()
        atexit.unregister(self._at_exit)


_JOINED: list[LoopJob] = []
"""The job that this process takes part in: a process has one place in one job."""


def refuse_second() -> None:
    """Checks that this process is in no job yet.

    Raises:
        ConfigurationError: it is.
    """
    if _JOINED:
        raise ConfigurationError(
            "this program has joined its job already, by an earlier call of distribute: give all "
            "optimizers in one call, distribute(model, [first, second]) or by name in a dict, "
            "which returns as many; or close() what the earlier call returned"
        )
