"""What the sampler proposes for a word, drawn in constant time: Walker's alias method.

The proposal of topic k for word w is (n_kw + beta) / (n_k + V beta), with the counts at the
beginning of a block. It is a mixture of a part that is proportional to n_kw, which has as many
topics as the word has had, and of a part that is the same for all words. So the tables of a word
take time and memory for its topics alone, not for all topics.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trireme.tables.compiled import compiled

from .counts import Counts

Floats = npt.NDArray[np.float64]


class Proposals(NamedTuple):
    """Alias tables, one for each row of counts and one that they share.

    The entries of row w are starts[w] to starts[w + 1]; those of the shared table come last.

    Attributes:
        stale: the counts, int32 of shape (words, topics).
        inverse: 1 / (n_k + V beta), float64 of shape (topics,).
        beta: the prior's concentration.
        starts: int64 of shape (words + 2,).
        topics: int32 of shape (entries,): the topic of an entry.
        others: int32 of shape (entries,): the topic that an entry gives else.
        limits: float32 of shape (entries,): the probability with which it gives its own.
        masses: float64 of shape (words + 1,): the sums of the tables before they are normalised.
    """

    stale: Counts
    inverse: Floats
    beta: float
    starts: npt.NDArray[np.int64]
    topics: npt.NDArray[np.int32]
    others: npt.NDArray[np.int32]
    limits: npt.NDArray[np.float32]
    masses: Floats


def propose(stale: Counts, totals: npt.NDArray[np.int64], beta: float, words: int) -> Proposals:
    """Builds the tables of some words.

    Args:
        stale: the counts of these words, int32 of shape (words, topics). They are kept.
        totals: the number of tokens of each topic, int64 of shape (topics,).
        beta: the prior's concentration, for each word.
        words: the size of the vocabulary, V.
    """
    count, topics = stale.shape
    inverse: Floats = 1.0 / (totals.astype(np.float64) + words * beta)
    lengths = np.append(np.count_nonzero(stale, axis=1), topics)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    entries = int(starts[-1])
    made = Proposals(
        stale,
        inverse,
        beta,
        starts,
        np.empty(entries, np.int32),
        np.empty(entries, np.int32),
        np.empty(entries, np.float32),
        np.empty(count + 1, np.float64),
    )
    build(*made)
    return made


@compiled
def build(
    stale: Counts,
    inverse: Floats,
    beta: float,
    starts: npt.NDArray[np.int64],
    topics: npt.NDArray[np.int32],
    others: npt.NDArray[np.int32],
    limits: npt.NDArray[np.float32],
    masses: Floats,
) -> None:
    """Fills the tables of all words and the shared one."""
    words, count = stale.shape
    weights = np.empty(count)
    queue = np.empty(count, np.int64)
    for word in range(words + 1):
        start, size, mass = starts[word], 0, 0.0
        for topic in range(count):
            weight = beta if word == words else float(stale[word, topic])
            if weight > 0:
                topics[start + size] = topic
                weights[size] = weight * inverse[topic]
                mass += weights[size]
                size += 1
        masses[word] = mass
        end = start + size
        fill(weights[:size], mass, queue, topics[start:end], others[start:end], limits[start:end])


@compiled
def fill(
    weights: Floats,
    mass: float,
    queue: npt.NDArray[np.int64],
    topics: npt.NDArray[np.int32],
    others: npt.NDArray[np.int32],
    limits: npt.NDArray[np.float32],
) -> None:
    """Fills one alias table (Vose: A Linear Algorithm for Generating Random Numbers, 1991).

    Args:
        weights: the weights of the entries, which are changed.
        mass: their sum.
        queue: room for as many numbers.
        topics: the topic of each entry.
        others: filled.
        limits: filled.
    """
    size = len(weights)
    small, large = 0, size  # the queue's front has entries below the mean, its end the others
    for index in range(size):
        weights[index] *= size / mass
        if weights[index] < 1.0:
            queue[small] = index
            small += 1
        else:
            large -= 1
            queue[large] = index
    while small > 0 and large < size:
        small -= 1
        low, high = queue[small], queue[large]
        limits[low] = weights[low]
        others[low] = topics[high]
        weights[high] -= 1.0 - weights[low]
        if weights[high] < 1.0:
            large += 1
            queue[small] = high
            small += 1
    for index in range(small):  # rounding has left these
        limits[queue[index]], others[queue[index]] = 1.0, topics[queue[index]]
    for index in range(large, size):
        limits[queue[index]], others[queue[index]] = 1.0, topics[queue[index]]
