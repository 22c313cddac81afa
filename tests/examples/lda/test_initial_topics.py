"""Topics to begin with: what merges, what is drawn, and that planted topics are recovered."""

from __future__ import annotations

from math import lgamma

import numpy as np
import pytest

pytest.importorskip("numba")

from lda import InitialTopics, LocalCounts, SharedTopics, TopicSampler, topic_words
from lda.documents import Documents
from lda.initial_topics import merged
from lda.planted import planted_topics, recovered

from tests.examples.lda.values import Memory, Stored
from trireme.errors import ConfigurationError

ALPHA, BETA = 0.3, 0.2


def joint(by_word: np.ndarray, by_document: np.ndarray) -> float:
    """What of the logarithm of p(words, assignments) depends on which topics merge."""
    log = 0.0
    for counts, concentration in ((by_word, BETA), (by_document, ALPHA)):
        for row in counts.tolist():
            log += sum(lgamma(n + concentration) - lgamma(concentration) for n in row)
    sums = BETA * by_word.shape[1]
    return log - sum(lgamma(n + sums) - lgamma(sums) for n in by_word.sum(axis=1))


def merged_by_trial(by_word: np.ndarray, by_document: np.ndarray, topics: int) -> np.ndarray:
    """The counts by word after the best merge was made again and again."""
    while len(by_word) > topics:
        trials = []
        for one in range(len(by_word)):
            for other in range(one):
                parts = []
                for counts in (by_word, by_document):
                    rest = np.delete(counts, [one, other], axis=0)
                    parts.append(np.vstack([rest, counts[one] + counts[other]]))
                trials.append((joint(*parts), parts))
        by_word, by_document = max(trials, key=lambda trial: trial[0])[1]
    return by_word


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_the_topics_merge_whose_joint_probability_loses_least(seed: int) -> None:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(2, 60, 9)

    def counts(places: int) -> np.ndarray:
        shares = generator.dirichlet(np.full(places, 0.5), len(sizes))
        rows = [generator.multinomial(*row) for row in zip(sizes, shares, strict=True)]
        return np.array(rows, np.int32)

    by_word, by_document = counts(7), counts(7)
    expected = merged_by_trial(by_word, by_document, 3)
    left = merged(by_word, by_document, 3, alpha=ALPHA, beta=BETA)
    assert left.sum() == 3
    assert sorted(by_word[left].tolist()) == sorted(expected.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_as_many_topics_as_were_planted_recover_them(seed: int) -> None:
    planted = planted_topics(20, 1000, 900, length=80, alpha=0.05, beta=0.05, seed=seed)
    counts = LocalCounts(1000, 20)
    sampler = TopicSampler(planted.documents, 20, alpha=0.05, beta=0.05, seed=seed)
    initial = InitialTopics.learned(planted.documents, 20, alpha=0.05, beta=0.05, seed=seed)
    sampler.assignments[:] = initial.draw(planted.documents, seed)
    sampler.start(counts)
    for _ in range(30):
        sampler.sweep(counts)
    found = topic_words(counts.rows(np.arange(1000)), 0.05)
    assert recovered(planted.topics, found) >= 0.95


@pytest.mark.thorough
def test_the_same_arguments_give_the_same_topics() -> None:
    planted = planted_topics(3, 30, 20)
    one, again, other = (
        InitialTopics.learned(planted.documents, 3, seed=seed, sweeps=3) for seed in (1, 1, 2)
    )
    assert np.array_equal(one.counts, again.counts)
    assert not np.array_equal(one.counts, other.counts)
    drawn = one.draw(planted.documents, 5)
    assert np.array_equal(drawn, again.draw(planted.documents, 5))
    assert not np.array_equal(drawn, one.draw(planted.documents, 6))


@pytest.mark.thorough
def test_the_sample_is_every_nth_document() -> None:
    documents = Documents.of([[0, 0], [1, 1], [3, 4], [1, 1], [0, 3]], tuple("abcde"))
    initial = InitialTopics.learned(documents, 2, sweeps=1, sample_tokens=5)
    assert initial.words.tolist() == [0, 3, 4]
    assert initial.counts.sum(axis=1).tolist() == [3, 2, 1]


def test_a_topic_is_drawn_from_the_word_and_the_document() -> None:
    counts = np.array([[90, 0], [0, 90], [5, 5]], np.int32)
    initial = InitialTopics(np.array([0, 2, 5]), counts, alpha=0.01, beta=0.01)
    # Words 0 and 2 decide on a topic; word 5 does not, nor does word 1, which the sample has not.
    documents = Documents.of(
        [[0, 5, 1, 5, 1] * 40, [2, 5, 1, 5, 1] * 40, [5], [1]], tuple("abcdef")
    )
    drawn = initial.draw(documents)
    assert drawn.dtype == np.int32
    assert (drawn[:200] == 0).mean() > 0.97
    assert (drawn[200:400] == 1).mean() > 0.97
    alone = np.array([initial.draw(documents, seed)[-2:] for seed in range(200)])
    assert (abs(alone.mean(axis=0) - 0.5) < 0.15).all(), "a document has no topics of another"


def test_few_words_and_few_documents() -> None:
    empty = Documents.of([[], []], ("a",))
    assert InitialTopics.learned(empty, 3, sweeps=2).draw(empty).shape == (0,)
    small = Documents.of([[0]], ("a",))
    assert 0 <= InitialTopics.learned(small, 3, sweeps=2).draw(small)[0] < 3
    with pytest.raises(ConfigurationError, match="topics=0"):
        InitialTopics.learned(small, 0)


# In SharedTopics ----------------------------------------------------------------------------------

PLANTED = planted_topics(6, 60, 80, length=30)


def shared_topics(ps: Memory, sweeps: int = 100) -> SharedTopics:
    return SharedTopics(
        ps, PLANTED.documents, 6, beta=0.05, block_tokens=150, initial_sweeps=sweeps
    )


def work(shared: SharedTopics, sweeps: int) -> None:
    while shared.advance(sweeps):
        pass


def test_workers_begin_with_the_same_topics() -> None:
    stored = Stored()
    workers = [shared_topics(Memory(stored, index, 2)) for index in range(2)]
    for shared in workers:
        work(shared, 0)
    alone = Stored()
    work(shared_topics(Memory(alone)), 0)
    for place, row in alone.rows.items():
        assert np.array_equal(row, stored.rows[place]), place
    assert recovered(PLANTED.topics, workers[0].learned()[0]) >= 0.8


def test_a_worker_that_starts_again_begins_with_the_same_topics() -> None:
    stored, going_on = Stored(), True
    while going_on:  # each process dies after two updates
        shared = shared_topics(Memory(stored), 5)
        going_on = shared.advance(2) and shared.advance(2)
    whole = Stored()
    work(shared_topics(Memory(whole), 5), 2)
    for place, row in whole.rows.items():
        assert np.array_equal(row, stored.rows[place]), place


def test_a_job_that_goes_on_learns_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = Stored()
    work(shared_topics(Memory(stored), 5), 1)
    monkeypatch.setattr(InitialTopics, "draw", pytest.fail)
    work(shared_topics(Memory(stored), 5), 2)
