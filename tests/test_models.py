"""The shared networks: shapes, parameters, initial values, and that they learn."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from trireme.data import digits
from trireme.data.loader import Loader
from trireme.data.order import Order
from trireme.models import MLP

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MLP": (lambda: MLP(64, 100, 10), (64,), 64 * 100 + 100 + 1010),
    "MLP, one layer": (lambda: MLP(6, 3), (6,), 21),
    "MLP, three": (lambda: MLP(12, 5, 4, 3), (3, 2, 2), 65 + 24 + 15),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_shapes_and_parameters(name: str) -> None:
    build, shape, parameters = NETWORKS[name]
    network = build()
    assert sum(p.numel() for p in network.parameters()) == parameters
    batch = torch.randn(3, *shape)
    logits = network(batch)
    classes = list(network.parameters())[-1].numel()
    assert logits.shape == (3, classes)
    # An example's logits do not depend on the others in its batch.
    assert torch.allclose(network(batch[1:2])[0], logits[1], atol=1e-5)
    F.cross_entropy(logits, torch.tensor([0, 1, 2])).backward()
    for parameter_name, parameter in network.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", NETWORKS)
def test_the_seed_gives_the_same_network(name: str) -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(NETWORKS[name][0]().state_dict())
    first, second = states
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_flat_images_serve_too() -> None:
    flat = torch.rand(4, 64)
    images = flat.view(4, 1, 8, 8)
    network = MLP(64, 20, 10)
    assert torch.equal(network(flat), network(images))


def test_mlp_is_linear_relu_linear() -> None:
    network = MLP(4, 3, 2)
    names = [name for name, _ in network.named_parameters()]
    assert names == ["hidden1.weight", "hidden1.bias", "output.weight", "output.bias"]
    w1, b1, w2, b2 = network.parameters()
    batch = torch.randn(5, 4)
    wanted = torch.relu(batch @ w1.T + b1) @ w2.T + b2
    assert torch.allclose(network(batch), wanted, atol=1e-6)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least the widths of input and output"):
        MLP(4)


def spans(count: int, batch: int) -> Callable[[int], list[tuple[int, int]]]:
    dealt = ((start, start + batch) for start in range(0, count * batch, batch))
    return lambda ahead: list(islice(dealt, ahead))


def accuracy(network: nn.Module, dataset: TensorDataset) -> float:
    inputs, targets = dataset.tensors
    with torch.no_grad():
        return (network(inputs).argmax(1) == targets).float().mean().item()


@pytest.mark.thorough
def test_digits_are_learned() -> None:
    pytest.importorskip("sklearn.datasets")
    torch.manual_seed(0)
    train, test = digits.load()
    network = MLP(64, 100, 10)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for inputs, targets in Loader(train, Order(len(train)), spans(1000, 100), batch_size=100):
        optimizer.zero_grad()
        F.cross_entropy(network(inputs), targets).backward()
        optimizer.step()
    assert accuracy(network, test) >= 0.96
