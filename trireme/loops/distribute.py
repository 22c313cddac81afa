"""`distribute`: an optimizer for a program's own loop, whose `step` pushes and pulls."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, Unpack, overload

import numpy as np
import torch
from torch import nn

from trireme.data.seeds import derive
from trireme.errors import ConfigurationError
from trireme.launch.environment import current_task
from trireme.launch.program_directory import name_run_dir
from trireme.loops.distributed_optimizer import DistributedOptimizer
from trireme.loops.loop_job import LoopJob, refuse_second
from trireme.ps.optimizers import members
from trireme.session.model.process_group import ProcessGroup
from trireme.session.options import OptionValues, make_options
from trireme.session.settings import Settings
from trireme.session.worker.assembly import assemble
from trireme.session.worker.dry_run import end_if_dry_run
from trireme.session.worker.job import Job

Models: TypeAlias = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
"""One module, or several modules in a list or by name."""

_NOT_OURS = (
    *("precision", "accumulate", "l2", "nan", "hooks", "scheduler", "device", "pipeline"),
    "weight",  # step(examples=...) says it
)


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

    The returned optimizer replaces the given one: call `zero_grad()`, `backward()` and `step()` as
    usual. Its `step` pushes the gradients and brings the new values into the model. Under plain
    `python` it updates the model itself. The process leaves the job when it ends, or at `close`:
    with parameter servers, once the loops of all workers have ended, and the chief saves then.
    After Ctrl-C the workers stop at a step that all agree on, and the chief saves it; `close`, or
    the end of the program, ends the process with status 130 then. After SIGTERM to one worker of a
    job with parameter servers, that worker leaves, with status 143, and the others go on.

    Several optimizers, such as a generator's and a discriminator's, are given in one call, in a
    list or by name in a dict, and are returned in the same form. Each updates only the parameters
    that it was built from, whatever gradients the others have. Each step of an optimizer is one
    global step; workers that make steps together must step the same optimizers in the same order.

    It trains under every strategy but pipelines and graphs, which need a loop of their own. Without
    servers, and inside workers of several processes, all processes make every step together: the
    gradients are averaged in `step`, or by FSDP while backward runs. Then:

    - Each process feeds a batch of its own. `replica` is its index among `replicas`, as in
      `DistributedSampler(data, optimizer.replicas, optimizer.replica)`. Under tensor parallelism
      the processes of one replica must feed the same batch, and begin with the same random state:
      `distribute` gives them the random state of the first, and compares the first batches.
    - Every process must make the same number of steps. Where one ends its loop earlier, or leaves a
      step out, all of them raise an error that names it. Among several replicas in a worker of
      parameter servers, the others go on without it.
    - Under `fsdp` and `tensor` the module itself is split: its parameters are of class `DTensor`,
      and the optimizer's groups hold them. Code that computes with the module, such as an
      evaluation, or saves it must run in every process, before `close`. Checkpoints have whole
      tensors.

    Each replica draws random numbers of its own after this call, for dropout for instance, also
    where the program sets one seed in all processes. The first replica continues the program's
    random streams; the others derive theirs from the program's seeds and the replica's index.

    Args:
        model: the module, on its device, with the parameters that the optimizer was built from; or
            several modules, in a list, or by name in a dict. The parameters of named modules are
            called `NAME.PARAMETER` in checkpoints.
        optimizer: an optimizer that the parameter server supports; without servers, any but LBFGS,
            and one of your own may call the closure of `step` itself. Learning-rate schedulers may
            act on the returned optimizer or on this one. They count
            `DistributedOptimizer.loop_steps`.
        run_dir: the directory of checkpoints, or a URL such as `s3://bucket/run`; the launcher's
            `--run-dir` takes precedence.
        max_steps: the global step at which `should_stop()` becomes true.
        options: the options of `Session` that do not concern the computation of gradients.
            `clip_norm` clips the applied gradient: in a synchronous step, the mean. To clip or
            scale in the loop, see `DistributedOptimizer.synchronize`.

    Raises:
        ConfigurationError: an option belongs to the program's own loop; the strategy is a
            pipeline or a graph; or an earlier call of `distribute` in this program was not closed.
        TriremeError: this process cannot take part in the job.
    """
    refuse_second()
    foreign = sorted(set(options) & set(_NOT_OURS))
    if foreign:
        raise ConfigurationError(
            f"distribute has no option {foreign[0]!r}: the program's own loop does "
            "this; `trireme.Session` has the option"
        )
    chosen = make_options(options, caller="distribute", without=_NOT_OURS)
    settings = Settings.of(current_task(), chosen, run_dir, max_steps)
    name_run_dir(settings.task, None if settings.remote else settings.run_dir)
    _ = settings.rule  # an invalid one is refused before anything is built
    if settings.mesh.pp > 1:
        raise ConfigurationError(
            "distribute cannot run a pipeline in your own loop, which calls the whole model: "
            "use trireme.Session, or another strategy than pipeline and a mesh without pp"
        )
    if settings.placed:
        raise ConfigurationError(
            f"{'trireme graph' if settings.task.draw is not None else 'the strategy graph'} cannot "
            "be used with trireme.distribute, whose loop calls the whole model: train the model "
            "with trireme.Session, which places its operations"
        )
    module = _module_of(model)
    device = next((parameter.device for parameter in module.parameters()), None)
    setup = assemble(settings, lambda: module, optimizer, in_place=True, device=device)
    end_if_dry_run(setup)
    job = Job(setup, own_loop=True)
    _draw_apart(setup.replica)
    if setup.process_group is not None and setup.process_group.mesh.tp > 1:
        _share_random_state(setup.process_group)
    loop = LoopJob(job, module)
    joined = [
        DistributedOptimizer(member, loop, index)
        for index, member in enumerate(members(setup.optimizer))
    ]
    if isinstance(optimizer, torch.optim.Optimizer):
        return joined[0]
    if isinstance(optimizer, Mapping):
        return dict(zip(optimizer, joined, strict=True))
    return joined


def _module_of(model: Models) -> nn.Module:
    """Returns the module, or a container of several modules, which is never called."""
    named = model if isinstance(model, Mapping) else {}
    several = list(named.values()) if named else model
    if isinstance(several, nn.Module):
        return several
    if not isinstance(several, Sequence) or not all(isinstance(m, nn.Module) for m in several):
        raise ConfigurationError(
            f"the model is {type(model).__name__}: give a module, or several in a list or a dict"
        )
    return nn.ModuleDict(dict(named)) if named else nn.ModuleList(several)


def _draw_apart(replica: int) -> None:
    if replica:
        torch.manual_seed(derive(torch.initial_seed(), replica))
        random.seed(derive(random.getrandbits(63), replica))
        np.random.seed(derive(int(np.random.randint(1 << 31)), replica) % (1 << 32))


def _share_random_state(process_group: ProcessGroup) -> None:
    """Gives the processes of one replica, which draw the same numbers, one random state."""
    mine = torch.get_rng_state().numpy().tobytes()
    states = process_group.exchange(mine, process_group.reporting_ranks)
    state = bytearray(states[process_group.replica])
    torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))
