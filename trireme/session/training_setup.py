"""What a worker trains: the model with its optimizer, split as the launch requests."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from trireme.data.seeds import derive
from trireme.errors import ConfigurationError
from trireme.parallel.reducer import Reducer
from trireme.parallel.tensors import digest
from trireme.ps.flat import FlatModel
from trireme.ps.joint_optimizer import JointOptimizer, members
from trireme.ps.messages import GroupSpec, OptimizerSpec
from trireme.ps.module_names import named_parameters
from trireme.session.metric_value import Metric
from trireme.session.own_writes import OwnWrites
from trireme.session.replica.replica import Loss, Replica, named_groups
from trireme.session.settings import Settings
from trireme.session.table_rows import TableRows, has_only_tables, tables_of

if TYPE_CHECKING:
    from trireme.parallel.deferred import Deferred
    from trireme.parallel.model_part import ModelPart
    from trireme.parallel.process_group import ProcessGroup

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
"""Builds an optimizer from parameters."""

Optimizers: TypeAlias = (
    OptimizerFactory
    | torch.optim.Optimizer
    | Sequence[torch.optim.Optimizer]
    | Mapping[str, OptimizerFactory | torch.optim.Optimizer]
)
"""The optimizer of a program, or several optimizers: see `Session`."""

_SEED_MODEL = 11
_log = logging.getLogger(__name__)


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
        tables: the rows of the model's sparse tables; None where it has none.
    """

    settings: Settings
    model: nn.Module
    optimizer: torch.optim.Optimizer
    flat: FlatModel
    process_group: ProcessGroup | None = None
    part: ModelPart | None = None
    reducer: Reducer | None = None
    tables: TableRows | None = None

    def with_tables(self, tables: Any) -> TrainingSetup:
        """Returns the same setup with other tables, of the methods of `TableRows`."""
        check_tables(self.settings)
        return replace(self, tables=tables)

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

    @cached_property
    def own_writes(self) -> OwnWrites:
        """Judges what the program writes to the values of its model itself."""
        task, mesh = self.settings.task, self.settings.mesh
        copies = [] if self.part is None or self.lean else [self.flat]
        if task.servers and self.outer is not None:  # a part of the worker's delta
            return OwnWrites((), None)
        if task.servers:
            rule = self.settings.rule
            rounds_of_all = rule.synchronous and not rule.aggregate and not rule.publishes
            if rounds_of_all and self.process_group is None and not self.settings.prefetches:
                return OwnWrites((), None, sent=self.flat)
            return OwnWrites([self.trained, *copies], None)
        same = mesh.pp == 1 and self.settings.graph is None  # parameters in every process
        mine = self.trained if self.process_group is not None and same else None
        return OwnWrites(copies, mine, replicated=self.part is None)

    @property
    def lean(self) -> bool:
        """Whether no process holds the whole model, not even its values of the last evaluation."""
        return self.part is not None and self.part.lean

    @property
    def replica(self) -> int:
        """Which of the job's `replicas` batches at a time is this process's, from 0."""
        task, mesh = self.settings.task, self.settings.mesh
        return (task.index * mesh.replicas if task.servers else 0) + mesh.replica(task.rank)

    @property
    def replicas(self) -> int:
        """The number of batches that the job computes at a time."""
        task = self.settings.task
        return self.settings.mesh.replicas * (task.workers if task.servers else 1)

    @property
    def shows_progress(self) -> bool:
        """Whether this process shows progress that no other process shows.

        In a worker of several processes of a job with servers, that is the leader alone.
        """
        group = self.process_group
        if group is None:
            return True
        return group.is_chief if self.settings.task.servers else group.shows_progress

    def lay_out_anew(self) -> int:
        """Lays the model out with the parameters that the optimizer has now.

        Returns:
            A digest of the layout, and of the values of the parameters that are new.

        Raises:
            ConfigurationError: one is not the model's.
        """
        flat = self.flat
        before = flat.parameters
        every = named_groups(self.model, self.optimizer, frozen=True)
        groups = [[(n, p) for n, p in group if p.requires_grad or n in before] for group in every]
        flat.lay_out_anew(groups)
        if self.reducer is not None:
            self.reducer.lay_out()
        added = [each for name, each in flat.parameters.items() if name not in before]
        said = [digest(each.detach()) for each in added]
        return zlib.crc32(repr((flat.layout.spec, said)).encode())

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Returns the model's name for a parameter; None where the model does not have it."""
        for named in (
            self.trained.parameters,
            self.flat.parameters,
            dict(named_parameters(self.model)),
        ):
            for name, each in named.items():
                if each is parameter:
                    return name
        return None

    def frozen(self) -> list[nn.Parameter]:
        """Returns the optimizer's parameters that are frozen now, in the part and in the model."""
        groups = self.optimizer.param_groups
        mine = [each for group in groups for each in group["params"] if not each.requires_grad]
        model = dict(named_parameters(self.model))
        names = [self.name_of(parameter) for parameter in mine]
        return mine + [model[name] for name in names if name in model]

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


def device_of(settings: Settings) -> torch.device | None:
    """Returns the device of the model; None leaves the model where it is.

    Processes that compute together each take a GPU of their own, if there are any; so do workers
    with the device `cuda` without an index.
    """
    task, chosen = settings.task, settings.options.device
    if chosen is None and (task.processes == 1 or not torch.cuda.is_available()):
        return None
    device = torch.device("cuda" if chosen is None else chosen)
    several = task.processes > 1 or task.workers > 1
    if str(device) == "cuda" and several and torch.cuda.is_available():
        return torch.device("cuda", task.local_rank % torch.cuda.device_count())
    return device


def deferred_model(
    given: nn.Module | Callable[[], nn.Module], settings: Settings
) -> Deferred | None:
    """Returns a session's model without memory for its parameters, if it can be placed so.

    That is the case for a dataflow graph with an example, without parameter servers, if the program
    gives a function that builds the model. Values follow from the seed, as by `build_model`.

    Args:
        given: the model, or a function that builds it.
        settings: the seed, and how the model is placed.
    """
    graph = settings.graph
    if graph is None or graph.example is None or settings.task.servers or settings.task.dry_run:
        return None
    if isinstance(given, nn.Module):
        _log.warning(
            "every process holds the whole model, also the parts of others: give the session a "
            "function that builds it, and not the model"
        )
        return None
    from trireme.parallel.deferred import deferred

    torch.manual_seed(derive(settings.options.seed, _SEED_MODEL))
    try:
        found = deferred(given)
    except ConfigurationError as error:
        _log.warning("every process builds the whole model, also the parts of others: %s", error)
        return None
    found.model.train()
    return found


def build_model(given: nn.Module | Callable[[], nn.Module], settings: Settings) -> nn.Module:
    """Returns a session's model on its device, in training mode.

    Args:
        given: the model, or a function that builds it. Initial values that the function draws
            follow from the seed.
        settings: the seed and the device.

    Raises:
        ConfigurationError: PyTorch has no such device here.
    """
    torch.manual_seed(derive(settings.options.seed, _SEED_MODEL))
    model = given if isinstance(given, nn.Module) else given()
    device = device_of(settings)
    if device is None:
        return model.train()
    try:
        return model.to(device).train()
    except (AssertionError, RuntimeError) as error:  # torch's, where it has no such device
        found = "no CUDA device" if not torch.cuda.is_available() else "CUDA devices"
        raise ConfigurationError(
            f"the model cannot be put on device {str(device)!r} ({error}): PyTorch finds {found} "
            "here; leave `device` out to train where the model is"
        ) from error


def build_optimizer(make: Optimizers, model: nn.Module) -> torch.optim.Optimizer:
    """Returns the user's optimizer over a model's parameters; several become a joint optimizer.

    Raises:
        ConfigurationError: an object is not an optimizer, or cannot build one.
    """
    given: object = make
    if isinstance(given, torch.optim.Optimizer):
        return given
    if isinstance(given, Mapping) and given:
        return JointOptimizer([_named_optimizer(name, one, model) for name, one in given.items()])
    if isinstance(given, (list, tuple)) and given:
        for one in given:
            if not isinstance(one, torch.optim.Optimizer):
                raise ConfigurationError(
                    f"the optimizer is {one!r}: give optimizers in a list; functions that build "
                    "them go by name, in a dict"
                )
        return JointOptimizer(given)
    if not callable(make):
        raise ConfigurationError(
            f"the optimizer is {given!r}: give a function that builds one from the parameters, "
            "such as lambda params: torch.optim.Adam(params), or an optimizer; or several, in a "
            "list or a dict"
        )
    return make(model.parameters())


def _named_optimizer(name: str, make: object, model: nn.Module) -> torch.optim.Optimizer:
    """Returns one of several; a function builds it from the parameters of the child of its name."""
    if isinstance(make, torch.optim.Optimizer):
        return make
    if not callable(make):
        raise ConfigurationError(
            f"the optimizer is {make!r}: give an optimizer, or a function that builds one from the "
            f"parameters of the model's child {name!r}"
        )
    child = dict(model.named_children()).get(name)
    if child is None:
        children = ", ".join(repr(each) for each, _ in model.named_children())
        raise ConfigurationError(
            f"the optimizer {name!r} is a function, which builds one from the parameters of the "
            f"model's child of that name, and the model has {children or 'no children'}: call it "
            "by the name of a child, or give an optimizer"
        )
    optimizer: torch.optim.Optimizer = make(child.parameters())
    return optimizer


def assemble(
    settings: Settings,
    make_model: Callable[[], nn.Module],
    make_optimizer: Optimizers,
    *,
    in_place: bool = False,
    device: torch.device | None = None,
    defer: Callable[[], Deferred | None] = lambda: None,
) -> TrainingSetup:
    """Assembles the model and the optimizer; joins the process group where there is one.

    Args:
        settings: what the launch and the program have chosen.
        make_model: returns the model, on its device.
        make_optimizer: the optimizer, a function that builds it, or several of these.
        in_place: whether the program's own loop computes with the model, so that the module itself
            is split, where the launch requests it, instead of a copy.
        device: the device of this process; None for that of `device_of`.
        defer: returns the model without memory for its parameters, where it is placed so.

    Raises:
        ConfigurationError: the optimizer is invalid, or not over the model's parameters; or the
            model cannot be split.
        TriremeError: the other processes did not join.
    """
    task, mesh = settings.task, settings.mesh
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    if (mesh.size == 1 and settings.graph is None) or task.dry_run:
        model = make_model()
        if has_only_tables(model):
            raise ConfigurationError(
                "the model has sparse tables (trireme.Embedding) and no parameter besides, and "
                "torch's optimizers need one: add it, such as a bias, "
                "self.bias = nn.Parameter(torch.zeros(1)). Programs of tables alone may use "
                "trireme.ps.connect"
            )
        optimizer = build_optimizer(make_optimizer, model)
        flat = FlatModel(
            named_groups(model, optimizer),
            servers=max(task.servers, 1),
            shared=task.servers > 0,
            staged=settings.prefetches,
        )
        tables = tables_of(model, optimizer)
        if tables is not None:
            check_tables(settings)
        return TrainingSetup(settings, model, optimizer, flat, tables=tables)
    from trireme.session.replica.group_replica import assemble_together  # loads slowly

    here = device or device_of(settings) or torch.device("cpu")
    return assemble_together(
        settings, here, make_model, make_optimizer, in_place=in_place, defer=defer
    )


def check_tables(settings: Settings) -> None:
    """Checks that sparse tables can be trained as the launch requests.

    Raises:
        ConfigurationError: they cannot; says how they can.
    """
    rule = settings.rule
    refused = [
        (settings.strategy.name, rule.every is not None),
        ("prefetch", settings.prefetches),
        ("ema", settings.options.ema is not None),
        ("trireme graph", settings.task.draw is not None),
        (
            "--mesh" if settings.task.servers else f"the strategy {settings.strategy.name}",
            settings.mesh.size > 1 or settings.graph is not None,
        ),
    ]
    for name, is_chosen in refused:
        if is_chosen:
            raise ConfigurationError(
                f"sparse tables (trireme.Embedding, trireme.ps.connect) under {name} are not built "
                "yet: they work in one process, and with parameter servers (--ps) under async, ssp "
                "and sync"
            )


def replicas_of(
    setup: TrainingSetup, loss: Loss, metrics: Mapping[str, Metric]
) -> tuple[Replica, Replica]:
    """Returns the replica that computes gradients, and one that computes with the whole model.

    Raises:
        ConfigurationError: an option has no meaning for a pipeline.
    """
    if setup.settings.task.draw is not None:
        from trireme.session.replica.drawing_replica import DrawingReplica  # loads slowly

        drawing = DrawingReplica(setup, loss, metrics)
        return drawing, drawing
    if setup.process_group is None:
        replica = Replica(setup.model, loss, setup.flat, setup.settings.options, metrics)
        return replica, replica
    from trireme.session.replica.group_replica import replicas_together

    try:
        return replicas_together(setup, loss, metrics)
    except BaseException:
        setup.process_group.close(together=False)
        raise
