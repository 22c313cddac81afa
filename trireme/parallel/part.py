"""What one process of a gang holds of a model, and whole tensors from it and into it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import nn

from trireme.errors import ConfigurationError
from trireme.parallel.config import PartConfig, PipelineConfig, stages_per_process
from trireme.parallel.gang import Gang
from trireme.parallel.local import local
from trireme.parallel.sharding import copies, fully_sharded, take, whole
from trireme.parallel.stages import (
    Stage,
    balance,
    chain_of,
    cut_at,
    measured_costs,
    notes_of,
    parameter_costs,
)
from trireme.ps.names import named_buffers, named_parameters

if TYPE_CHECKING:
    from trireme.parallel.pipeline import Pipeline

__all__ = ["ModelPart", "join"]


class ModelPart:
    """The stages and shards of one process.

    It offers what a replica asks of a `FlatModel`, over tensors that lie where they do.

    Args:
        gang: the processes.
        model: whole, on the device of this process, the same in all of them; it keeps whole values
            for people. Buffers are shared with what is cut.
        config: how it is cut.
        cut: what is cut, in place: a copy of `model` with which the program computes; None makes
            one.

    Attributes:
        modules: the model's pieces of this process: one, or one a stage.
        parameters: the parameters of this process by the names they have in the model.
        device: where they are.

    Raises:
        ConfigurationError: the model cannot be cut so.
    """

    def __init__(
        self, gang: Gang, model: nn.Module, config: PartConfig, *, cut: nn.Module | None = None
    ) -> None:
        self._gang = gang
        self._config = config
        self.device = gang.device
        self.stages: list[tuple[int, Stage]] = []
        self.total_stages = 1
        copied = copy.deepcopy(model) if cut is None else cut
        if cut is not None:  # the program's own module keeps its own buffers
            _share_state(model, cut)
        if gang.mesh.pp > 1:
            self._cut(copied)
            self.modules: list[nn.Module] = [stage for _, stage in self.stages]
        else:
            self.modules = [copied]
        for module in self.modules:
            _share_state(module, model)
            if gang.mesh.tp > 1:
                self._cut_tensors(module)
            if gang.mesh.fsdp > 1:
                axes = ("dp", "fsdp") if gang.mesh.dp > 1 else ("fsdp",)
                fully_sharded(module, gang.along(*axes))
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter
            for module in self.modules
            for name, parameter in named_parameters(module)
        }
        # A program may freeze and thaw the parameters of the module that it knows.
        self._known = dict(named_parameters(model)) if cut is None else {}
        self._thawed = {name: known.requires_grad for name, known in self._known.items()}
        self._trained = [p for p in self.parameters.values() if p.requires_grad]
        self._processes = gang.size // gang.mesh.pp

    def _cut(self, model: nn.Module) -> None:
        config, mesh = _one_piece_if_carried(model, self._config.pipeline), self._gang.mesh
        self._pipeline_config = config
        links = chain_of(model)
        total = mesh.pp * stages_per_process(config.schedule)
        if config.split is not None:
            cuts = cut_at(links, config.split)
            if len(cuts) != total - 1:
                raise ConfigurationError(
                    f"{len(cuts)} split points make {len(cuts) + 1} stages, and pp={mesh.pp} with "
                    f"the schedule {config.schedule} needs {total}: name {total - 1}"
                )
        else:
            costs = parameter_costs(links)
            if config.example is not None:  # one process measures, or each would cut elsewhere
                costs = self._agreed(measured_costs(links, config.example))
            cuts = balance(costs, total)
        bounds = [0, *cuts, len(links)]
        self.total_stages = total
        self.stages = [
            (stage, Stage(links[bounds[stage] : bounds[stage + 1]]))
            for stage in range(total)
            if stage % mesh.pp == self._gang.place["pp"]
        ]
        _refuse_tied(links, bounds)

    def _agreed(self, costs: list[float]) -> list[float]:
        tensor = torch.tensor(costs, dtype=torch.float64)
        self._gang.broadcast_tensor(tensor)
        return [float(cost) for cost in tensor]

    def _cut_tensors(self, module: nn.Module) -> None:
        from trireme.parallel.tensor import tensor_parallel  # loads slowly

        plan = self._config.tensor_plan
        if self._gang.mesh.pp == 1:
            tensor_parallel(module, self._gang.along("tp"), plan)
            return
        # A stage may hold nothing that can be cut; another one does.
        try:
            tensor_parallel(module, self._gang.along("tp"), plan)
        except ConfigurationError as error:
            if "no linear layer" not in str(error):
                raise

    def pipeline(self, loss: Callable[[Any, Any], torch.Tensor]) -> Pipeline:
        """Returns what drives this process's stages."""
        from trireme.parallel.pipeline import Pipeline  # loads slowly

        return Pipeline(self._gang, self.stages, self.total_stages, self._pipeline_config, loss)

    # -- gradients ------------------------------------------------------------------------------

    def zero_gradients(self) -> None:
        """Forgets the gradients: backward makes new ones, for what the program has not frozen."""
        for name, parameter in self.parameters.items():
            parameter.grad = None
            known = self._known.get(name)
            if known is not None and known.requires_grad != self._thawed[name]:
                self._thawed[name] = known.requires_grad
                parameter.requires_grad_(known.requires_grad)

    def check_gradients(self) -> None:
        """Leaves out the gradients of what is frozen, which FSDP makes all the same.

        Raises:
            ConfigurationError: backward reached nothing that is trained here.
        """
        trained = [p for p in self.parameters.values() if p.requires_grad]
        for parameter in self.parameters.values():
            if not parameter.requires_grad:
                parameter.grad = None
        if self._gang.mesh.pp == 1 and trained and all(p.grad is None for p in trained):
            raise ConfigurationError(
                "the loss reached no parameter that is trained. Where the model is cut (fsdp, "
                "tensor, a mesh) a session computes with pieces of its own: compute the loss from "
                "the outputs that it is given, or use trireme.distribute, which cuts the "
                "program's own module"
            )

    def gradient_norm(self) -> torch.Tensor:
        """Returns the L2 norm of the gradient of the whole model, a 0-dim float64 tensor."""
        square = 0.0
        for parameter in self._trained:
            if parameter.grad is not None:
                norm = torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float64)
                square += float(norm) ** 2 / copies(parameter, self._processes)
        total: torch.Tensor = torch.tensor(self._gang.total([square])()[0]).double().sqrt()
        return total

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Multiplies all gradients in place."""
        for parameter in self._trained:
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)

    # -- whole tensors --------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Fills this process's parameters from whole tensors."""
        for name, parameter in self.parameters.items():
            if name in values:
                take(parameter, values[name])

    def whole_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the whole gradient of each parameter of this process's stages, on the CPU."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and parameter.grad is not None:
                yield name, whole(parameter.grad)

    @property
    def buffer_names(self) -> frozenset[str]:
        """The names of the buffers that this process keeps up to date."""
        return frozenset(name for module in self.modules for name, _ in named_buffers(module))


def join(gang: Gang, mine: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of all pipeline stages together, on the CPU, in every process."""
    if gang.mesh.pp == 1:
        return dict(mine)
    joined: dict[str, torch.Tensor] = {}
    for data in gang.exchange(save_bytes(dict(mine)), gang.stage_speakers()):
        joined |= load_bytes(data)
    return joined


def _one_piece_if_carried(model: nn.Module, config: PipelineConfig) -> PipelineConfig:
    """Returns the configuration, with whole batches where a layer goes on from the batch before.

    Raises:
        ConfigurationError: several micro-batches were asked for, which would go on from each other.
    """
    carried = [name for name, module in model.named_modules() if getattr(module, "carry", False)]
    if not carried:
        return config
    if config.microbatches not in (None, 1):
        raise ConfigurationError(
            f"{carried[0]} goes on where the batch before has ended, and {config.microbatches} "
            "micro-batches would go on from each other: use --microbatches 1, or carry=False"
        )
    return replace(config, microbatches=1)


def _share_state(module: nn.Module, model: nn.Module) -> None:
    """Makes a copied piece of a model work on buffers and notes of the model itself.

    So what a program does with them, such as to forget the state of a recurrent layer, holds.
    """
    own = dict(model.named_buffers())
    for name, _ in list(module.named_buffers()):
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._buffers[last] = own[name]
    layers = dict(model.named_modules())
    for path, part in module.named_modules():
        if path in layers:
            for name, notes in notes_of(layers[path]).items():
                setattr(part, name, notes)


def _refuse_tied(links: Sequence[tuple[str, nn.Module]], bounds: Sequence[int]) -> None:
    """A parameter that two stages use would be trained twice."""
    seen: dict[int, tuple[int, str]] = {}
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        for link, layer in links[start:stop]:
            for name, parameter in layer.named_parameters():
                first, other = seen.setdefault(id(parameter), (stage, f"{link}.{name}"))
                if first != stage:
                    raise ConfigurationError(
                        f"{link}.{name} and {other} are one parameter, and lie in pipeline stages "
                        f"{stage} and {first}: untie them, or cut elsewhere (split=...)"
                    )
