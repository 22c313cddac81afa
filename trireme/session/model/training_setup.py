"""What a worker trains: the model with its optimizer, split as the launch requests."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.ps.flat import FlatModel, NamedGroups
from trireme.ps.messages import GroupSpec, OptimizerSpec
from trireme.ps.optimizers import JointOptimizer, members, name_of, spec_of
from trireme.session.model.extension import TrainedExtension
from trireme.session.model.model_part import ModelPart
from trireme.session.model.module_names import named_parameters
from trireme.session.model.own_writes import OwnWrites, own_writes_of
from trireme.session.model.process_group import ProcessGroup
from trireme.session.model.reducer import Reducer
from trireme.session.model.trained import Trained, named_groups
from trireme.session.settings import Settings
from trireme.tensors import digest


@dataclass(frozen=True)
class TrainingSetup:
    """The model and the optimizer of a program, as this process holds them, with the settings."""

    settings: Settings
    model: nn.Module  # the whole; where processes hold parts, with the last evaluation's values
    optimizer: torch.optim.Optimizer  # the user's, over what this process updates
    flat: FlatModel  # of the whole model
    process_group: ProcessGroup | None = None  # that holds the model together
    part: ModelPart | None = None  # of the model, where this process does not hold it as a whole
    reducer: Reducer | None = None  # of the gradients of all replicas; None for one process
    extension: TrainedExtension | None = None  # the model's extra values

    @property
    def trained(self) -> Trained:
        return self.flat if self.part is None else self.part

    @cached_property
    def outer(self) -> OptimizerSpec | None:
        """The servers' optimizer over deltas, where workers train locally; None elsewhere."""
        task = self.settings.task
        outer = self.settings.strategy.outer(task.workers) if task.servers else None
        if outer is None:
            return None
        return OptimizerSpec(
            "SGD", tuple(GroupSpec(dict(outer)) for _ in self.optimizer.param_groups)
        )

    @property
    def served(self) -> bool:
        """Whether servers make the steps of the user's optimizer, and hold its state."""
        return self.settings.task.servers > 0 and self.outer is None

    @property
    def optimizer_spec(self) -> OptimizerSpec:
        if self.outer is not None:
            return self.outer
        if not self.settings.task.servers and name_of(self.optimizer) is None:
            return OptimizerSpec(type(self.optimizer).__name__, ())
        return spec_of(self.optimizer)

    @cached_property
    def own_writes(self) -> OwnWrites:
        """Judges what the program writes to the values of its model itself."""
        return own_writes_of(self)

    @property
    def lean(self) -> bool:
        """Whether no process holds the whole model, not even its values of the last evaluation."""
        return self.part is not None and self.part.lean

    @property
    def replica(self) -> int:
        """Which of the job's `replicas` batches at a time is this process's, from 0."""
        task, mesh = self.settings.task, self.settings.mesh
        if task.trial is not None and task.trial.replicas:
            return task.index
        return (task.index * mesh.replicas if task.servers else 0) + mesh.replica(task.group.rank)

    @property
    def replicas(self) -> int:
        task = self.settings.task
        if task.trial is not None and task.trial.replicas:
            return task.trial.replicas
        return self.settings.mesh.replicas * (task.workers if task.servers else 1)

    @property
    def shows_progress(self) -> bool:
        """Whether this process shows progress that no other shows: of a worker, rank 0 alone."""
        group = self.process_group
        if group is None:
            return True
        return group.is_chief if self.settings.task.servers else group.shows_progress

    def groups_now(self) -> NamedGroups:
        """Returns the optimizer's groups as they are trained: with what the program froze later."""
        before = self.flat.parameters
        every = named_groups(self.model, self.optimizer, frozen=True)
        known = {id(parameter): name for name, parameter in before.items()}
        for name, parameter in chain.from_iterable(every):
            if self.settings.task.servers and known.get(id(parameter), name) != name:
                raise ConfigurationError(
                    f"the parameter {known[id(parameter)]!r} is called {name!r} since another was "
                    "put before it, and servers know it by its name: append new modules at the end"
                )
        return [[(n, p) for n, p in group if p.requires_grad or n in before] for group in every]

    def lay_out_again(self) -> int:
        flat = self.flat
        before = flat.parameters
        flat.lay_out(self.groups_now())
        if self.reducer is not None:
            self.reducer.lay_out()
        known = set(map(id, before.values()))
        added = [each for each in flat.parameters.values() if id(each) not in known]
        digests = [digest(each.detach()) for each in added]
        return zlib.crc32(repr((flat.layout.spec, digests)).encode())

    def name_of(self, parameter: torch.Tensor) -> str | None:
        model = dict(named_parameters(self.model))
        every = chain.from_iterable(
            held.items() for held in (self.trained.parameters, self.flat.parameters, model)
        )
        return next((name for name, each in every if each is parameter), None)

    def frozen(self) -> list[nn.Parameter]:
        """Returns the optimizer's parameters that are frozen now, in the part and in the model."""
        groups = self.optimizer.param_groups
        mine = [each for group in groups for each in group["params"] if not each.requires_grad]
        model = dict(named_parameters(self.model))
        names = [self.name_of(parameter) for parameter in mine]
        return mine + [model[name] for name in names if name in model]

    def parameters_of_each(self) -> list[list[nn.Parameter]]:
        trained = self.trained.parameters
        held = chain(self.flat.parameters.items(), trained.items())
        own = {id(parameter): trained.get(name) for name, parameter in held}
        return [
            [
                found
                for group in optimizer.param_groups
                for parameter in group["params"]
                if (found := own.get(id(parameter))) is not None
            ]
            for optimizer in members(self.optimizer)
        ]

    def agree_on_optimizer(self, *, takes_part: bool = True) -> None:
        """Checks that all processes that step together step the same one of several optimizers."""
        joint, process_group = self.optimizer, self.process_group
        if not isinstance(joint, JointOptimizer) or process_group is None:
            return
        chosen = float(joint.chosen)
        votes = [chosen, chosen**2, 1.0] if takes_part else [0.0, 0.0, 0.0]
        total, squares, count = process_group.total(votes)()
        if total**2 != squares * count:
            raise ConfigurationError(
                f"rank {process_group.rank} makes a step of optimizer {joint.chosen}, and another "
                "process of another: every process must step the same optimizers in the same order"
            )
        joint.chosen = round(total / count)
