"""Topics from which a sampler draws its first assignments.

More topics than wanted are learned from a sample of the documents. Then pairs of topics merge until
as many are left as wanted.

A sampler that begins with uniform assignments, and learns as many topics as there are, tends to end
in a local optimum: one topic holds two, and another is there twice. With half as many more each is
found. What merges are copies and fragments.

Sources: Dasgupta and Schulman, A Probabilistic Analysis of EM for Mixtures of Separated, Spherical
Gaussians, JMLR 2007, section 2 (more centres than wanted, then pruned, then trained again); Heller
and Ghahramani, Bayesian Hierarchical Clustering, ICML 2005 (the pair that merges has the largest
ratio of the marginal likelihood with and without merging).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trireme.data.seeds import derive
from trireme.tables.compiled import compiled

from .counts import Counts, LocalCounts, Words
from .documents import Documents
from .proposals import Floats
from .random_numbers import State, uniform
from .sampler import TopicSampler

INITIAL_SWEEPS = 200
"""After so many sweeps 75 topics contained 50 planted ones; after 100 some were missing."""

_FACTOR = 1.5
_SAMPLE_TOKENS = 1 << 20
_BLOCK_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class InitialTopics:
    """Topics from which a sampler draws its first assignments.

    Attributes:
        words: the words that the sample has, each once, ascending.
        counts: their tokens by topic, int32 of shape (words, topics).
        alpha: the concentration of the prior of documents' topics, for each topic.
        beta: the concentration of the prior of topics' words, for each word.
    """

    words: Words
    counts: Counts
    alpha: float
    beta: float

    @classmethod
    def learned(
        cls,
        documents: Documents,
        topics: int,
        *,
        alpha: float = 0.1,
        beta: float = 0.01,
        seed: int = 0,
        sweeps: int = INITIAL_SWEEPS,
        steps: int = 2,
        factor: float = _FACTOR,
        sample_tokens: int = _SAMPLE_TOKENS,
    ) -> InitialTopics:
        """Learns them in this process; the same arguments give the same topics.

        A sweep takes as long as one of `TopicSampler` with `factor` times as many topics.

        Memory: `factor` times 12 bytes for each topic and each word or document of the sample, and
        16 bytes a token of the sample.

        Args:
            documents: all documents.
            topics: the number of topics.
            alpha: see `TopicSampler`.
            beta: see `TopicSampler`.
            seed: of the random numbers.
            sweeps: how often the sample is swept.
            steps: see `TopicSampler`.
            factor: so many times `topics` are learned before they merge.
            sample_tokens: the sample is every n-th document, with the least n that gives about so
                many tokens.

        Raises:
            ConfigurationError: a number is out of range.
        """
        every = max(math.ceil(len(documents.words) / sample_tokens), 1)
        words, sample = _own_words(documents.shard(every, 0) if every > 1 else documents)
        more = max(math.ceil(factor * topics), topics)
        sampler = TopicSampler(
            sample,
            more,
            alpha=alpha,
            beta=beta,
            seed=derive(seed, 0),
            steps=steps,
            block_tokens=_BLOCK_TOKENS,
        )
        counts = LocalCounts(len(words), more)
        sampler.start(counts)
        for _ in range(sweeps if len(words) else 0):
            sampler.sweep(counts)
        by_word = np.ascontiguousarray(counts.rows(np.arange(len(words))).T)
        by_document = np.zeros((more, len(sample)), np.int32)
        owner = np.repeat(np.arange(len(sample)), np.diff(sample.offsets))
        np.add.at(by_document, (sampler.assignments, owner), 1)
        left = merged(by_word, by_document, topics, alpha=alpha, beta=beta)
        return cls(words, np.ascontiguousarray(by_word[left].T), alpha, beta)

    def draw(self, documents: Documents, seed: int = 0) -> npt.NDArray[np.int32]:
        """Draws a topic for each token, given the topics and the document's tokens before it.

        A word that the sample has not is drawn from the document's topics. The time of a token is
        in proportion to the number of topics.

        Returns:
            int32 of shape (tokens,).
        """
        present, rows = np.unique(documents.words, return_inverse=True)
        counts = np.zeros((len(present), self.counts.shape[1]))
        known = np.isin(present, self.words)
        counts[known] = self.counts[np.searchsorted(self.words, present[known])]
        sums = self.counts.sum(axis=0, dtype=np.int64) + self.beta * len(documents.vocabulary)
        state = np.array([seed], np.uint64)
        return _draw(documents.offsets, rows, (counts + self.beta) / sums, self.alpha, state)


def merged(
    by_word: Counts, by_document: Counts, topics: int, *, alpha: float, beta: float
) -> npt.NDArray[np.bool_]:
    """Merges topics in place until so many are left, always the two that lose the least.

    What is lost is the logarithm of the joint probability of words and assignments (Griffiths and
    Steyvers, PNAS 2004, equations 2 and 3).

    Args:
        by_word: the tokens by topic and word, int32 of shape (more topics, words).
        by_document: the tokens by topic and document, int32 of shape (more topics, documents).
        topics: how many are to be left.
        alpha: the concentration of the prior of documents' topics, for each topic.
        beta: the concentration of the prior of topics' words, for each word.

    Returns:
        Which topics are left, of shape (more topics,).
    """
    of_words, of_documents = _terms(by_word, beta), _terms(by_document, alpha)
    beta_sum = beta * by_word.shape[1]
    return _merge(by_word, by_document, of_words, of_documents, beta_sum, topics)


def _terms(counts: Counts, concentration: float) -> Floats:
    """Returns log Gamma(n + c) - log Gamma(c) for each count n that may come about."""
    most = int(counts.sum(axis=0).max(initial=0))
    return np.array(
        [math.lgamma(n + concentration) - math.lgamma(concentration) for n in range(most + 1)]
    )


def _own_words(documents: Documents) -> tuple[Words, Documents]:
    """Numbers the words that documents have anew, without those that they have not."""
    words, rows = np.unique(documents.words, return_inverse=True)
    vocabulary = tuple(documents.vocabulary[word] for word in words)
    return words.astype(np.int64), Documents(documents.offsets, rows.astype(np.int32), vocabulary)


@compiled
def _merge(
    by_word: Counts,
    by_document: Counts,
    of_words: Floats,
    of_documents: Floats,
    beta_sum: float,
    wanted: int,
) -> npt.NDArray[np.bool_]:
    """Does what `merged` does, with the terms of all counts and V beta."""
    topics = len(by_word)
    left = np.ones(topics, np.bool_)
    losses = np.full((topics, topics), np.inf)
    sizes = by_word.sum(axis=1)
    for one in range(topics):
        found = _losses(by_word, one, of_words) + _losses(by_document, one, of_documents)
        losses[one, :one] = found[:one]
        for other in range(one):
            losses[one, other] += _loss_of_sizes(sizes[one], sizes[other], beta_sum)
    for _ in range(topics - wanted):
        place = int(np.argmin(losses))
        one, other = place // topics, place % topics
        by_word[one] += by_word[other]
        by_document[one] += by_document[other]
        sizes[one] += sizes[other]
        left[other] = False
        losses[other, :] = np.inf
        losses[:, other] = np.inf
        found = _losses(by_word, one, of_words) + _losses(by_document, one, of_documents)
        for each in range(topics):
            if left[each] and each != one:
                loss = found[each] + _loss_of_sizes(sizes[one], sizes[each], beta_sum)
                losses[max(one, each), min(one, each)] = loss
    return left


@compiled
def _losses(counts: Counts, one: int, terms: Floats) -> Floats:
    """Returns what the counts of a topic lose where it merges with each of the others."""
    places = np.flatnonzero(counts[one])  # elsewhere nothing is lost
    losses = np.zeros(len(counts))
    for other in range(len(counts)):
        if other != one:
            for place in places:
                first, second = counts[one, place], counts[other, place]
                losses[other] += terms[first] + terms[second] - terms[first + second]
    return losses


@compiled
def _loss_of_sizes(one: int, other: int, beta_sum: float) -> float:
    """Returns what the sums of two topics' counts lose where they merge."""
    together = math.lgamma(one + other + beta_sum) + math.lgamma(beta_sum)
    return together - math.lgamma(one + beta_sum) - math.lgamma(other + beta_sum)


@compiled
def _draw(
    offsets: npt.NDArray[np.int64],
    words: npt.NDArray[np.int64],
    by_word: Floats,
    alpha: float,
    state: State,
) -> npt.NDArray[np.int32]:
    """Draws the topic of each token; `by_word` has the probability of each word in each topic."""
    topics = by_word.shape[1]
    drawn = np.empty(len(words), np.int32)
    within = np.zeros(topics)
    sums = np.empty(topics)
    for document in range(len(offsets) - 1):
        start, stop = offsets[document], offsets[document + 1]
        for token in range(start, stop):
            mass = 0.0
            for topic in range(topics):
                mass += (within[topic] + alpha) * by_word[words[token], topic]
                sums[topic] = mass
            place = np.searchsorted(sums, uniform(state) * mass, side="right")
            drawn[token] = min(place, topics - 1)
            within[drawn[token]] += 1
        for token in range(start, stop):
            within[drawn[token]] = 0
    return drawn
