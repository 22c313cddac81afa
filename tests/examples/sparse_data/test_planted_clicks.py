"""Planted clicks: their probabilities, and the file that the reader of Criteo's format reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba")
pytest.importorskip("pyarrow")

from sparse_data import ClickBatch, CriteoReader, feature
from sparse_data.planted_clicks import SIZES, PlantedClicks, category_names
from sparse_data.ranking import area_under_curve

from trireme.errors import ConfigurationError

PLANTED = PlantedClicks()


def test_the_file_has_the_rows_that_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "clicks"
    PLANTED.write(path, 50, part=2)
    (batch,) = CriteoReader(path, 100, hash_bits=40)
    block = PLANTED.draw(50, part=2)
    assert batch.labels.tolist() == block.labels.tolist()
    counts = np.where(block.counts < 0, np.nan, block.counts)
    np.testing.assert_array_equal(batch.counts.numpy(), counts.astype(np.float32))
    names = category_names(block.ranks)
    for row in range(50):
        for column, name in enumerate(names[row].tolist()):
            text = "" if name < 0 else f"{name:08x}"
            assert batch.keys[row, column] == feature(f"C{column + 1}", text, 40)


def test_categories_have_names_of_their_own() -> None:
    ranks = np.stack([np.arange(20_000)] * 26, axis=1)
    assert all(len(np.unique(column)) == 20_000 for column in category_names(ranks).T)
    assert category_names(np.full((1, 26), -1)).tolist() == [[-1] * 26]


def test_fields_are_within_their_sizes_and_some_are_missing() -> None:
    block = PLANTED.draw(20_000)
    assert (block.ranks.max(axis=0) < SIZES).all()
    for fields in (block.ranks, block.counts):
        missing = (fields == -1).mean(axis=0)
        assert fields.min() == -1 and (np.abs(missing - 0.1) < 0.02).all()
    assert 0.2 < block.labels.mean() < 0.4


def test_blocks_and_parts_are_others(tmp_path: Path) -> None:
    first = PLANTED.draw(10)
    assert np.array_equal(first.ranks, PLANTED.draw(10).ranks)
    for other in (
        PLANTED.draw(10, number=1),
        PLANTED.draw(10, part=1),
        PlantedClicks(seed=1).draw(10),
    ):
        assert not np.array_equal(first.ranks, other.ranks)


def test_the_best_auc_is_that_of_the_planted_probabilities(tmp_path: Path) -> None:
    best = PLANTED.write(tmp_path / "clicks", 20_000)
    blocks = [PLANTED.draw(16_384), PLANTED.draw(20_000 - 16_384, number=1)]
    labels = np.concatenate([block.labels for block in blocks])
    chances = np.concatenate([block.chances for block in blocks])
    assert best == area_under_curve(labels, chances)
    assert 0.7 < best < 0.9
    for part in np.array_split(np.argsort(chances), 5):
        assert labels[part].mean() == pytest.approx(chances[part].mean(), abs=0.03)
    read = ClickBatch.join(list(CriteoReader(tmp_path / "clicks")))
    assert torch.equal(read.labels.bool(), torch.from_numpy(labels))


def test_interactions_matter() -> None:
    """Without the pairs the same rows have other probabilities."""
    plain = PlantedClicks(pairs=0)
    pairs = [column for pair in PLANTED.pairs for column in pair]
    assert plain.pairs == [] and len(set(pairs)) == 6
    logits = [np.log(p.draw(5000).chances / (1 - p.draw(5000).chances)) for p in (plain, PLANTED)]
    assert np.std(logits[1] - logits[0]) > 0.3


def test_numbers_out_of_range() -> None:
    with pytest.raises(ConfigurationError, match="known=4, paired=5"):
        PlantedClicks(known=4, paired=5)
    with pytest.raises(ConfigurationError, match=r"pairs=14: .* 13 pairs"):
        PlantedClicks(pairs=14)
