"""`examples/cifar10.py` as one plain PyTorch process: what Trireme's result is compared with.

    python benchmarks/plain_cifar10.py --data-dir DIR [--max-steps N] [--threads N]

The same network, images, augmentation, optimizer, moving average and number of examples. No
session, no server, no launcher: the loop is the one that anybody would write.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from images import augment, cifar
from images.networks import CifarNetwork
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from cifar10 import SIZE, optimizer_of

DECAY = 0.9999


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", "--data_dir", default="data/cifar-10-batches-bin")
    parser.add_argument("--max-steps", "--max_steps", type=int, default=5000, metavar="N")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=128, metavar="N")
    parser.add_argument("--learning-rate", "--learning_rate", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=2, help="of BLAS (default 2)")
    return parser.parse_args()


def main() -> None:
    given = options()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    train, test = cifar.load(given.data_dir)
    model = CifarNetwork(SIZE)
    seconds = fit(model, train, given)
    print(f"test accuracy: {accuracy(model, test):.4f}")
    examples = given.max_steps * given.batch_size
    print(f"{given.max_steps} steps in {seconds:.1f} s, {examples / seconds:,.0f} examples/s")


def fit(model: nn.Module, train: TensorDataset, given: argparse.Namespace) -> float:
    """Trains; leaves the moving average in the model. Returns the seconds that training took."""
    images, labels = train.tensors
    generator = torch.Generator().manual_seed(0)
    augmented = augment.training(SIZE)
    optimizer = optimizer_of(model, given.learning_rate)
    averages = [parameter.detach().clone() for parameter in model.parameters()]
    order = torch.randperm(len(images), generator=generator)
    position = 0
    began = time.perf_counter()
    for step in range(1, given.max_steps + 1):
        if position + given.batch_size > len(order):
            order, position = torch.randperm(len(images), generator=generator), 0
        chosen = order[position : position + given.batch_size]
        position += given.batch_size
        outputs = model(augmented(images[chosen], generator))
        loss = nn.functional.cross_entropy(outputs, labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        weight = 1 - min(DECAY, (1 + step) / (10 + step))
        torch._foreach_lerp_(averages, list(model.parameters()), weight)
        if step % 100 == 0:
            print(f"step {step}, loss = {loss.item():.2f}", flush=True)
    seconds = time.perf_counter() - began
    with torch.no_grad():
        torch._foreach_copy_(list(model.parameters()), averages)
    return seconds


@torch.no_grad()
def accuracy(model: nn.Module, test: TensorDataset) -> float:
    images, labels = test.tensors
    cropped = augment.evaluation(SIZE)
    right = 0
    for some, targets in zip(images.split(500), labels.split(500), strict=True):
        right += int((model(cropped(some)).argmax(1) == targets).sum())
    return right / len(images)


if __name__ == "__main__":
    main()
