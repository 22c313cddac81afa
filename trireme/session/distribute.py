"""Two lines for loops that Trireme does not own: an optimizer whose `step` pushes and pulls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, overload

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.launch.here import task_here
from trireme.parallel.local import called
from trireme.ps.joint import members
from trireme.session.assembly import assemble
from trireme.session.dry_run import describe
from trireme.session.loop_job import LoopJob, refuse_second
from trireme.session.options import OptionValues, make_options
from trireme.session.progress import make_progress
from trireme.session.rules import mesh_of, rule_of
from trireme.session.stop_sign import StopSign
from trireme.session.supervisor import Supervisor

if TYPE_CHECKING:
    from trireme.parallel.gang import Gang

__all__ = ["DistributedOptimizer", "Models", "distribute"]

Models: TypeAlias = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
"""One module, or several, in a list or by name."""

_NOT_OURS = ("precision", "accumulate", "l2", "nan", "hooks", "scheduler", "device", "pipeline")


@overload
def distribute(
    model: Models,
    optimizer: torch.optim.Optimizer,
    *,
    run_dir: str | Path | None = None,
    max_steps: int | None = None,
    **options: Unpack[OptionValues],
) -> DistributedOptimizer: ...


@overload
def distribute(
    model: Models,
    optimizer: Sequence[torch.optim.Optimizer],
    *,
    run_dir: str | Path | None = None,
    max_steps: int | None = None,
    **options: Unpack[OptionValues],
) -> list[DistributedOptimizer]: ...


@overload
def distribute(
    model: Models,
    optimizer: Mapping[str, torch.optim.Optimizer],
    *,
    run_dir: str | Path | None = None,
    max_steps: int | None = None,
    **options: Unpack[OptionValues],
) -> dict[str, DistributedOptimizer]: ...


def distribute(
    model: Models,
    optimizer: torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, torch.optim.Optimizer],
    *,
    run_dir: str | Path | None = None,
    max_steps: int | None = None,
    **options: Unpack[OptionValues],
) -> DistributedOptimizer | list[DistributedOptimizer] | dict[str, DistributedOptimizer]:
    """Joins the job that this process was launched for, and returns an optimizer for it.

    Use it in the place of the one given: `zero_grad()`, `backward()`, `step()` as always. Its
    `step` pushes the gradients and brings the new values into the model. Under plain `python` it
    updates the model itself. The process leaves the job when it ends; leave earlier with `close`.
    At Ctrl-C and SIGTERM the workers stop at a step that all agree on, and the chief saves it.

    Several optimizers, as of a generator and a discriminator, are given in one call, in a list or
    by name in a dict, and as many come back in the same form. Each updates the parameters that it
    was built from, and no others, whatever gradients there are. Each step of one of them is one
    global step; workers that make steps together must make those of the same optimizers in the
    same order.

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
        model: on its device, with the parameters that the optimizer was built from; or several
            modules, in a list, or by name in a dict, whose parameters are then called
            `NAME.PARAMETER` in checkpoints.
        optimizer: one that the parameter server has; without servers any whose
            step needs no closure. Learning-rate schedulers
            may act on what is returned as they would on this one, or on this one itself.
        run_dir: where checkpoints go; the launcher's `--run-dir` takes precedence.
        max_steps: the global step at which `should_stop()` becomes true.
        options: those of `Session` that are not about computing the gradient. `clip_norm` clips
            what is applied, the mean of a synchronous step.

    Raises:
        ConfigurationError: an option that belongs to the loop itself; a pipeline; an earlier call
            of `distribute` in this program that was not closed.
        TriremeError: what keeps this process from taking part.
    """
    refuse_second()
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
    module = _module_of(model)
    device = next((parameter.device for parameter in module.parameters()), None)
    made = assemble(task, chosen, lambda: module, optimizer, in_place=True, device=device)
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
        _check_first_batch(made.gang, module)
    clip_here = None if rule.clip_norm is not None else chosen.clip_norm
    job = LoopJob(made, supervisor, clip_here)
    supervisor.begin_training()
    joined = [
        DistributedOptimizer(member, job, index)
        for index, member in enumerate(members(made.optimizer))
    ]
    if isinstance(optimizer, torch.optim.Optimizer):
        return joined[0]
    if isinstance(optimizer, Mapping):
        return dict(zip(optimizer, joined, strict=True))
    return joined


def _module_of(model: Models) -> nn.Module:
    """Returns one module of several: a container, which nobody calls.

    Raises:
        ConfigurationError: something is no module.
    """
    named = model if isinstance(model, Mapping) else {}
    several = list(named.values()) if named else model
    if isinstance(several, nn.Module):
        return several
    if not isinstance(several, Sequence) or not all(isinstance(m, nn.Module) for m in several):
        raise ConfigurationError(
            f"the model is {type(model).__name__}: give a module, or several in a list or a dict"
        )
    return nn.ModuleDict(dict(named)) if named else nn.ModuleList(several)


class DistributedOptimizer(torch.optim.Optimizer):
    """Stands in for an optimizer whose updates are made by the job.

    It is made by `distribute`. Parameter groups, and so schedulers, are the given optimizer's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, job: LoopJob, index: int) -> None:
        # Not Optimizer.__init__: the groups shall be the very same objects. A learning-rate
        # scheduler that was made before has put its own `step` into the optimizer: that is its.
        own = {
            name: value for name, value in vars(optimizer).items() if not hasattr(type(self), name)
        }
        self.__dict__.update(own)
        self._given = optimizer
        self._job = job
        self._index = index
        self._supervisor = job.supervisor

    @property
    def global_step(self) -> int:
        """The global step of the values that are in the model."""
        return self._supervisor.global_step

    @property
    def should_stop(self) -> StopSign:
        """`should_stop()` returns whether training should end; agreed by all workers."""
        supervisor, last = self._supervisor, self._job.last_iteration
        return StopSign(lambda: last.asked(supervisor.should_stop))

    @property
    def is_chief(self) -> bool:
        """Whether this is the live worker with the lowest index."""
        return self._supervisor.is_chief

    @property
    def replica(self) -> int:
        """Which of the `replicas` batches that are computed at a time is this process's, from 0."""
        task, gang = self._supervisor.task, self._job.made.gang
        if task.servers:
            return task.index
        return 0 if gang is None else gang.replica

    @property
    def replicas(self) -> int:
        """How many batches the job computes at a time."""
        task, gang = self._supervisor.task, self._job.made.gang
        if task.servers:
            return task.workers
        return 1 if gang is None else gang.mesh.replicas

    def step(self, closure: Callable[[], Any] | None = None, *, examples: float = 1.0) -> Any:
        """Pushes the gradients and brings the new values into the model.

        As `Session.step`, it makes no update after training has ended, and nothing else in what is
        left of that iteration of the loop: leave the loop when `should_stop()` says so.

        Args:
            closure: computes the loss and the gradients anew, as for any optimizer.
            examples: how many examples the gradient is the mean of, where workers' batches differ.

        Returns:
            What the closure returned.

        Raises:
            ConfigurationError: the loop goes on after training has ended; what it led to is saved.
            SystemExit: with status 130, where training has ended because the job was interrupted.
            JobFailed: the job has ended elsewhere; says where and why.
        """
        goes_on = self._job.goes_on()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not goes_on:
            return loss
        self._job.update(self._index, examples)
        self._given._opt_called = True  # type: ignore[attr-defined]  # a scheduler of it asks
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of this optimizer's parameters, or sets them to zero.

        Args:
            set_to_none: whether parameters shall have no gradient until backward reaches them; what
                it does not reach is then left as it is by `step`, as `torch.optim` leaves it.
        """
        self._job.forget_gradients(self._index, set_to_none=set_to_none)

    def save(self) -> None:
        """Saves a checkpoint now; the chief only, elsewhere nothing.

        Where processes hold the model together, all of them must ask.
        """
        self._job.save()

    def close(self) -> None:
        """Saves, and leaves the job, with all its optimizers. May be repeated."""
        self._job.close()


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
    """Checks, when a model is first called, that its replica's processes give it the same."""

    def check(module: nn.Module, args: Any, kwargs: Any) -> None:
        handles.pop(module).remove()
        said = gang.exchange(_digest((args, kwargs)))
        for rank, other in enumerate(said):
            if gang.mesh.replica(rank) == gang.replica and other != said[gang.rank]:
                raise ConfigurationError(
                    f"rank {gang.rank} and rank {rank} hold one replica together by tensor "
                    "parallelism, and were given different batches: feed all processes of a "
                    "replica the same (`optimizer.replica` and `.replicas` number the batches)"
                )

    handles = {
        module: module.register_forward_pre_hook(check, with_kwargs=True)
        for module in called(model)
    }


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
