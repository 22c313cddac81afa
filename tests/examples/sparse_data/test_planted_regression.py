"""Rows of a planted regression: what is drawn, streamed and written, and that it can be learnt."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
pytest.importorskip("pyarrow")

from sparse_data import LibsvmReader, SparseBatch
from sparse_data.planted_regression import PlantedRegression
from sparse_data.ranking import area_under_curve

from tests.examples.sparse_data.ftrl import Regression
from trireme.data.loading import Loading
from trireme.data.streams import is_stream
from trireme.errors import ConfigurationError
from trireme.streams.stream import Stream, shards_of

SMALL = PlantedRegression(bits=12, entries=6, active=100, seed=3)


def same(one: SparseBatch, other: SparseBatch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_rows_are_the_same_each_time() -> None:
    rows = SMALL.rows(250, 100)
    first, again = list(rows), list(rows)
    assert [len(batch.labels) for batch in first] == [100, 100, 50]
    assert all(map(same, first, again))
    assert not same(first[0], first[1])
    assert not same(first[0], next(iter(SMALL.rows(250, 100, part=1))))
    other = PlantedRegression(bits=12, entries=6, active=100, seed=4)
    assert not same(first[0], next(iter(other.rows(250, 100))))


def test_keys_of_a_row_are_sorted_and_come_once() -> None:
    (batch,) = SMALL.rows(500, 500)
    bounds = batch.bounds.tolist()
    for start, stop in pairwise(bounds):
        keys = batch.keys[start:stop].tolist()
        assert keys == sorted(set(keys)) and 1 <= len(keys) <= 6
    assert batch.keys.min() >= 0 and batch.keys.max() < 1 << 12


def test_labels_have_the_planted_probabilities() -> None:
    (batch,) = SMALL.rows(40_000, 40_000)
    chances = 1 / (1 + np.exp(-SMALL.logits(batch)))
    order = np.argsort(chances)
    for part in np.array_split(order, 5):
        assert batch.labels.numpy()[part].mean() == pytest.approx(chances[part].mean(), abs=0.02)


def test_weights_belong_to_the_most_frequent_features() -> None:
    (batch,) = SMALL.rows(40_000, 40_000)
    keys, counts = np.unique(batch.keys.numpy(), return_counts=True)
    top = torch.from_numpy(keys[np.argsort(-counts)][:20].copy())
    alone = SparseBatch(torch.arange(20), top, torch.ones(20), torch.zeros(20))
    assert set(SMALL.logits(alone)) <= set(SMALL.weights)


def test_it_is_a_stream_with_shards_and_states() -> None:
    rows = SMALL.rows(200, 10)
    assert is_stream(rows) and shards_of(rows) == 16
    parts = [batch for index in range(3) for batch in rows.shard(3, index)]
    whole = list(rows)
    assert len(parts) == 20
    assert all(any(same(batch, each) for each in parts) for batch in whole)
    batches = iter(rows)
    for _ in range(4):
        next(batches)
    again = iter(rows)
    again.load_state_dict(batches.state_dict())
    assert same(next(again), whole[4])
    stream = Stream(rows.shard(1, 0), 1, loading=Loading())
    assert same(stream.take(3, 4)[0][0], whole[3])


def test_a_file_has_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    rows = SMALL.rows(300, 100)
    SMALL.write(path, rows)
    assert same(SparseBatch.join(list(LibsvmReader(path, 300))), SparseBatch.join(list(rows)))


def test_the_weights_can_be_learnt() -> None:
    planted = PlantedRegression(bits=26, entries=10, active=64, scale=0.8)
    held_out = planted.rows(20_000, 10_000, part=1)
    best = planted.best_auc(held_out)
    assert 0.65 < best < 0.95
    model = Regression(1 << 26, alpha=0.1, l1=2.0)
    for batch in planted.rows(100_000, 10_000):
        model.learn(batch)
    batches = list(held_out)
    labels = np.concatenate([batch.labels.numpy() for batch in batches])
    scores = np.concatenate([model.logits(batch) for batch in batches])
    assert area_under_curve(labels, scores) > best - 0.004


def test_numbers_out_of_range() -> None:
    for options in ({"bits": 0}, {"entries": 0}, {"bits": 4, "active": 16}):
        with pytest.raises(ConfigurationError, match="there are 1 to 40 bits"):
            PlantedRegression(**options)
    with pytest.raises(ConfigurationError, match="count=0"):
        SMALL.rows(0)
