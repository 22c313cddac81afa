"""Two lines for loops that Trireme does not own: an optimizer whose `step` pushes and pulls."""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.launch.here import task_here
from trireme.launch.program_end import ProgramEnd
from trireme.session.assembly import Assembly, assemble
from trireme.session.dry_run import describe
from trireme.session.options import OptionValues, make_options
from trireme.session.progress import make_progress
from trireme.session.rules import mesh_of, rule_of
from trireme.session.signals import Signals
from trireme.session.stop_sign import StopSign
from trireme.session.supervisor import Supervisor

if TYPE_CHECKING:
    from trireme.parallel.gang import Gang

__all__ = ["DistributedOptimizer", "distribute"]

_NOT_OURS = ("precision", "accumulate", "l2", "nan", "hooks", "scheduler", "device", "pipeline")


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

    It trains under every strategy but pipelines, which cannot be made of a loop of one's own.
    Without servers, and inside workers of several processes, all processes make every step
    together: the gradients are averaged in `step`, or by FSDP while backward runs. Then:

    - Each process feeds a batch of its own: `replica` says which of `replicas`, as
      `DistributedSampler(data, optimizer.replicas, optimizer.replica)` wants to know. Under tensor
      parallelism the processes of one replica must feed the same batch, and begin with the same
      random state: `distribute` gives them that of the first, and checks the first batch.
    - Every process must make equally many steps. One whose program ends earlier ends the training
      of all under `allreduce`; elsewhere the others wait for it, and say so.
    - Under `fsdp` and `tensor` the module itself is cut: its parameters are `DTensor`s, and the
      groups of the optimizer hold them. What computes with it, such as an evaluation, and what
      saves, must be called in every process. Checkpoints have whole tensors.

    Args:
        model: on its device, with the parameters that the optimizer was built from.
        optimizer: one that the parameter server has; without servers any. Learning-rate schedulers
            may act on what is returned as they would on this one, or on this one itself.
        run_dir: where checkpoints go; the launcher's `--run-dir` takes precedence.
        max_steps: the global step at which `should_stop()` becomes true.
        options: those of `Session` that are not about computing the gradient. `clip_norm` clips
            what is applied, the mean of a synchronous step.

    Raises:
        ConfigurationError: an option that belongs to the loop itself, or a pipeline.
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
    rule = rule_of(task, chosen, max_steps)
    if mesh_of(task, chosen).pp > 1:
        raise ConfigurationError(
            "distribute cannot make a pipeline of a loop of your own, which calls the whole model: "
            "use trireme.Session, or another strategy than pipeline and a mesh without pp"
        )
    device = next((parameter.device for parameter in model.parameters()), None)
    made = assemble(task, chosen, lambda: model, optimizer, in_place=True, device=device)
    if made.part is None:
        made.flat.keeps_views = False  # the loop is free to look at gradients, and to change them
    if task.dry_run:
        print(describe(made.flat.layout, made.optimizer, rule, task))
        raise SystemExit(0)
    quiet = made.gang is not None and not made.gang.speaks
    progress = make_progress("none" if quiet else task.display, max_steps=max_steps)
    directory = task.run_dir or run_dir
    training = made.training(task, chosen, rule, Path(directory) if directory else None)
    supervisor = Supervisor(task, training, progress)
    supervisor.start()
    if made.gang is not None and made.gang.mesh.tp > 1:
        _share_random_state(made.gang)
        _check_first_batch(made.gang, model)
    clip_here = None if rule.clip_norm is not None else chosen.clip_norm
    return DistributedOptimizer(made, supervisor, clip_here)


class DistributedOptimizer(torch.optim.Optimizer):
    """Stands in for an optimizer whose updates are made by the job.

    It is made by `distribute`. Parameter groups, and so schedulers, are the given optimizer's own.
    """

    def __init__(
        self, made: Assembly, supervisor: Supervisor, clip_here: float | None = None
    ) -> None:
        # Not Optimizer.__init__: the groups shall be the very same objects.
        self.__dict__.update(made.optimizer.__dict__)
        self._made = made
        self._supervisor = supervisor
        self._closed = False
        self._finished = False
        self._end = ProgramEnd()
        self._end.watch()
        self._handlers = Signals(supervisor.interrupt)
        self._handlers.install()
        atexit.register(self._at_exit)
        self._clip_here = clip_here

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

    @property
    def replica(self) -> int:
        """Which of the `replicas` batches that are computed at a time is this process's, from 0."""
        task, gang = self._supervisor.task, self._made.gang
        inside = 0 if gang is None else gang.replica
        return task.index * (self.replicas // task.workers) + inside if task.servers else inside

    @property
    def replicas(self) -> int:
        """How many batches the job computes at a time."""
        task, gang = self._supervisor.task, self._made.gang
        inside = 1 if gang is None else gang.mesh.replicas
        return task.workers * inside if task.servers else inside

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
        if self._made.reducer is not None:
            self._make_mean(examples)
        if self._clip_here is not None:
            norm = self._made.trained.gradient_norm()
            factor = torch.clamp(self._clip_here / (norm + 1e-6), max=1.0)
            self._made.trained.scale_gradients(factor)
        self._supervisor.update(examples, ())
        return loss

    def _make_mean(self, examples: float) -> None:
        """Makes one gradient of those of all processes that step together."""
        made = self._made
        assert made.reducer is not None
        self._supervisor.begin_step()
        if made.part is None:
            made.flat.gather_gradients()
            made.flat.restore_gradients()
        share = made.reducer.share(examples)()
        if share != 1.0:
            made.trained.scale_gradients(share)
        made.reducer.begin()
        made.reducer.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients, or sets those that there are to zero, as any optimizer.

        Args:
            set_to_none: whether parameters shall have no gradient until backward reaches them; what
                it does not reach is then left as it is by `step`, as `torch.optim` leaves it.
        """
        if set_to_none:
            self._made.trained.zero_gradients()
            return
        for parameter in self._made.trained.parameters.values():
            if parameter.grad is not None:
                parameter.grad.detach_().zero_()

    def save(self) -> None:
        """Saves a checkpoint now; the chief only, elsewhere nothing.

        Where processes hold the model together, all of them must ask.
        """
        if self._supervisor.is_chief or self._made.gang is not None:
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
            self._end_together()
            self._supervisor.complete()
            self._supervisor.finish_training()

    def _end_together(self) -> None:
        """Ends the training of all processes that step together, when this one's loop is over.

        It takes part in the step that the others may be making, with no examples of its own.
        """
        made, supervisor = self._made, self._supervisor
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
        made.flat.zero_gradients()
        made.flat.gather_gradients()
        reducer.begin()
        reducer.finish()
        supervisor.update(1.0, ())

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


def _share_random_state(gang: Gang) -> None:
    """Gives the processes of one replica the random state of the first of them.

    What they compute alike, such as dropout between layers that are cut, must be alike; and so
    must be what they draw for a batch.
    """
    mine = torch.get_rng_state().numpy().tobytes()
    states = gang.exchange(mine)
    first = min(r for r in range(gang.size) if gang.mesh.replica(r) == gang.replica)
    torch.set_rng_state(torch.frombuffer(bytearray(states[first]), dtype=torch.uint8))


def _check_first_batch(gang: Gang, model: nn.Module) -> None:
    """Checks, when the model is first called, that its replica's processes give it the same."""

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        handle.remove()
        said = gang.exchange(_digest((args, kwargs)))
        for rank, other in enumerate(said):
            if gang.mesh.replica(rank) == gang.replica and other != said[gang.rank]:
                raise ConfigurationError(
                    f"rank {gang.rank} and rank {rank} hold one replica together by tensor "
                    "parallelism, and were given different batches: feed all processes of a "
                    "replica the same (`optimizer.replica` and `.replicas` number the batches)"
                )

    handle = model.register_forward_pre_hook(check, with_kwargs=True)


def _digest(value: Any) -> bytes:
    """Returns what is the same for equal tensors in a nest of tuples, lists and dicts."""
    digest = hashlib.blake2b(digest_size=16)
    queue = [value]
    while queue:
        each = queue.pop()
        if isinstance(each, torch.Tensor):
            data = each.detach().cpu().contiguous()
            digest.update(repr((tuple(data.shape), data.dtype)).encode())
            digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(each, dict):
            queue += each.values()
        elif isinstance(each, (tuple, list)):
            queue += each
    return digest.digest()
