"""The settings of a session: what the launch and the program have chosen, resolved."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from trireme.launch.config.task_config import TaskConfig
from trireme.location import RemotePath, local_directory, location
from trireme.mesh import Mesh
from trireme.ps.rule import Rule
from trireme.session.options import Options
from trireme.strategies import Strategy, choose


@dataclass(frozen=True)
class Settings:
    """What the launch and the program have chosen for a job; the launch takes precedence.

    Values that can be invalid are computed when they are first read, and raise
    `ConfigurationError`.
    """

    task: TaskConfig  # the identity of this process, and the configuration of the launch
    options: Options
    run_dir: Path | None = None  # of records, and of checkpoints unless there is a `remote`
    max_steps: int | None = None  # the global step at which training ends; None for no end
    remote: RemotePath | None = None  # the run directory in an object store

    @classmethod
    def of(
        cls, task: TaskConfig, options: Options, run_dir: str | Path | None, max_steps: int | None
    ) -> Settings:
        directory = None if task.draw else task.config.output.run_dir or run_dir
        if (trial := task.trial) is not None:
            max_steps = min(trial.most_steps, max_steps or trial.most_steps)
            directory = f"{directory}/{task.index}" if trial.replicas else directory
        if directory is None:
            return cls(task, options, None, max_steps)
        where = location(directory)
        remote = None if isinstance(where, Path) else where
        return cls(task, options, local_directory(where), max_steps, remote)

    @property
    def home(self) -> Path | RemotePath | None:
        return self.remote or self.run_dir

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy of the launch, else of the program, else the cluster's default."""
        task = self.task
        workers = 1 if task.trial is not None and task.trial.replicas else task.workers
        return choose(task.config, self.options.strategy, workers=workers, servers=task.servers)

    @cached_property
    def mesh(self) -> Mesh:
        """The degrees of parallelism of the processes that hold one model together."""
        inside = Mesh.parse(self.task.config.model.mesh)
        return self.strategy.mesh(inside, self.task.group.size)

    @property
    def backend(self) -> str:
        """The backend by which processes hold one model together; "" where each has its own."""
        return self.strategy.backend(self.mesh)

    @cached_property
    def rule(self) -> Rule:
        """The rule that every worker registers at its servers; a lone process steps each time."""
        options, strategy = self.options, self.strategy
        alone = self.task.servers == 0 and self.task.group.size == 1
        rule = Rule() if alone else strategy.rule()
        rule = msgspec.structs.replace(
            rule,
            clip_norm=options.clip_norm if rule.synchronous and rule.every is None else None,
            average=options.ema_rule,
            max_steps=self.max_steps,
            codec=self.task.config.training.compress if self.task.servers else "none",
        )
        rule.check()
        return rule

    @property
    def placed(self) -> bool:
        return self.backend == "graph"

    @property
    def batches_per_step(self) -> int:
        """The number of batches in one global step, such as those of a synchronous round."""
        if self.task.trial is not None and self.task.trial.replicas:
            return self.task.trial.replicas
        rounds = self.task.servers and self.rule.synchronous
        updates = (self.rule.aggregate or self.task.workers) if rounds else 1
        return updates * self.mesh.replicas

    def steps_of_a_loop(self, global_step: int) -> int:
        """Returns how many steps each worker's own loop has behind it at a global step.

        Unless workers make each step together, it is a worker's share of all updates.
        """
        shared = self.task.servers > 0 and not self.rule.synchronous
        return global_step // self.task.workers if shared else global_step

    @property
    def prefetches(self) -> bool:
        """Whether workers compute the next gradient while a push is under way."""
        return self.task.servers > 0 and getattr(self.strategy, "prefetch", False)

    @property
    def clip_norm(self) -> float | None:
        """The L2 norm to which each worker scales its own gradients down; None for none."""
        return None if self.rule.clip_norm is not None else self.options.clip_norm
