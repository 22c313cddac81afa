"""Copies of the values of one training step, and their summaries for TensorBoard.

The training thread copies the values; another thread encodes and writes them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import activation
from torch.nn.modules.conv import _ConvNd

from trireme.dashboards.distribution import distribution_of
from trireme.dashboards.forward_tracer import Graph
from trireme.dashboards.image_grids import as_images, feature_maps, filters, grid
from trireme.tensors import tensors_in, to_local

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_CLASSES = 20
"""The largest number of classes for which each has a curve of precision and recall."""


@dataclass
class Capture:
    """The copied values of one step."""

    walltime: float = field(default_factory=time.time)
    # the tensors whose distribution is shown, by tag
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    # the name and a copy of the weights of the first layer whose inputs are images
    first: tuple[str, torch.Tensor] | None = None
    inputs: torch.Tensor | None = None  # the first examples
    # the class of each example; None where the targets are not classes
    labels: torch.Tensor | None = None
    # the outputs of the model; None where they are not one tensor
    outputs: torch.Tensor | None = None
    # the name of a module and its activations: the last that have one vector for each example
    features: tuple[str, torch.Tensor] | None = None
    graph: Graph = ()

    # -- in the training thread -----------------------------------------------------------------

    def observe(self, name: str, module: nn.Module, outputs: Any) -> None:
        """Copies what a module returned, if it is one whose outputs are shown."""
        output = next((t for t in tensors_in(outputs) if t.is_floating_point()), None)
        if output is None:
            return
        kind, scope = _kind(module), name or "model"
        if kind is not None:
            copy = output.detach().clone()
            self.values[f"{scope}/{kind}"] = copy
            if kind == "activation" and copy.dim() == 2:
                self.features = (scope, copy)
        if not name:
            self.outputs = output.detach().clone()

    def parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Copies the parameters that this process holds, and their gradients."""
        for name, parameter in parameters.items():
            module, _, own = name.rpartition(".")
            module = module or "model"
            tag = f"{module}/{own}"
            value = to_local(parameter.detach())
            self.values[tag] = value.clone()
            if self.first is None and value.dim() > 1 and filters(value[:1]) is not None:
                self.first = (module, self.values[tag])
            if parameter.grad is not None and not parameter.grad.is_sparse:
                self.values[f"{tag}/gradient"] = to_local(parameter.grad.detach()).clone()

    def batch(self, inputs: Any, targets: Any) -> None:
        """Copies the first 512 examples of the batch, and the labels of all."""
        seen = next(tensors_in(inputs), None)
        if seen is not None and seen.dim() >= 2:
            self.inputs = seen.detach()[:512].clone()
        if isinstance(targets, torch.Tensor) and targets.dim() == 1:
            self.labels = targets.detach().clone()

    # -- in the writing thread ------------------------------------------------------------------

    def write_values(self, writer: SummaryWriter, step: int) -> None:
        """Writes the distributions, and their moments as scalars."""
        from trireme.dashboards import events

        for tag, value in self.values.items():
            found = distribution_of(value)
            if found is not None:
                events.add_distribution(writer, tag, found, step, self.walltime)

    def write_images(self, writer: SummaryWriter, step: int) -> None:
        """Writes inputs, first-layer filters and feature maps."""
        shown = {} if self.inputs is None else {"images/inputs": as_images(self.inputs)}
        pictures = {tag: None if i is None else grid(i) for tag, i in shown.items()}
        if self.first is not None:
            pictures[f"{self.first[0]}/filters"] = filters(self.first[1])
        for tag, value in self.values.items():
            scope, _, kind = tag.rpartition("/")
            if kind in ("pre_activation", "activation"):
                pictures[f"{scope}/feature_maps"] = feature_maps(value)
        for tag, picture in pictures.items():
            if picture is not None:
                writer.add_image(tag, picture, step, walltime=self.walltime)

    def write_pr_curves(self, writer: SummaryWriter, step: int) -> None:
        """Writes precision and recall on the batch, for each class, where there are classes."""
        outputs, labels = self.outputs, self.labels
        if outputs is None or labels is None:
            return
        outputs, labels = outputs.float().cpu(), labels.cpu()[: len(outputs)]
        if outputs.dim() == 2 and outputs.shape[1] > 1 and not labels.is_floating_point():
            if outputs.shape[1] > _CLASSES:
                return
            for kind, likely in enumerate(outputs.softmax(1).unbind(1)):
                tag = f"precision_recall/class_{kind}"
                writer.add_pr_curve(tag, labels == kind, likely, step, walltime=self.walltime)
        elif outputs.numel() == labels.numel() and ((labels == 0) | (labels == 1)).all():
            likely = outputs.reshape(-1).sigmoid()
            tag = "precision_recall/positive"
            writer.add_pr_curve(tag, labels > 0, likely, step, walltime=self.walltime)

    def write_features(self, writer: SummaryWriter, step: int) -> None:
        """Writes the features of the examples as points for the projector, with their labels."""
        name, points = self.features or ("outputs", self.outputs)
        if points is None or points.dim() != 2:
            return
        inputs = None if self.inputs is None else self.inputs[: len(points)]
        points = points[: len(inputs) if inputs is not None else 512]
        pictures = None if inputs is None else as_images(inputs, len(points))
        labels = None if self.labels is None else self.labels[: len(points)].tolist()
        writer.add_embedding(
            points.float().cpu(),
            metadata=labels,
            label_img=None if pictures is None else pictures.cpu(),
            global_step=step,
            tag=f"{name}/features",
        )


def _kind(module: nn.Module) -> str | None:
    """Returns what a module's outputs are called; None where they are not shown."""
    if isinstance(module, (nn.Linear, nn.Bilinear, _ConvNd)):
        return "pre_activation"
    if type(module).__module__ == activation.__name__ and not any(True for _ in module.children()):
        return "activation"
    if any(True for _ in module.parameters(recurse=False)):
        return "output"
    return None
