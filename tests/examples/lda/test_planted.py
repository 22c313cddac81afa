"""Documents of planted topics, and how many of them count as found."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("numba")

from lda.planted import planted_topics, recovered


def test_documents_have_the_words_of_their_topics() -> None:
    planted = planted_topics(1, 50, 200, length=50, beta=0.5)
    shares = np.bincount(planted.documents.words, minlength=50) / len(planted.documents.words)
    np.testing.assert_allclose(shares, planted.topics[0], atol=0.015)
    assert len(planted.documents) == 200
    assert 45 < len(planted.documents.words) / 200 < 55


def test_a_document_has_few_topics() -> None:
    planted = planted_topics(10, 1000, 50, length=100, alpha=0.02, beta=0.01)
    best = planted.topics.argmax(axis=0)[planted.documents.words]
    bounds = planted.documents.offsets
    largest = [
        np.bincount(best[start:stop]).max() / (stop - start) for start, stop in pairwise(bounds)
    ]
    assert np.mean(largest) > 0.7


def test_recovered() -> None:
    planted = np.eye(4)
    assert recovered(planted, planted[[2, 0, 3, 1]]) == 1.0
    assert recovered(planted, planted[[0, 0, 1, 2]]) == 0.75, "one topic counts once"
    assert recovered(planted, planted[:2]) == 0.5
    near = planted + 0.1
    assert recovered(planted, near) == 1.0
    assert recovered(planted, near, cosine=0.999) == 0.0
