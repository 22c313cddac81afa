"""Held-out perplexity by document completion: one measure for every topic model.

Half of a held-out document's tokens are given, and the other half is to be predicted (Wallach et
al.: Evaluation Methods for Topic Models, ICML 2009, section 4). It takes nothing of a model but
each topic's distribution over words and the prior of documents' topics: models of all programs
compare.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from trireme.errors import ConfigurationError
from trireme.tables.compiled import compiled

from .documents import Documents

_ROUNDS = 200
_TOLERANCE = 1e-5


def perplexity(
    topics: npt.NDArray[np.float64], documents: Documents, *, alpha: float, seed: int = 0
) -> float:
    """Returns the perplexity of the second halves of documents, given the first.

    Args:
        topics: the distribution over words of each topic, float64 of shape (topics, words); each
            row sums to 1.
        documents: the held-out documents, with the words that the topics have.
        alpha: the concentration of the prior of documents' topics, for each topic.
        seed: of the division into halves.

    Returns:
        The exponential of the mean negative log-likelihood of a predicted token.

    Raises:
        ConfigurationError: the topics have other words than the documents, a word that is
            predicted has no probability, or no document has two tokens.
    """
    if topics.ndim != 2 or topics.shape[1] != len(documents.vocabulary):
        raise ConfigurationError(
            f"topics of shape {topics.shape} for documents of {len(documents.vocabulary)} words: "
            "topics have one row each, and a column for each word"
        )
    given, wanted = halves(documents, seed)
    count = len(wanted.words)
    if not count:
        raise ConfigurationError("no held-out document has two tokens: nothing can be predicted")
    by_word = np.ascontiguousarray(topics.T, np.float64)
    sums = complete(given.offsets, given.words, wanted.offsets, wanted.words, by_word, alpha)
    if not math.isfinite(sums):
        raise ConfigurationError("a held-out word has no probability in any topic: smooth them")
    return math.exp(-sums / count)


def halves(documents: Documents, seed: int = 0) -> tuple[Documents, Documents]:
    """Divides the tokens of each document at random: half are given, half wanted.

    Of an odd number of tokens, the one more is given.
    """
    generator = np.random.Generator(np.random.Philox(key=seed))
    order = generator.random(len(documents.words))
    lengths = np.diff(documents.offsets)
    owner = np.repeat(np.arange(len(documents)), lengths)
    mixed = documents.words[np.lexsort((order, owner))]
    place = np.arange(len(mixed)) - np.repeat(documents.offsets[:-1], lengths)
    is_given = place < np.repeat((lengths + 1) // 2, lengths)
    parts = []
    for chosen, sizes in ((is_given, (lengths + 1) // 2), (~is_given, lengths // 2)):
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        parts.append(Documents(offsets, mixed[chosen], documents.vocabulary))
    return parts[0], parts[1]


@compiled
def complete(
    offsets: npt.NDArray[np.int64],
    given: npt.NDArray[np.int32],
    wanted_offsets: npt.NDArray[np.int64],
    wanted: npt.NDArray[np.int32],
    by_word: npt.NDArray[np.float64],
    alpha: float,
) -> float:
    """Returns the log-likelihood of the wanted tokens of all documents.

    A document's distribution over topics is the fixed point of
    theta_k = (alpha + sum over given tokens of p(k | word, theta)) / (K alpha + tokens).

    Args:
        offsets: of the documents in `given`.
        given: the given tokens' words.
        wanted_offsets: of the documents in `wanted`.
        wanted: the wanted tokens' words.
        by_word: the probability of each word in each topic, of shape (words, topics).
        alpha: the concentration of the prior of documents' topics, for each topic.
    """
    topics = by_word.shape[1]
    share = np.empty(topics)
    found = np.empty(topics)
    total = 0.0
    for document in range(len(offsets) - 1):
        if wanted_offsets[document] == wanted_offsets[document + 1]:
            continue
        start, stop = offsets[document], offsets[document + 1]
        share[:] = 1.0 / topics
        for _ in range(_ROUNDS):
            found[:] = alpha
            for token in range(start, stop):
                row = by_word[given[token]]
                mass = 0.0
                for topic in range(topics):
                    mass += share[topic] * row[topic]
                if mass > 0.0:
                    for topic in range(topics):
                        found[topic] += share[topic] * row[topic] / mass
            change, sums = 0.0, found.sum()
            for topic in range(topics):
                change += abs(found[topic] / sums - share[topic])
                share[topic] = found[topic] / sums
            if change < _TOLERANCE:
                break
        for token in range(wanted_offsets[document], wanted_offsets[document + 1]):
            row = by_word[wanted[token]]
            mass = 0.0
            for topic in range(topics):
                mass += share[topic] * row[topic]
            total += np.log(mass)
    return total
