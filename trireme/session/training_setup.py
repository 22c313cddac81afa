"""What a worker trains: the model with its optimizer, and the settings of the training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.parallel.reducer import Reducer
from trireme.ps.flat import FlatModel
from trireme.ps.joint_optimizer import JointOptimizer, members
from trireme.ps.messages import GroupSpec, OptimizerSpec
from trireme.session.settings import Settings

if TYPE_CHECKING:
    from trireme.parallel.model_part import ModelPart
    from trireme.parallel.process_group import ProcessGroup

__all__ = ["TrainingSetup"]


@dataclass(frozen=True)
class TrainingSetup:
    """The model and the optimizer of a program, as this process holds them, with the settings.

    Attributes:
        settings: what the launch and the program have chosen.
        model: the whole model. Where processes hold parts of it, its values are those of the last
            evaluation.
        optimizer: the user's optimizer, over the parameters that this process updates.
        flat: the flat buffers of the whole model.
        process_group: the processes that hold the model together; None for one process.
        part: this process's part of the model; None where it holds the whole model.
        reducer: averages the gradients of all replicas; None for one process.
    """

    settings: Settings
    model: nn.Module
    optimizer: torch.optim.Optimizer
    flat: FlatModel
    process_group: ProcessGroup | None = None
    part: ModelPart | None = None
    reducer: Reducer | None = None

    @property
    def trained(self) -> FlatModel | ModelPart:
        """The trained parameters with which this process computes."""
        return self.flat if self.part is None else self.part

    @cached_property
    def outer(self) -> OptimizerSpec | None:
        """The servers' optimizer over deltas, where workers train locally.

        It is None where servers apply gradients by the user's optimizer. It has the same groups as
        that optimizer.
        """
        task = self.settings.task
        outer = self.settings.strategy.outer(task.workers) if task.servers else None
        if outer is None:
            return None
        return OptimizerSpec(
            "SGD", tuple(GroupSpec(dict(outer)) for _ in self.optimizer.param_groups)
        )

    @property
    def replica(self) -> int:
        """Which of the job's `replicas` batches at a time is this process's, from 0."""
        task, group = self.settings.task, self.process_group
        if group is None:
            return task.index if task.servers else 0
        return (task.index * group.mesh.replicas if task.servers else 0) + group.replica

    @property
    def replicas(self) -> int:
        """The number of batches that the job computes at a time."""
        task, group = self.settings.task, self.process_group
        inside = 1 if group is None else group.mesh.replicas
        return inside * (task.workers if task.servers else 1)

    @property
    def shows_progress(self) -> bool:
        """Whether this process shows progress that no other process shows.

        In a worker of several processes of a job with servers, that is the leader alone.
        """
        group = self.process_group
        if group is None:
            return True
        return group.is_chief if self.settings.task.servers else group.shows_progress

    def parameters_of_each(self) -> list[list[nn.Parameter]]:
        """Returns the parameters of each optimizer, as the program computes with them."""
        names = {
            id(parameter): name
            for held in (self.flat, self.trained)
            for name, parameter in held.parameters.items()
        }
        return [
            [
                self.trained.parameters[names[id(parameter)]]
                for group in optimizer.param_groups
                for parameter in group["params"]
                if names.get(id(parameter)) in self.trained.parameters
            ]
            for optimizer in members(self.optimizer)
        ]

    def agree_on_optimizer(self, *, takes_part: bool = True) -> None:
        """Checks that all processes that step together step the same one of several optimizers.

        Nothing is checked for one process or one optimizer.

        Args:
            takes_part: whether this process has chosen; otherwise it takes the others' choice.

        Raises:
            ConfigurationError: the processes have chosen different optimizers.
        """
        joint, process_group = self.optimizer, self.process_group
        if not isinstance(joint, JointOptimizer) or process_group is None:
            return
        chosen = float(joint.chosen)
        said = [chosen, chosen**2, 1.0] if takes_part else [0.0, 0.0, 0.0]
        total, squares, count = process_group.total(said)()
        if total**2 != squares * count:
            raise ConfigurationError(
                f"rank {process_group.rank} makes a step of optimizer {joint.chosen}, and another "
                "process of another: every process must step the same optimizers in the same order"
            )
        joint.chosen = round(total / count)
