"""Document completion: halves, and the perplexity that a plain computation gives too."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from lda import halves, perplexity
from lda.documents import Documents
from lda.planted import planted_topics

from trireme.errors import ConfigurationError

PLANTED = planted_topics(5, 40, 30, length=25, alpha=0.2)


def plain(topics: np.ndarray, documents: Documents, alpha: float) -> float:
    """The same in NumPy, document by document, with many rounds."""
    given, wanted = halves(documents)
    logs = []
    for number in range(len(documents)):
        seen = topics[:, given.words[given.offsets[number] : given.offsets[number + 1]]]
        share = np.full(len(topics), 1 / len(topics))
        for _ in range(2000):
            parts = share[:, None] * seen
            found = alpha + (parts / parts.sum(axis=0)).sum(axis=1)
            share = found / found.sum()
        asked = wanted.words[wanted.offsets[number] : wanted.offsets[number + 1]]
        logs.extend(np.log(share @ topics[:, asked]))
    return float(np.exp(-np.mean(logs)))


@pytest.mark.thorough
def test_it_is_what_a_plain_computation_gives() -> None:
    topics = (PLANTED.topics + 1e-3) / (1 + 40e-3)
    found = perplexity(topics, PLANTED.documents, alpha=0.2)
    assert found == pytest.approx(plain(topics, PLANTED.documents, 0.2), rel=1e-4)
    assert found < perplexity(topics[::, ::-1].copy(), PLANTED.documents, alpha=0.2)


def test_without_knowledge_it_is_the_number_of_words() -> None:
    assert perplexity(np.full((3, 40), 1 / 40), PLANTED.documents, alpha=0.1) == pytest.approx(40)


def test_halves() -> None:
    documents = Documents.of([[0, 1, 2], [], [3], [4, 5, 6, 7]], tuple("abcdefgh"))
    given, wanted = halves(documents, seed=3)
    assert np.diff(given.offsets).tolist() == [2, 0, 1, 2]
    assert np.diff(wanted.offsets).tolist() == [1, 0, 0, 2]
    assert sorted([*given.words, *wanted.words]) == list(range(8))
    for number, words in enumerate(({0, 1, 2}, set(), {3}, {4, 5, 6, 7})):
        assert set(given.words[given.offsets[number] : given.offsets[number + 1]]) <= words
    orders = {tuple(halves(documents, seed)[0].words) for seed in range(9)}
    assert len(orders) > 1, "another seed divides otherwise"


def test_what_cannot_be_evaluated() -> None:
    documents = Documents.of([[0, 1], [1]], ("a", "b"))
    with pytest.raises(ConfigurationError, match=r"shape \(2, 3\) for documents of 2 words"):
        perplexity(np.ones((2, 3)), documents, alpha=0.1)
    with pytest.raises(ConfigurationError, match="no held-out document has two tokens"):
        perplexity(np.ones((1, 2)) / 2, documents.take([1]), alpha=0.1)
    with pytest.raises(ConfigurationError, match="smooth them"):
        perplexity(np.array([[1.0, 0.0]]), Documents.of([[1, 1]], ("a", "b")), alpha=0.1)
