"""A generator and a discriminator with an optimizer each: in plain torch, and spread."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import trireme
from tests.parity.plain import Values, values_of
from trireme.errors import ConfigurationError
from trireme.session.session import Session

ROUNDS, BATCH = 10, 16
Batch = tuple[torch.Tensor, torch.Tensor]


class GAN(nn.Module):
    """Both, as one module that computes what either's loss wants to know."""

    def __init__(self) -> None:
        super().__init__()
        networks = networks_of()
        self.generator, self.discriminator = networks["generator"], networks["discriminator"]

    def forward(self, noise: torch.Tensor, real: torch.Tensor) -> Batch:
        fake: torch.Tensor = self.discriminator(self.generator(noise))
        return fake, self.discriminator(real)


def networks_of() -> dict[str, nn.Module]:
    """Both with their first values."""
    torch.manual_seed(5)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return {"generator": generator, "discriminator": discriminator}


def optimizers_of(networks: dict[str, nn.Module]) -> dict[str, torch.optim.Optimizer]:
    return {
        "generator": torch.optim.SGD(networks["generator"].parameters(), lr=0.05, momentum=0.9),
        "discriminator": torch.optim.Adam(
            networks["discriminator"].parameters(), lr=0.01, weight_decay=0.01
        ),
    }


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(6)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(ROUNDS, BATCH, width, generator=generator, dtype=torch.float64)

    return list(zip(draw(4), draw(6) + 1.0, strict=True))


def generator_loss(outputs: Batch, _: Any = None) -> torch.Tensor:
    fake, _real = outputs
    return cross_entropy(fake, torch.ones_like(fake))


def discriminator_loss(outputs: Batch, _: Any = None) -> torch.Tensor:
    fake, real = outputs
    return cross_entropy(real, torch.ones_like(real)) + cross_entropy(fake, torch.zeros_like(fake))


def train_plain(rounds: int = ROUNDS) -> Values:
    """The most ordinary loop, whose backward passes leave gradients for the other one too."""
    networks = networks_of()
    optimizers = optimizers_of(networks)
    for noise, real in batches()[:rounds]:
        _round(networks, optimizers, noise, real)
    return values_of(nn.ModuleDict(networks))


def _round(networks: Any, optimizers: Any, noise: torch.Tensor, real: torch.Tensor) -> None:
    generator, discriminator = networks["generator"], networks["discriminator"]
    optimizers["discriminator"].zero_grad()
    discriminator_loss((discriminator(generator(noise)), discriminator(real))).backward()
    optimizers["discriminator"].step()
    left = [p.grad.clone() for p in generator.parameters() if p.grad is not None]
    optimizers["generator"].zero_grad()
    generator_loss((discriminator(generator(noise)), real)).backward()
    optimizers["generator"].step()
    assert len(left) == 4 and all(p.grad is not None for p in discriminator.parameters())


def _tutorial_round(
    networks: Any, optimizers: Any, noise: torch.Tensor, real: torch.Tensor
) -> None:
    """As PyTorch's tutorial on DCGAN has it: both steps are from one fake batch."""
    generator, discriminator = networks["generator"], networks["discriminator"]
    optimizers["discriminator"].zero_grad()
    outputs = discriminator(real)
    cross_entropy(outputs, torch.ones_like(outputs)).backward()
    fake = generator(noise)
    outputs = discriminator(fake.detach())
    cross_entropy(outputs, torch.zeros_like(outputs)).backward()
    optimizers["discriminator"].step()
    optimizers["generator"].zero_grad()
    outputs = discriminator(fake)
    cross_entropy(outputs, torch.ones_like(outputs)).backward()
    optimizers["generator"].step()


def train_tutorial_plain() -> Values:
    """The tutorial's loop in plain torch."""
    networks = networks_of()
    optimizers = optimizers_of(networks)
    for noise, real in batches():
        _tutorial_round(networks, optimizers, noise, real)
    return values_of(nn.ModuleDict(networks))


def train_tutorial(rounds: int = ROUNDS) -> dict[str, Any]:
    """The same by `distribute`."""
    networks = networks_of()
    optimizers = trireme.distribute(networks, optimizers_of(networks))
    first = optimizers["generator"]
    for noise, real in batches()[:rounds]:
        own = slice(first.replica, None, first.replicas)
        _tutorial_round(networks, optimizers, noise[own], real[own])
    first.close()
    return {name: value.numpy() for name, value in values_of(nn.ModuleDict(networks)).items()}


def train_loop(rounds: int = ROUNDS) -> dict[str, Any]:
    """The same loop by `distribute`, from where it was saved, to the end of so many rounds."""
    networks = networks_of()
    optimizers = trireme.distribute(networks, optimizers_of(networks))
    first = optimizers["generator"]
    for noise, real in batches()[first.global_step // 2 : rounds]:
        own = slice(first.replica, None, first.replicas)
        _round(networks, optimizers, noise[own], real[own])
    values = values_of(nn.ModuleDict({n: _whole(m) for n, m in networks.items()}))
    assert first.global_step == 2 * rounds
    first.close()
    return {name: value.numpy() for name, value in values.items()}


def _whole(module: nn.Module) -> nn.Module:
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            full = getattr(parameter, "full_tensor", None)
            if full is not None:
                setattr(part, name, nn.Parameter(full().detach()))
    return module


def _session(rounds: int) -> Session:
    return Session(
        GAN,
        discriminator_loss,
        {
            "generator": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
            "discriminator": lambda params: torch.optim.Adam(params, lr=0.01, weight_decay=0.01),
        },
        seed=5,
        max_steps=2 * rounds,
    )


def train_session(rounds: int = ROUNDS) -> dict[str, Any]:
    """The same by a session, whose steps name their optimizer and their loss."""
    session = _session(rounds)
    with session:
        for noise, real in batches()[session.global_step // 2 : rounds]:
            own = slice(session._setup.replica, None, session.batches_per_step)
            batch = ((noise[own], real[own]), real[own])
            session.step(batch, optimizer="discriminator")
            session.step(batch, optimizer="generator", loss=generator_loss)
        values = session.worker.backend.snapshot(state=False).values
    return {name: values[name].detach().numpy() for name in values}


def step_another() -> str:
    """Each process steps another optimizer; returns what it is told."""
    networks = networks_of()
    optimizers = trireme.distribute(networks, optimizers_of(networks))
    place = optimizers["generator"].replica
    try:
        _step_first(networks, list(optimizers.values())[place])
    except ConfigurationError as error:
        return str(error)
    return ""


def step_another_later() -> None:
    """Each process steps another optimizer in its second step."""
    networks = networks_of()
    optimizers = list(trireme.distribute(networks, optimizers_of(networks)).values())
    _step_first(networks, optimizers[0])
    _step_first(networks, optimizers[optimizers[0].replica])


def step_another_in_session() -> str:
    """The same in a session."""
    try:
        with _session(1) as session:
            noise, real = batches()[0]
            name = ("generator", "discriminator")[session.task.group.rank]
            session.step(((noise, real), real), optimizer=name)
    except ConfigurationError as error:
        return str(error)
    return ""


def _step_first(networks: dict[str, nn.Module], optimizer: torch.optim.Optimizer) -> None:
    noise, real = batches()[0]
    outputs = networks["discriminator"](networks["generator"](noise)), real
    generator_loss(outputs).backward()
    optimizer.step()
