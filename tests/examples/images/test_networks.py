"""The networks of images: shapes, parameters, initial values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from images.networks import CifarNetwork, LeNet5, LocalResponseNorm
from torch import nn
from torch.nn import functional as F

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "LeNet5": (LeNet5, (1, 28, 28), 61_706),
    "LeNet5, 24": (lambda: LeNet5(3, 24, 7), (3, 24, 24), 44_471),
    "LeNet5, 8": (lambda: LeNet5(1, 8), (1, 8, 8), 21_386),
    "CifarNetwork": (CifarNetwork, (3, 24, 24), 1_068_298),
    "CifarNetwork, 32": (lambda: CifarNetwork(32, 5), (3, 32, 32), 1_755_461),
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
    network = LeNet5(1, 8)
    assert torch.equal(network(flat), network(images))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="7x7 are too small"):
        LeNet5(size=7)
    with pytest.raises(ValueError, match="25x25: the size must be a multiple of 4"):
        CifarNetwork(25)


def test_response_normalization_is_tensorflows_formula() -> None:
    inputs = torch.randn(2, 20, 3, 2, dtype=torch.float64) * 30
    layer = LocalResponseNorm(20, 4, bias=1.5, alpha=0.01, beta=0.6).double()
    outputs = layer(inputs)
    for channel in range(20):
        nearby = inputs[:, max(0, channel - 4) : channel + 5]
        divisor = (1.5 + 0.01 * nearby.square().sum(1)) ** 0.6
        assert torch.allclose(outputs[:, channel], inputs[:, channel] / divisor, rtol=1e-12)
    assert not layer.state_dict(), "the window is a constant, not state"


def test_response_normalization_is_torchs_with_its_alpha() -> None:
    inputs = torch.randn(4, 64, 12, 12, requires_grad=True)
    ours = LocalResponseNorm(64)(inputs)
    theirs = nn.LocalResponseNorm(9, alpha=0.001, beta=0.75, k=1.0)(inputs)
    assert torch.allclose(ours, theirs, atol=1e-6)
    upstream = torch.randn_like(inputs)
    (mine,) = torch.autograd.grad(ours, inputs, upstream)
    (reference,) = torch.autograd.grad(theirs, inputs, upstream)
    assert torch.allclose(mine, reference, atol=1e-5)


def test_the_cifar_network_is_the_tutorials() -> None:
    """Against the tutorial's graph, written out with SAME padding done by hand."""

    def pool(x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.pad(x, (0, 1, 0, 1), value=-torch.inf), 3, 2)

    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.local_response_norm(x, 9, alpha=0.001, beta=0.75, k=1.0)

    torch.manual_seed(0)
    network = CifarNetwork(24)
    images = torch.randn(4, 3, 24, 24)
    p = dict(network.named_parameters())
    x = F.relu(F.conv2d(images, p["conv1.weight"], p["conv1.bias"], padding=2))
    x = norm(pool(x))
    x = F.relu(F.conv2d(x, p["conv2.weight"], p["conv2.bias"], padding=2))
    x = pool(norm(x)).flatten(1)
    for layer in ("hidden3", "hidden4"):
        x = F.relu(F.linear(x, p[f"{layer}.weight"], p[f"{layer}.bias"]))
    x = F.linear(x, p["output.weight"], p["output.bias"])
    assert torch.allclose(network(images), x, atol=1e-5)
    targets = torch.arange(4)
    ours = torch.autograd.grad(F.cross_entropy(network(images), targets), [*p.values()])
    theirs = torch.autograd.grad(F.cross_entropy(x, targets), [*p.values()])
    for name, a, b in zip(p, ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-3, atol=1e-6), name


def test_the_cifar_networks_initial_values() -> None:
    torch.manual_seed(0)
    parameters = dict(CifarNetwork(24).named_parameters())
    # A normal distribution cut at two deviations has 0.8796 of its deviation left.
    for name, deviation, bias in (
        ("conv1", 0.05, 0.0),
        ("conv2", 0.05, 0.1),
        ("hidden3", 0.04, 0.1),
        ("hidden4", 0.04, 0.1),
        ("output", 1 / 192, 0.0),
    ):
        weight = parameters[f"{name}.weight"]
        assert weight.std().item() == pytest.approx(0.8796 * deviation, rel=0.04)
        assert weight.abs().max() <= 2 * deviation
        assert (parameters[f"{name}.bias"] == bias).all()
