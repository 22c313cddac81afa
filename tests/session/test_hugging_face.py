"""Streaming data sets of Hugging Face, where `datasets` is installed: dealt, and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trireme
from tests.harness import Cluster, run_job
from trireme.session.session import Session

datasets = pytest.importorskip("datasets")


def collated(items: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.tensor([[float(item["number"]), 1.0] for item in items])
    return numbers, numbers[:, :1] * 0


def _generate(shards: list[int]) -> Any:
    for shard in shards:
        for index in range(2500):
            yield {"number": shard * 2500 + index}


def source(shards: int) -> Any:
    return datasets.IterableDataset.from_generator(
        _generate, gen_kwargs={"shards": list(range(shards))}
    )


def make(index: int = 0, run_dir: Path | None = None, **options: Any) -> Session:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.0)
    return trireme.Session(model, nn.functional.mse_loss, sgd, run_dir=run_dir, **options)


def order(session: Session, dataset: Any) -> list[int]:
    found: list[int] = []
    for _ in session.epochs(2):
        for batch in session.loader(dataset, 50, collate_fn=collated):
            session.step(batch)
            found += map(int, batch[0][:, 0].tolist())
    return found


@pytest.mark.parametrize("shards", [1, 3])
def test_streams_of_workers_hold_each_example_once_an_epoch(shards: int) -> None:
    found = run_job(Cluster(workers=2), make, lambda s: order(s, source(shards))).values
    assert sorted(found[0] + found[1]) == sorted([*range(2500 * shards)] * 2)


@pytest.mark.parametrize("kind", ["1 shard", "3 shards", "shuffled in a buffer"])
def test_a_stream_goes_on_at_the_exact_example(kind: str, tmp_path: Path) -> None:
    dataset = source(3 if kind[0] == "3" else 1)
    if kind[0] == "s":
        dataset = dataset.shuffle(seed=3, buffer_size=100)
    with make() as session:
        whole = order(session, dataset)
    assert sorted(whole) == sorted([*range(len(whole) // 2)] * 2)
    parts: list[int] = []
    for steps in (31, 47, None):
        with make(run_dir=tmp_path, max_steps=steps) as session:
            parts += order(session, dataset)
    assert parts == whole
