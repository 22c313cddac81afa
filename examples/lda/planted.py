"""Documents from planted topics, and how many of them a model has found."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .documents import Documents

Matrix = npt.NDArray[np.float64]


class PlantedTopics(NamedTuple):
    """Documents and what they were drawn from.

    Attributes:
        documents: the documents.
        topics: the distribution over words of each topic, float64 of shape (topics, words).
    """

    documents: Documents
    topics: Matrix


def planted_topics(
    topics: int = 50,
    words: int = 2000,
    documents: int = 2000,
    *,
    length: int = 100,
    alpha: float = 0.1,
    beta: float = 0.05,
    seed: int = 0,
) -> PlantedTopics:
    """Draws documents as latent Dirichlet allocation says they come about.

    Args:
        topics: the number of topics.
        words: the size of the vocabulary.
        documents: the number of documents.
        length: the mean number of tokens of a document, which is a Poisson variable.
        alpha: the concentration of documents' topics, for each topic.
        beta: the concentration of topics' words, for each word.
        seed: the same one gives the same documents on one machine, with one NumPy.
    """
    generator = np.random.Generator(np.random.Philox(key=seed))
    by_topic = generator.dirichlet(np.full(words, beta), topics)
    lengths = generator.poisson(length, documents)
    shares = generator.dirichlet(np.full(topics, alpha), documents)
    counts = generator.multinomial(lengths, shares)
    assigned = np.repeat(np.tile(np.arange(topics), documents), counts.ravel())
    tokens = np.empty(len(assigned), np.int32)
    for topic in range(topics):
        chosen = np.flatnonzero(assigned == topic)
        drawn = np.searchsorted(np.cumsum(by_topic[topic]), generator.random(len(chosen)))
        tokens[chosen] = np.minimum(drawn, words - 1)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    vocabulary = tuple(f"word{number}" for number in range(words))
    return PlantedTopics(Documents(offsets, tokens, vocabulary), by_topic)


def recovered(planted: Matrix, learned: Matrix, *, cosine: float = 0.9) -> float:
    """Returns the share of planted topics that a model has found.

    Each planted topic is matched with one learned topic of its own, the most similar pairs first;
    it is found where the cosine of the two is large enough.

    Args:
        planted: the planted topics, of shape (topics, words).
        learned: the learned ones, of shape (any number, words).
        cosine: the least cosine.
    """
    scaled = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in (planted, learned)]
    similar = scaled[0] @ scaled[1].T
    found = 0
    for _ in range(min(similar.shape)):
        one, other = np.unravel_index(similar.argmax(), similar.shape)
        found += int(similar[one, other] >= cosine)
        similar[one, :] = similar[:, other] = -np.inf
    return found / len(planted)
