"""The networks and data of the PyTorch replica programs: the same for every contender."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from images.networks import CifarNetwork, LeNet5
from language.networks import Transformer
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.programs.task import LAYERS, NETWORKS, TIME, VOCABULARY, WIDTH
from trireme.models import MLP


def make_network(name: str) -> nn.Module:
    if name == "mlp":
        return MLP(784, 100, 10)
    if name == "lenet":
        return LeNet5()
    if name == "cifar":
        return CifarNetwork()
    if name == "transformer":
        return Transformer(VOCABULARY, WIDTH, heads=4, layers=LAYERS, context=TIME)
    return MLP(1024, 4096, 4096, 1000)


def make_optimizer(name: str, parameters: Any, *, fused: bool = False) -> torch.optim.Optimizer:
    """Builds the optimizer of a network, as a user would, or PyTorch's fused one."""
    training = NETWORKS[name]
    make = getattr(torch.optim, training.optimizer)
    optimizer: torch.optim.Optimizer = make(
        parameters, lr=training.learning_rate, fused=True if fused else None
    )
    return optimizer


def make_dataset(directory: str, device: str = "cpu") -> TensorDataset:
    """Maps the arrays that the measuring side wrote: all processes share their memory."""
    paths = [Path(directory) / f"{name}.npy" for name in ("inputs", "targets")]
    arrays = [np.load(path, mmap_mode="c") for path in paths]
    return TensorDataset(*(torch.from_numpy(array).to(device) for array in arrays))


def batches(
    dataset: TensorDataset, size: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields shuffled batches, epoch after epoch, gathered in one operation each."""
    inputs, targets = dataset.tensors
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
        for start in range(0, len(inputs) - size + 1, size):
            chosen = order[start : start + size]
            yield inputs.index_select(0, chosen), targets.index_select(0, chosen)
