"""Topics are found, counts stay those of the assignments, and several samplers share them."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from lda import LocalCounts, TopicCounts, TopicSampler, topic_words
from lda.documents import Documents
from lda.planted import planted_topics, recovered
from lda.proposals import propose

from trireme.errors import ConfigurationError

PLANTED = planted_topics(6, 60, 80, length=30)
DOCUMENTS = PLANTED.documents
WORDS = np.arange(60)


def counted(*samplers: tuple[TopicSampler, Documents]) -> np.ndarray:
    """The counts that assignments make."""
    rows = np.zeros((60, 6), np.int32)
    for made, documents in samplers:
        np.add.at(rows, (documents.words, made.assignments), 1)
    return rows


@pytest.mark.thorough
def test_planted_topics_are_found() -> None:
    planted = planted_topics(20, 1000, 1000, length=80, alpha=0.05, beta=0.05)
    counts = LocalCounts(1000, 20)
    made = TopicSampler(planted.documents, 20, alpha=0.05, beta=0.05, steps=4, seed=1)
    made.start(counts)
    before = topic_words(counts.rows(np.arange(1000)), 0.05)
    assert recovered(planted.topics, before) == 0
    for _ in range(120):
        made.sweep(counts)
    found = topic_words(counts.rows(np.arange(1000)), 0.05)
    assert recovered(planted.topics, found) >= 0.95


@pytest.mark.parametrize("block_tokens", [1, 100, 1 << 20])
def test_counts_are_those_of_the_assignments(block_tokens: int) -> None:
    made = TopicSampler(DOCUMENTS, 6, block_tokens=block_tokens)
    counts = LocalCounts(60, 6)
    made.start(counts)
    before = made.assignments.copy()
    for _ in range(3):
        assert np.array_equal(counts.rows(WORDS), counted((made, DOCUMENTS)))
        assert np.array_equal(counts.totals(), counts.rows(WORDS).sum(axis=0))
        done = made.sweep(counts)
    assert done.tokens == len(DOCUMENTS.words)
    assert 0 < done.accepted < 4 * done.tokens
    assert (made.assignments != before).any()


def test_samplers_share_counts() -> None:
    parts = [DOCUMENTS.shard(2, index) for index in range(2)]
    samplers = [TopicSampler(part, 6, seed=seed) for seed, part in enumerate(parts)]
    counts = LocalCounts(60, 6)
    for made in samplers:
        made.start(counts)
    for _ in range(2):
        for made in samplers:
            made.sweep(counts)
    assert np.array_equal(counts.rows(WORDS), counted(*zip(samplers, parts, strict=True)))


class View(TopicCounts):
    """Shared counts as they were at the last look, and what was added through this view since."""

    def __init__(self, shared: LocalCounts) -> None:
        self._shared = shared
        self.look()

    def look(self) -> None:
        self._rows, self._totals = self._shared.rows(WORDS), self._shared.totals()

    def rows(self, words: np.ndarray) -> np.ndarray:
        return self._rows[words]

    def totals(self) -> np.ndarray:
        return self._totals.copy()

    def add(self, words: np.ndarray, deltas: np.ndarray) -> None:
        self._shared.add(words, deltas)
        self._rows[words] += deltas
        self._totals += deltas.sum(axis=0)


def test_samplers_may_see_old_counts_of_each_other() -> None:
    parts = [DOCUMENTS.shard(2, index) for index in range(2)]
    samplers = [TopicSampler(part, 6, seed=seed) for seed, part in enumerate(parts)]
    counts = LocalCounts(60, 6)
    views = [View(counts) for _ in samplers]
    for made, view in zip(samplers, views, strict=True):
        made.start(view)
    for _ in range(100):
        for view in views:
            view.look()
        for made, view in zip(samplers, views, strict=True):
            made.sweep(view)
    assert np.array_equal(counts.rows(WORDS), counted(*zip(samplers, parts, strict=True)))
    assert recovered(PLANTED.topics, topic_words(counts.rows(WORDS), 0.01)) >= 0.5


def test_a_state_leads_to_the_same_sweeps() -> None:
    made, counts = TopicSampler(DOCUMENTS, 6), LocalCounts(60, 6)
    made.start(counts)
    made.sweep(counts)
    state = made.state_dict()
    again, others = TopicSampler(DOCUMENTS, 6, seed=5), LocalCounts(60, 6)
    again.load_state_dict(state)
    again.start(others)
    for _ in range(2):
        made.sweep(counts)
        again.sweep(others)
    assert np.array_equal(made.assignments, again.assignments)
    assert np.array_equal(counts.rows(WORDS), others.rows(WORDS))
    assert not np.array_equal(state["assignments"], made.assignments), "a state is a copy"


def test_a_state_of_another_corpus_is_refused() -> None:
    state = TopicSampler(DOCUMENTS, 6).state_dict()
    for made in (TopicSampler(DOCUMENTS.shard(2, 0), 6), TopicSampler(DOCUMENTS, 3)):
        with pytest.raises(ConfigurationError, match="another corpus or model"):
            made.load_state_dict(state)


def test_numbers_out_of_range() -> None:
    with pytest.raises(ConfigurationError, match="topics=0"):
        TopicSampler(DOCUMENTS, 0)
    with pytest.raises(ConfigurationError, match=r"beta=0\.0"):
        TopicSampler(DOCUMENTS, 6, beta=0.0)


def test_empty_documents_are_kept() -> None:
    documents = Documents.of([[], [0, 1], []], ("a", "b"))
    counts = LocalCounts(2, 3)
    made = TopicSampler(documents, 3)
    made.start(counts)
    assert made.sweep(counts).tokens == 2


def test_tables_draw_what_is_proposed() -> None:
    """Each table's entries together give every topic its probability."""
    generator = np.random.default_rng(0)
    stale = generator.poisson(1.0, (20, 7)).astype(np.int32)
    stale[3] = 0
    totals = stale.sum(axis=0).astype(np.int64)
    tables = propose(stale, totals, 0.1, 20)
    weights = np.vstack([stale, np.full(7, 0.1)]) / (totals + 2.0)
    np.testing.assert_allclose(tables.masses, weights.sum(axis=1))
    for word, wanted in enumerate(weights):
        start, stop = tables.starts[word], tables.starts[word + 1]
        found = np.zeros(7)
        np.add.at(found, tables.topics[start:stop], tables.limits[start:stop])
        np.add.at(found, tables.others[start:stop], 1 - tables.limits[start:stop])
        scale = (stop - start) / wanted.sum() if stop > start else 1.0
        np.testing.assert_allclose(found, wanted * scale, atol=1e-6)
