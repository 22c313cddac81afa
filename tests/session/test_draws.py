"""What data sets and loops draw follows from seed, epoch and position, whoever fetches it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import trireme
from tests.process_groups import ProcessGroup, run_process_group
from trireme.session.session import Session

SIZE, EPOCHS = 24, 2

Key = tuple[int, int]
"""An epoch and an example."""


def drawn(number: int) -> torch.Tensor:
    """An example: its number, and a number of each generator."""
    return torch.tensor([number, *three()], dtype=torch.float64)


def three() -> list[float]:
    return [float(torch.rand(())), float(np.random.rand()), random.random()]


class Drawing(Dataset[torch.Tensor]):
    """A data set that draws."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return drawn(index)


class Consumed(Drawing):
    """A data set that counts what is fetched, and begins to draw, from one generator, late."""

    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        noise = random.random() if index >= SIZE // 2 else index / SIZE
        return torch.tensor([index, noise, 0, 0], dtype=torch.float64)


class Flow(IterableDataset[torch.Tensor]):
    """A stream that draws; its order, too, is drawn."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(drawn, torch.randperm(SIZE).tolist())


def make(run_dir: Path | None = None, max_steps: int | None = None) -> Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5), nn.Linear(2, 1)).double()
    return Session(
        model,
        nn.functional.mse_loss,
        torch.optim.SGD(model.parameters(), 1e-5),
        run_dir=run_dir,
        max_steps=max_steps,
        deterministic=True,
        seed=7,
    )


def draws(
    session: Session, dataset: Any, batch_size: int, num_workers: int
) -> dict[Key, list[float]]:
    found: dict[Key, list[float]] = {}
    for epoch in session.epochs(EPOCHS):
        for batch in session.loader(dataset, batch_size, num_workers=num_workers):
            session.step((batch.data, batch.data[:, :1]))
            if batch.spans:
                found |= {(epoch, int(row[0])): row[1:] for row in batch.data.tolist()}
    return found


def test_each_example_is_fetched_once() -> None:
    found = []
    for batch_size in (4, 5):
        dataset = Consumed()
        with make() as session:
            found.append(draws(session, dataset, batch_size, 0))
        assert sorted(dataset.fetched) == sorted(EPOCHS * [*range(SIZE)])
    assert found[0] == found[1]
    with make() as session:
        assert draws(session, Consumed(), 3, 2) == found[0]


def draws_in_a_process(dataset: Any, num_workers: int) -> dict[Key, list[float]]:
    with make() as session:
        return draws(session, dataset, 3, num_workers)


@pytest.mark.parametrize("dataset", [Drawing(), Flow()], ids=["map", "stream"])
def test_each_example_has_its_own_draws_whoever_fetches_it(dataset: Any) -> None:
    with make() as session:
        alone = draws(session, dataset, 4, 0)
    assert len(alone) == EPOCHS * SIZE
    for which in range(3):
        assert len({row[which] for row in alone.values()}) == EPOCHS * SIZE
    processes = 2 if isinstance(dataset, Drawing) else 1
    with make() as session:
        assert draws(session, dataset, 5, processes) == alone
    for group in (ProcessGroup(workers=2), ProcessGroup(workers=2, servers=1, strategy="async")):
        together: dict[Key, list[float]] = {}
        for each in run_process_group(group, draws_in_a_process, dataset, 0).values:
            together |= each
        assert together == alone


def loop(session: Session) -> list[list[float]]:
    """A loop that draws itself, too: at the beginning of an epoch, and before and in each step."""
    found: list[list[float]] = []
    for _ in session.epochs(EPOCHS):
        scale = three()
        for batch in session.loader(Drawing(), 4):
            noise = three()
            inputs = batch.data + sum(noise) + scale[0]
            session.step((inputs, batch.data[:, :1]))
            found.append([session.global_step, *scale, *noise, float(inputs.sum())])
        three()
    return found


def test_a_resumed_deterministic_run_draws_as_an_uninterrupted_one(tmp_path: Path) -> None:
    with make(tmp_path / "whole") as session:
        whole = loop(session)
        values = [parameter.detach().clone() for parameter in session.model.parameters()]
    parts: list[list[float]] = []
    for last in (4, 8, None):
        with make(tmp_path / "parts", last) as session:
            parts += loop(session)
            resumed = [parameter.detach().clone() for parameter in session.model.parameters()]
    assert parts == whole
    assert all(map(torch.equal, resumed, values))


def test_the_seed_seeds_all_three() -> None:
    found = []
    for seed in (1, 1, 2):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with Session(model, nn.functional.mse_loss, optimizer, seed=seed):
            found.append(three())
    assert found[0] == found[1] and not set(found[0]) & set(found[2])


class Opened(Drawing):
    """A data set that a loader process opens for itself."""

    opened = False

    def __getitem__(self, index: int) -> torch.Tensor:
        assert self.opened
        return super().__getitem__(index)


def open_own(number: int) -> None:
    info = get_worker_info()
    assert info is not None and type(info.dataset) is Opened
    info.dataset.opened = True


def test_a_loader_process_finds_the_program_s_data_set() -> None:
    with make() as session:
        batches = session.loader(Opened(), 8, num_workers=1, worker_init_fn=open_own, epochs=1)
        assert sum(len(batch) for batch in batches) == SIZE


def test_the_program_s_own_numbers_are_left_alone() -> None:
    model = nn.Linear(1, 1)
    with Session(
        model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1)
    ) as session:
        expected = three()
    with trireme.Session(
        nn.Linear(1, 1), nn.functional.mse_loss, lambda p: torch.optim.SGD(p, 0.1)
    ) as session:
        assert len(next(iter(session.loader(Drawing(), 8)))) == 8
        assert three() == expected
