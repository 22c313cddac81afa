"""The part of a model that one process of a process group holds."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.parallel.config import PipelineConfig, Plan
from trireme.parallel.parameter_hooks import has_hooks, hooked, refusal
from trireme.parallel.processes.process_group import TorchProcessGroup
from trireme.parallel.sharding import copies, fully_sharded, load_whole_tensors
from trireme.parallel.stages import Stage, balance, chain_of, cut_at, notes_of, parameter_costs
from trireme.session.model.model_part import ModelPart
from trireme.session.model.module_names import named_buffers, named_parameters
from trireme.tensors import fill_local, full_tensor, to_local

if TYPE_CHECKING:
    from trireme.parallel.pipeline import Pipeline

_log = logging.getLogger(__name__)


class MeshPart(ModelPart):
    """The pipeline stages and shards of one process."""

    def __init__(
        self,
        process_group: TorchProcessGroup,
        model: nn.Module,
        pipeline: PipelineConfig,
        plan: Plan | None,
        *,
        cut: nn.Module | None = None,
    ) -> None:
        self.process_group = process_group
        self.say, self.warn = _log.info, _log.warning
        # Called when the parameters of other processes have left `parameters`.
        self.on_placed: Callable[[], None] = lambda: None
        self._pipeline_config = pipeline
        self._plan = plan
        self.device = process_group.device
        self.stages: list[tuple[int, Stage]] = []
        self.total_stages = 1
        self.loaded: dict[nn.Parameter, tuple[int, int]] = {}  # see `load_whole_tensors`
        copied = copy.deepcopy(model) if cut is None else cut
        if cut is not None:  # the program's own module keeps its own buffers
            _share_state(model, cut)
        if process_group.mesh.pp > 1:
            self._cut(copied)
            self.modules = [stage for _, stage in self.stages]
        else:
            self.modules = [copied]
        for module in self.modules:
            _share_state(module, model)
            if process_group.mesh.tp > 1:
                self._cut_tensors(module)
            if process_group.mesh.fsdp > 1:
                axes = ("dp", "fsdp") if process_group.mesh.dp > 1 else ("fsdp",)
                fully_sharded(module, process_group.submesh(*axes))
            if process_group.mesh.tp > 1 or process_group.mesh.fsdp > 1:
                load_whole_tensors(module, self.loaded)
        self.parameters: dict[str, nn.Parameter] = {
            name: parameter
            for module in self.modules
            for name, parameter in named_parameters(module)
        }
        # A program may freeze and unfreeze the parameters of `model`, which the part then follows.
        self._known = dict(named_parameters(model)) if cut is None else {}
        self._hooked = hooked(model)  # of which the part gets the hooks
        self._thawed = {name: known.requires_grad for name, known in self._known.items()}
        self.trained: list[nn.Parameter] = [
            parameter for parameter in self.parameters.values() if parameter.requires_grad
        ]
        self._processes = process_group.size // process_group.mesh.parts

    def _cut(self, model: nn.Module) -> None:
        config = self._pipeline_config = _one_piece_if_carried(model, self._pipeline_config)
        mesh = self.process_group.mesh
        links = chain_of(model)
        total = mesh.pp * config.stages_per_process
        if config.split is not None:
            cuts = cut_at(links, config.split)
            if len(cuts) != total - 1:
                raise ConfigurationError(
                    f"{len(cuts)} split points make {len(cuts) + 1} stages, and pp={mesh.pp} with "
                    f"the schedule {config.schedule} needs {total}: name {total - 1}"
                )
        else:
            cuts = balance(parameter_costs(links), total)
        bounds = [0, *cuts, len(links)]
        self.total_stages = total
        self.stages = [
            (stage, Stage(links[bounds[stage] : bounds[stage + 1]]))
            for stage in range(total)
            if stage % mesh.pp == self.process_group.coordinates["pp"]
        ]
        _refuse_tied(links, bounds)

    def _cut_tensors(self, module: nn.Module) -> None:
        from trireme.parallel.tensor_parallel import tensor_parallel  # loads slowly

        group = self.process_group
        try:
            tensor_parallel(module, group.submesh("tp"), self._plan)
        except ConfigurationError as error:
            # A stage may have no layer to split, as long as another stage has one.
            if group.mesh.pp == 1 or "no linear layer" not in str(error):
                raise

    def pipeline(self, loss: Callable[[Any, Any], torch.Tensor]) -> Pipeline:
        """Returns the pipeline that runs this process's stages."""
        from trireme.parallel.pipeline import Pipeline  # loads slowly

        known = self._known.values()
        return Pipeline(
            self.process_group,
            self.stages,
            self.total_stages,
            self._pipeline_config,
            loss,
            lambda: tuple(parameter.requires_grad for parameter in known),
        )

    def zero_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = None
            known = self._known.get(name)
            if known is not None and name not in self._hooked and has_hooks(known):
                raise refusal(name)
            if known is not None and known.requires_grad != self._thawed[name]:
                self._thawed[name] = known.requires_grad
                parameter.requires_grad_(known.requires_grad)

    def collect_gradients(self) -> None:
        """Does nothing: optimizers read the gradients where backward has left them."""

    def check_gradients(self) -> None:
        """Drops the gradients of frozen parameters, which FSDP computes too."""
        trained = [p for p in self.parameters.values() if p.requires_grad]
        for parameter in self.parameters.values():
            if not parameter.requires_grad:
                parameter.grad = None
        if self.process_group.mesh.parts == 1 and trained and all(p.grad is None for p in trained):
            raise ConfigurationError(
                "the loss reached no parameter that is trained. Where the model is split (fsdp, "
                "tensor, a mesh) a session computes with its own parts of it: compute the loss "
                "from the outputs that the loss function receives, or use trireme.distribute, "
                "which splits the program's own module"
            )

    def gradient_norm(self) -> torch.Tensor:
        square = 0.0
        for parameter in self.trained:
            if parameter.grad is not None:
                norm = torch.linalg.vector_norm(to_local(parameter.grad), dtype=torch.float64)
                square += float(norm) ** 2 / copies(parameter, self._processes)
        total: torch.Tensor = torch.tensor(self.process_group.total([square])()[0]).double().sqrt()
        return total

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        for parameter in self.trained:
            if parameter.grad is not None:
                to_local(parameter.grad).mul_(factor)

    @torch.no_grad()
    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Fills this process's parameters from whole tensors."""
        for name, parameter in self.parameters.items():
            if name in values:
                fill_local(parameter, values[name])

    def whole_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the whole gradient of each parameter of this process's stages, on the CPU."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and parameter.grad is not None:
                yield name, full_tensor(parameter.grad)

    @property
    def buffer_names(self) -> frozenset[str]:
        return frozenset(name for module in self.modules for name, _ in named_buffers(module))


def _one_piece_if_carried(model: nn.Module, config: PipelineConfig) -> PipelineConfig:
    """Returns the configuration, with one micro-batch where a layer carries state."""
    carried = [name for name, module in model.named_modules() if getattr(module, "carry", False)]
    if not carried:
        return config
    if config.microbatches not in (None, 1):
        raise ConfigurationError(
            f"{carried[0]} carries its state from batch to batch, and {config.microbatches} "
            "micro-batches would pass it on to each other: use --microbatches 1, or carry=False"
        )
    return replace(config, microbatches=1)


def _share_state(module: nn.Module, model: nn.Module) -> None:
    """Shares buffers and state dictionaries: programs change them in the model."""
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
    seen: dict[int, tuple[int, str]] = {}
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        for link, layer in links[start:stop]:
            for name, parameter in layer.named_parameters():
                first, other = seen.setdefault(id(parameter), (stage, f"{link}.{name}"))
                if first != stage:
                    raise ConfigurationError(
                        f"{link}.{name} and {other} are one parameter, and lie in pipeline stages "
                        f"{stage} and {first}: untie them, or split elsewhere (split=...)"
                    )
