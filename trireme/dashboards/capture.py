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

from trireme.dashboards.forward_tracer import Graph
from trireme.dashboards.images import as_images, filters
from trireme.tensors import tensors_in, to_local

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_EXAMPLES = 16  # that are shown
_BINS = 64  # of a histogram, equally wide, as TensorBoard draws them


@dataclass
class Capture:
    """The copied values of one step."""

    walltime: float = field(default_factory=time.time)
    # the tensors whose distribution is shown, by tag
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    # the name and a copy of the weights of the first layer whose inputs are images
    first: tuple[str, torch.Tensor] | None = None
    inputs: torch.Tensor | None = None  # the first examples
    graph: Graph = ()

    # -- in the training thread -----------------------------------------------------------------

    def observe(self, name: str, module: nn.Module, outputs: Any) -> None:
        """Copies what a module returned, if it is one whose outputs are shown."""
        output = next((t for t in tensors_in(outputs) if t.is_floating_point()), None)
        if output is None:
            return
        kind, scope = _kind(module), name or "model"
        if kind is not None:
            self.values[f"{scope}/{kind}"] = output.detach().clone()

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

    def batch(self, inputs: Any) -> None:
        """Copies the first examples of the batch."""
        seen = next(tensors_in(inputs), None)
        if seen is not None and seen.dim() >= 2:
            self.inputs = seen.detach()[:_EXAMPLES].clone()

    # -- in the writing thread ------------------------------------------------------------------

    def write_values(self, writer: SummaryWriter, step: int) -> None:
        """Writes histograms of the finite values, and their moments as scalars: `TAG/mean`."""
        for tag, value in self.values.items():
            every = value.flatten().to(torch.promote_types(value.dtype, torch.float32))
            finite = every[every.isfinite()]
            if not (count := len(finite)):
                continue
            deviation, mean = (float(each) for each in torch.std_mean(finite, correction=0))
            low, high = (float(each) for each in finite.aminmax())
            limits = torch.linspace(low, high, _BINS + 1, dtype=torch.float64)[1:].tolist()
            counts = torch.histc(finite, _BINS, low, high).tolist() if low < high else [count]
            squares = (deviation**2 + mean**2) * count
            numbers = (low, high, count, mean * count, squares, limits[: len(counts)], counts)
            writer.add_histogram_raw(tag, *numbers, step, self.walltime)
            moments = {"mean": mean, "std": deviation, "min": low, "max": high}
            if count < len(every):
                moments["not_finite"] = float(len(every) - count)
            for moment, number in moments.items():
                writer.add_scalar(f"{tag}/{moment}", number, step, walltime=self.walltime)

    def write_images(self, writer: SummaryWriter, step: int) -> None:
        """Writes inputs and first-layer filters."""
        pictures = {"images/inputs": None if self.inputs is None else as_images(self.inputs)}
        if self.first is not None:
            pictures[f"{self.first[0]}/filters"] = filters(self.first[1])
        for tag, images in pictures.items():
            if images is not None:
                writer.add_images(tag, images, step, walltime=self.walltime)


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, (nn.Linear, nn.Bilinear, _ConvNd)):
        return "pre_activation"
    if type(module).__module__ == activation.__name__ and not any(True for _ in module.children()):
        return "activation"
    if any(True for _ in module.parameters(recurse=False)):
        return "output"
    return None
