"""The assembly and the replicas of a model that several processes hold together.

Only such sessions import this module. They import FSDP, DTensor and pipelines where they use them,
as that takes seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from trireme.errors import ConfigurationError, UnsupportedOptimizerError
from trireme.launch.config.task_config import TaskConfig
from trireme.mesh import Mesh
from trireme.parallel.backends.collective import Collective
from trireme.parallel.backends.worker_processes import WorkerProcess, WorkerProcesses
from trireme.parallel.config import pipeline_config
from trireme.parallel.deferred import Deferred
from trireme.parallel.gradients import BucketedMean, EqualBatchMean, ShardedMean
from trireme.parallel.model_part import MeshPart
from trireme.parallel.parameter_hooks import carry_over, hooked
from trireme.parallel.processes.lost_peers import lost_peer
from trireme.parallel.processes.process_group import ProcessGroupConfig, TorchProcessGroup
from trireme.ps.flat import FlatModel
from trireme.ps.layout import Layout
from trireme.ps.messages import LayoutSpec
from trireme.ps.optimizers import members
from trireme.session.backends.base import Backend
from trireme.session.backends.together import Processes, Together
from trireme.session.loss import Loss, model_loss, scalar
from trireme.session.metric_value import Metric
from trireme.session.model.batch import examples_in
from trireme.session.model.building import Optimizers, build_optimizer
from trireme.session.model.computation import Computation
from trireme.session.model.extension import extension_layers
from trireme.session.model.module_names import named_parameters
from trireme.session.model.reducer import Reducer
from trireme.session.model.trained import named_groups
from trireme.session.model.training_setup import TrainingSetup
from trireme.session.options import Options
from trireme.session.result import StepResult
from trireme.session.settings import Settings
from trireme.tensors import is_dtensor, local_part


class Parallel(Together):
    """Processes that hold replicas, shards, tensor-parallel parts and stages of one model."""

    def assemble(
        self,
        settings: Settings,
        device: torch.device,
        make_model: Callable[[], nn.Module],
        make_optimizer: Optimizers,
        *,
        in_place: bool,
        given: nn.Module | Callable[[], nn.Module] | None,
    ) -> TrainingSetup:
        """Joins the process group that holds the model, and assembles this process's part of it.

        The groups and the state of the optimizer are then those of the part of the model that this
        process updates.
        """
        task = settings.task
        process_group = TorchProcessGroup(
            ProcessGroupConfig(
                mesh=settings.mesh,
                rank=task.group.rank,
                address=task.group.address,
                listen_fd=task.descriptors.get("process_group"),
                prefix=task.group.prefix,
                device=device,
                join_seconds=task.config.timeouts.join_timeout,
            )
        )
        try:
            deferred = None if given is None else self.deferred(settings, given)
            model = make_model() if deferred is None else deferred.model
            for layer in extension_layers(model).values():
                layer.check_job(model, settings)
            optimizer = build_optimizer(make_optimizer, model)
            _refuse_sparse(optimizer)
            return self._split(
                settings, process_group, model, optimizer, deferred, in_place=in_place
            )
        except BaseException:
            process_group.close(together=False)
            raise

    def deferred(
        self, settings: Settings, given: nn.Module | Callable[[], nn.Module]
    ) -> Deferred | None:
        """Returns a model without memory for its parameters; None where each process builds it."""
        return None

    def _split(
        self,
        settings: Settings,
        process_group: TorchProcessGroup,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        deferred: Deferred | None,
        *,
        in_place: bool,
    ) -> TrainingSetup:
        """Builds the flat buffers, and splits the model."""
        task = settings.task
        servers = max(task.servers, 1)
        shared = task.servers > 0 and process_group.is_chief
        if not process_group.mesh.sharded and not settings.placed:
            groups = named_groups(model, optimizer)
            flat = FlatModel(groups, servers=servers, shared=shared, counted=True)
            _check_same(task, process_group, flat)
            mean = BucketedMean(process_group, flat)
            return TrainingSetup(settings, model, optimizer, flat, process_group, reducer=mean)
        with_hooks = hooked(model)
        every = named_groups(model, optimizer, frozen=True)
        names = [[name for name, _ in group] for group in every]
        whole, cut = model, None
        if in_place or deferred is not None:
            whole, cut = copy.deepcopy(model), model
            point(optimizer, names, dict(named_parameters(whole)))
        flat = FlatModel(named_groups(whole, optimizer), servers=servers, shared=shared)
        _check_same(task, process_group, flat)  # before parts of other shapes are cut
        part = self.part(settings, process_group, whole, optimizer, deferred, cut)
        whole_batches = settings.mesh.pp == 1 and not settings.placed
        carry_over(with_hooks, part.parameters, whole=whole_batches)
        if not task.servers:
            point(optimizer, names, part.parameters)
            # Other processes may hold parts of it only after the first batch.
            part.on_placed = lambda: point(optimizer, names, part.parameters)
        self.ready(settings, part)
        reducer = _reducer(process_group, part, in_place=in_place)
        return TrainingSetup(settings, whole, optimizer, flat, process_group, part, reducer)

    def part(
        self,
        settings: Settings,
        process_group: TorchProcessGroup,
        whole: nn.Module,
        optimizer: torch.optim.Optimizer,
        deferred: Deferred | None,
        cut: nn.Module | None,
    ) -> MeshPart:
        """Returns this process's part of the model; cuts `cut` where it is given, else a copy."""
        plan = settings.options.tensor_plan
        return MeshPart(process_group, whole, pipeline_config(settings), plan, cut=cut)

    def ready(self, settings: Settings, part: MeshPart) -> None:
        """Called when the optimizer is over the parameters of the part."""

    def computations(
        self, setup: TrainingSetup, loss: Loss, metrics: Mapping[str, Metric]
    ) -> tuple[Computation, Computation]:
        options, part, reducer = setup.settings.options, setup.part, setup.reducer
        assert reducer is not None
        if part is None:
            whole = ProcessGroupComputation(
                setup.model, loss, setup.flat, options, metrics, reducer
            )
            return whole, whole
        assert isinstance(part, MeshPart)
        evaluator = Computation(setup.model, loss, setup.flat, options, metrics)
        if setup.settings.mesh.pp > 1:
            return PipelineComputation(part, loss, options, metrics, reducer), evaluator
        replica = ProcessGroupComputation(part.modules[0], loss, part, options, metrics, reducer)
        return replica, evaluator

    def backend(
        self,
        setup: TrainingSetup,
        waiting: Callable[[str, Sequence[str], float], None],
        doing: Callable[[], tuple[str, str]],
    ) -> Backend:
        return Collective(_group(setup), setup, waiting, doing)

    def processes(self, setup: TrainingSetup) -> Processes:
        return WorkerProcesses(_group(setup), setup)

    def other_process(self, setup: TrainingSetup) -> Backend:
        return WorkerProcess(WorkerProcesses(_group(setup), setup))


def _group(setup: TrainingSetup) -> TorchProcessGroup:
    assert isinstance(setup.process_group, TorchProcessGroup)
    return setup.process_group


def _refuse_sparse(optimizer: torch.optim.Optimizer) -> None:
    if any(isinstance(each, torch.optim.SparseAdam) for each in members(optimizer)):
        raise UnsupportedOptimizerError(
            "SparseAdam takes sparse gradients alone, and processes that train together exchange "
            "whole ones: use Adam, and sparse=False; or, with parameter "
            "servers, trireme.Embedding with Adam, of which only the rows of a batch are sent"
        )


def _check_same(task: TaskConfig, process_group: TorchProcessGroup, flat: FlatModel) -> None:
    own = flat.layout.spec
    spec = process_group.broadcast(msgspec.msgpack.encode(own) if process_group.is_chief else None)
    chief = msgspec.structs.replace(task, index=task.index if task.servers else 0).in_group(rank=0)
    theirs = Layout(msgspec.msgpack.decode(spec, type=LayoutSpec))
    theirs.check_same(flat.layout, whose=chief.name, others=task.name)


def point(
    optimizer: torch.optim.Optimizer,
    names: Sequence[Sequence[str]],
    here: Mapping[str, nn.Parameter],
) -> None:
    """Replaces the parameters of an optimizer by parameters of the same names, or by their shards.

    The groups stay the same objects, so that schedulers over them still work. Parameters that this
    process does not hold leave the groups.
    """
    left = iter(names)
    for member in members(optimizer):
        state = dict(member.state)
        member.state.clear()
        for group in member.param_groups:
            named = next(left)
            found = [name for name in named if name in here]
            before = dict(zip(named, group["params"], strict=False))
            for name in found:
                if before[name] in state:
                    member.state[here[name]] = {
                        key: local_part(here[name], value) if torch.is_tensor(value) else value
                        for key, value in state[before[name]].items()
                    }
            group["params"][:] = [here[name] for name in found]
            if "foreach" in group:  # torch's many-tensor kernels take no mixture of shards
                group["foreach"] = False
            if len({getattr(each, "device_mesh", None) for each in group["params"]}) > 1:
                group |= {"fused": False} if group.get("fused") else {}


def _reducer(process_group: TorchProcessGroup, part: MeshPart, *, in_place: bool) -> Reducer:
    mesh: Mesh = process_group.mesh
    if mesh.replicas == 1:
        return Reducer()
    if mesh.fsdp == 1:
        return ShardedMean(process_group, part.trained)
    whole = [parameter for parameter in part.trained if not is_dtensor(parameter)]
    if in_place:
        return EqualBatchMean(process_group, whole)
    # A pipeline itself averages gradients after its last micro-batch.
    return ShardedMean(process_group, whole, () if mesh.pp > 1 else part.modules)


class ProcessGroupComputation(Computation):
    """Forward and backward in which other processes take part; see `Computation`."""

    def backward(self, batch: Any) -> StepResult:
        """As `Computation.backward`, with the mean over all replicas."""
        with lost_peer():
            result = super().backward(batch)
        if isinstance(self.flat, MeshPart) and result.examples:
            self.flat.check_gradients()
        return result


class PipelineComputation(ProcessGroupComputation):
    """Runs pipeline stages. All processes know the loss; the last one has the outputs."""

    def __init__(
        self,
        part: MeshPart,
        loss: Loss,
        options: Options,
        metrics: Mapping[str, Metric],
        reducer: Reducer,
    ) -> None:
        if options.accumulate > 1:
            raise ConfigurationError(
                f"accumulate={options.accumulate} with a pipeline: micro-batches do that already; "
                f"use --microbatches {options.accumulate}"
            )
        if loss is model_loss:
            raise ConfigurationError(
                "model_loss with a pipeline: no stage has the model's own loss, which needs the "
                "whole model: give the session a loss function of (outputs, targets), or use "
                "--strategy fsdp"
            )
        if options.weight is not None:
            raise ConfigurationError(
                "weight= with a pipeline: the loss is the mean over micro-batches of one size. "
                "Leave it out, or use --strategy fsdp"
            )
        super().__init__(nn.ModuleList(part.modules), loss, part, options, metrics, reducer)
        self._reducer: Reducer = reducer
        self.pipeline = part.pipeline(lambda outputs, targets: scalar(self._loss(outputs, targets)))

    def _compute(self, batch: tuple[Any, Any]) -> StepResult:
        inputs, targets = batch
        if not isinstance(inputs, torch.Tensor) or not isinstance(targets, torch.Tensor):
            raise ConfigurationError(
                "a pipeline takes batches of one tensor of inputs and one of targets"
            )
        examples = examples_in(inputs)
        share = self._reducer.scale_factor(self._counted(examples))()
        with torch.autocast(self.flat.device.type, torch.bfloat16, enabled=self._autocast):
            loss, outputs = self.pipeline.step(inputs, targets, examples, share)
        return StepResult(loss, list(outputs), self._metrics, examples, weight=examples)
