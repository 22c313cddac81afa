"""The arrays that every replica program trains on: real ones where there are any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.context import Context
from benchmarks.programs.task import TIME, VOCABULARY

_CIFAR_SIZE = 24
_SYNTHETIC = {"mlp": (20_000, 784), "cifar": (10_000, 3 * _CIFAR_SIZE**2), "wide": (8_192, 1024)}
_TOKENS = 4_096
_CLASSES = {"wide": 1000}


def prepare(context: Context, network: str) -> tuple[Path, str]:
    """Writes `inputs.npy` and `targets.npy` for a network.

    Returns:
        Their directory, and what they are.
    """
    kind = "mlp" if network == "lenet" else network
    directory = context.scratch / f"data-{kind}"
    described = directory / "what"
    if not described.exists():
        directory.mkdir(parents=True)
        inputs, targets, what = _arrays(context, kind)
        np.save(directory / "inputs.npy", inputs)
        np.save(directory / "targets.npy", targets)
        described.write_text(what)
    return directory, described.read_text()


def _arrays(context: Context, kind: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], str]:
    mnist, cifar = context.real("mnist"), context.real("cifar-10-batches-bin")
    if kind == "mlp" and mnist is not None:
        from images import mnist as reader

        train = reader.load(mnist)[0]
        return train.tensors[0].numpy(), train.tensors[1].numpy(), "MNIST, 55,000 images"
    if kind == "cifar" and cifar is not None:
        from images import cifar as images

        pixels, labels = images.load(cifar)[0].tensors
        return _cropped(pixels).numpy(), labels.numpy(), f"{len(labels):,} images of CIFAR-10"
    if kind == "transformer":
        text = np.random.default_rng(0).integers(VOCABULARY, size=(_TOKENS, TIME + 1))
        return text[:, :-1], text[:, 1:], f"{_TOKENS:,} texts of random tokens"
    count, width = _SYNTHETIC[kind]
    inputs, targets = _taught(count, width, _CLASSES.get(kind, 10))
    if kind == "cifar":
        inputs = inputs.reshape(-1, 3, _CIFAR_SIZE, _CIFAR_SIZE)
    return inputs, targets, f"{count:,} random inputs, labelled by a random linear teacher"


def _cropped(pixels: torch.Tensor) -> torch.Tensor:
    """Returns the middle of each image, standardized, as the tutorial's evaluation has it."""
    edge = (pixels.shape[-1] - _CIFAR_SIZE) // 2
    middle = pixels[:, :, edge : edge + _CIFAR_SIZE, edge : edge + _CIFAR_SIZE].float()
    mean = middle.mean((1, 2, 3), keepdim=True)
    deviation = middle.std((1, 2, 3), keepdim=True).clamp_min(1e-3)
    return ((middle - mean) / deviation).contiguous()


def _taught(
    count: int, width: int, classes: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    random = np.random.default_rng(0)
    inputs = random.standard_normal((count, width), dtype=np.float32)
    teacher = random.standard_normal((width, classes), dtype=np.float32)
    return inputs, (inputs @ teacher).argmax(1).astype(np.int64)
