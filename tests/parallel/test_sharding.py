"""Parameters that FSDP cannot shard: numbers without dimensions, and those of sparse gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import trireme
from tests.process_groups import ProcessGroup, run_process_group
from trireme.errors import ConfigurationError
from trireme.parallel.sharding import fully_sharded, refused_average

INPUTS = torch.linspace(-1, 1, 32).reshape(8, 4)
TARGETS = torch.linspace(2, -1, 16).reshape(8, 2)


class Scaled(nn.Module):
    """Has a number of its own, as CLIP's temperature, and one in a child that has nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.shift = Shift()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.shift(self.layer(values) * self.factor)
        return scaled


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(0.5))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.by


def values(model: nn.Module) -> list[float]:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    found: list[float] = torch.cat([p.detach().reshape(-1) for p in whole]).tolist()
    return found


def plain(clip: float) -> list[float]:
    model = Scaled()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        nn.MSELoss()(model(INPUTS), TARGETS).backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return values(model)


def session(replicas: int, clip: float, accumulate: int) -> list[float]:
    model = Scaled()
    joined = trireme.Session(
        model,
        nn.MSELoss(),
        lambda params: torch.optim.Adam(params, lr=0.1),
        clip_norm=clip,
        accumulate=accumulate,
    )
    with joined:
        replica = joined.worker.setup.replica
        for _ in range(4):
            joined.step((INPUTS[replica::replicas], TARGETS[replica::replicas]))
    return values(joined.model)


def loop(replicas: int, clip: float, accumulate: int) -> list[float]:
    model = Scaled()
    optimizer = trireme.distribute(
        model, torch.optim.Adam(model.parameters(), lr=0.1), clip_norm=clip
    )
    replica = optimizer.replica
    for _ in range(4):
        optimizer.zero_grad()
        nn.MSELoss()(model(INPUTS[replica::replicas]), TARGETS[replica::replicas]).backward()
        optimizer.step()
    found = values(model)
    optimizer.close()
    return found


@pytest.mark.parametrize(
    ("group", "program", "replicas", "accumulate"),
    [
        (ProcessGroup(workers=2, strategy="fsdp"), loop, 2, 1),
        (ProcessGroup(mesh="dp=2,fsdp=2", inside=4), session, 4, 1),
        (ProcessGroup(servers=1, strategy="sync", mesh="fsdp=2", inside=2), session, 2, 2),
    ],
    ids=["fsdp", "dp and fsdp", "in a worker"],
)
def test_numbers_without_dimensions_are_kept_whole(
    group: ProcessGroup, program: Any, replicas: int, accumulate: int
) -> None:
    want = plain(0.5)
    for found in run_process_group(group, program, replicas, 0.5, accumulate).values:
        assert found == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_name(kind: Any) -> None:
    no_mesh: Any = None
    model = nn.Sequential(kind(4, 2, sparse=True), nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match=r"fsdp: 0 has sparse gradients.*sparse=False"):
        fully_sharded(model, no_mesh)


class Sharded(nn.Module):
    """What torch's shards say when they are copied."""

    def __deepcopy__(self, memo: object) -> Sharded:
        raise AssertionError("FSDP does not support deepcopy.\n Please use")


def test_an_average_of_a_whole_model_names_that_of_a_session() -> None:
    with pytest.raises(AssertionError) as raised:
        AveragedModel(Sharded())
    said = str(refused_average(raised.value))
    assert "leave AveragedModel out. Session(ema=0.99) averages the parts" in said
    assert said.endswith("(FSDP does not support deepcopy. Please use)")
    with pytest.raises(AssertionError) as raised:
        copy.deepcopy(Sharded())
    assert refused_average(raised.value) is None
