"""Clicks on advertisements in Criteo's format, whose probabilities are planted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt

from sparse_data.ranking import area_under_curve
from trireme.data.seeds import derive
from trireme.errors import ConfigurationError

from .writing import criteo_rows

COUNTS = 13
SIZES = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27),
    *(14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""The number of categories of each column, C1 to C26: that of Criteo's Kaggle challenge."""

_BLOCK = 1 << 14
_MISSING = 0.1  # of a column's fields
_DIMENSIONS = 2  # of the vectors
_LONGEST_ROW = 2 + COUNTS * 20 + len(SIZES) * 9
_MIX = 0x9E3779B1  # odd: numbers of 32 bits and their products correspond one to one

Floats = npt.NDArray[np.float64]
Wholes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PlantedBlock:
    """Some rows.

    Attributes:
        labels: bool of shape (rows,): whether there was a click.
        chances: float64 of shape (rows,): the planted probabilities of a click.
        counts: int64 of shape (rows, 13): the integers; -1 for one that is missing.
        ranks: int64 of shape (rows, 26): the category of each column by rank; -1 for one that is
            missing.
    """

    labels: npt.NDArray[np.bool_]
    chances: Floats
    counts: Wholes
    ranks: Wholes


@final
class PlantedClicks:
    """A model of clicks, from which rows are drawn.

    The logit of a click is a constant; plus a slope for each integer times log(1 + x); plus a
    weight for each category; plus, for some pairs of columns, the inner product of a vector of
    each one's category, which no linear model can learn. Categories' ranks are log-uniform, and
    only those of the lowest ranks have weights and vectors: the others are too rare to be learnt.
    What a model learns of those is noise. With the defaults a factorisation machine of 8 dimensions
    that takes only categories of 2,000 rows and more is within 0.005 of the best AUC after five
    million rows (Adagrad, 0.05); a linear model stays 0.03 behind.

    Args:
        known: how many categories of a column have weights.
        paired: how many of them also have vectors.
        pairs: the number of pairs of columns.
        seed: the same one gives the same model and rows on one machine, with one NumPy.

    Raises:
        ConfigurationError: a number is out of range.
    """

    def __init__(self, *, known: int = 32, paired: int = 8, pairs: int = 3, seed: int = 0) -> None:
        if not 1 <= paired <= known or not 0 <= pairs <= len(SIZES) // 2:
            raise ConfigurationError(
                f"known={known}, paired={paired}, pairs={pairs}: of the known categories some are "
                f"paired, in at most {len(SIZES) // 2} pairs of columns"
            )
        self._seed = seed
        generator = np.random.Generator(np.random.Philox(key=derive(seed, 0)))
        self._slopes = generator.normal(0.0, 0.15, COUNTS)
        self._weights = generator.normal(0.0, 0.4, (len(SIZES), known))
        self._vectors = generator.normal(0.0, 1.0, (len(SIZES), paired, _DIMENSIONS))
        order = generator.permutation(len(SIZES))
        self.pairs = [(int(order[2 * n]), int(order[2 * n + 1])) for n in range(pairs)]
        self._constant = 0.0
        self._constant = -1.1 - float(np.mean(self._logits(*self._features(generator, 4096))))

    def draw(self, rows: int, *, part: int = 0, number: int = 0) -> PlantedBlock:
        """Draws a block of rows, the same each time.

        Args:
            rows: the number of rows.
            part: rows of other parts are others: one to train on, one to be held out.
            number: which block of the part.
        """
        key = derive(self._seed, 1 + part, number)
        generator = np.random.Generator(np.random.Philox(key=key))
        counts, ranks = self._features(generator, rows)
        chances: Floats = 1.0 / (1.0 + np.exp(-self._logits(counts, ranks)))
        return PlantedBlock(generator.random(rows) < chances, chances, counts, ranks)

    def write(self, path: str | Path, rows: int, *, part: int = 0) -> float:
        """Writes rows to a file in Criteo's format, about 220 bytes each.

        Args:
            path: the file.
            rows: the number of rows.
            part: as for `draw`.

        Returns:
            The AUC of the planted probabilities on these rows: none is better but by chance.
        """
        labels, chances = [], []
        with Path(path).open("wb") as file:
            for number, start in enumerate(range(0, rows, _BLOCK)):
                block = self.draw(min(_BLOCK, rows - start), part=part, number=number)
                text = np.empty(len(block.labels) * _LONGEST_ROW, np.uint8)
                names = category_names(block.ranks)
                length = criteo_rows(block.labels, block.counts, names, text)
                file.write(text[:length].data)
                labels.append(block.labels)
                chances.append(block.chances)
        return area_under_curve(np.concatenate(labels), np.concatenate(chances))

    def _features(self, generator: np.random.Generator, rows: int) -> tuple[Wholes, Wholes]:
        """Draws the integers and the categories' ranks of some rows."""
        means = np.linspace(0.0, 5.0, COUNTS)
        counts = np.exp(generator.normal(means, 1.0, (rows, COUNTS))).astype(np.int64)
        counts[generator.random(counts.shape) < _MISSING] = -1
        uniform = generator.random((rows, len(SIZES)))
        sizes = np.array(SIZES, np.float64)
        ranks = np.minimum((sizes + 1) ** uniform, sizes).astype(np.int64) - 1
        ranks[generator.random(ranks.shape) < _MISSING] = -1
        return counts, ranks

    def _logits(self, counts: Wholes, ranks: Wholes) -> Floats:
        logits = self._constant + np.log1p(np.maximum(counts, 0)) @ self._slopes
        for column, weights in enumerate(self._weights):
            logits += _looked_up(weights[:, None], ranks[:, column])[:, 0]
        for one, other in self.pairs:
            first = _looked_up(self._vectors[one], ranks[:, one])
            logits += (first * _looked_up(self._vectors[other], ranks[:, other])).sum(axis=1)
        found: Floats = logits
        return found


def category_names(ranks: Wholes) -> Wholes:
    """Returns the numbers of 32 bits by which categories are named; -1 where one is missing."""
    columns = np.arange(ranks.shape[1]) << 26
    names: Wholes = ((ranks ^ columns) * _MIX) & 0xFFFFFFFF
    names[ranks < 0] = -1
    return names


def _looked_up(rows: Floats, ranks: Wholes) -> Floats:
    """Returns a row for each rank; zeros where there is none."""
    known = (ranks >= 0) & (ranks < len(rows))
    found: Floats = rows[np.where(known, ranks, 0)] * known[:, None]
    return found
