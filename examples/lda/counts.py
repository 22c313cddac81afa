"""How often each word has each topic: the state that all samplers of a model share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]
"""Numbers of words, each once."""

Counts = npt.NDArray[np.int32]
"""Counts of tokens."""


class TopicCounts(ABC):
    """The counts of words by topic, and of all tokens by topic.

    Several samplers may share them. What they read may be older than what others have added since,
    as under stale synchronous parallel; it contains all that they have added themselves. So no
    count is ever less than the sampler's own share of it.
    """

    @abstractmethod
    def rows(self, words: Words) -> Counts:
        """Returns the counts of some words.

        Returns:
            int32 of shape (words, topics), which belongs to the caller.
        """

    @abstractmethod
    def totals(self) -> npt.NDArray[np.int64]:
        """Returns the number of tokens of each topic, int64 of shape (topics,), as `rows` does."""

    @abstractmethod
    def add(self, words: Words, deltas: Counts) -> None:
        """Adds to the counts of some words, and to the totals what the columns sum to.

        Args:
            words: which words.
            deltas: int32 of shape (words, topics).
        """


@final
class LocalCounts(TopicCounts):
    """Counts in the memory of this process: 4 bytes a word and topic.

    Args:
        words: the size of the vocabulary.
        topics: the number of topics.
    """

    def __init__(self, words: int, topics: int) -> None:
        self._rows = np.zeros((words, topics), np.int32)
        self._totals = np.zeros(topics, np.int64)

    def rows(self, words: Words) -> Counts:
        return self._rows[words]

    def totals(self) -> npt.NDArray[np.int64]:
        return self._totals.copy()

    def add(self, words: Words, deltas: Counts) -> None:
        self._rows[words] += deltas
        self._totals += deltas.sum(axis=0, dtype=np.int64)


def topic_words(rows: npt.NDArray[np.integer], beta: float) -> npt.NDArray[np.float64]:
    """Returns the distribution over words of each topic: its mean, given the assignments.

    Args:
        rows: the counts of all words, of shape (words, topics).
        beta: the concentration of the prior of these distributions, for each word.

    Returns:
        float64 of shape (topics, words); each row sums to 1.
    """
    smoothed = rows.T.astype(np.float64) + beta
    sums: npt.NDArray[np.float64] = smoothed.sum(axis=1, keepdims=True)
    return smoothed / sums
