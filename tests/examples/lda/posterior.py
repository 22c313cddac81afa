"""The exact posterior of the assignments of a tiny corpus, by enumeration."""

from __future__ import annotations

from itertools import product
from math import lgamma

import numpy as np
import numpy.typing as npt
from lda.documents import Documents

Probabilities = npt.NDArray[np.float64]


def posterior(documents: Documents, topics: int, alpha: float, beta: float) -> Probabilities:
    """The probability of each assignment, in the order of `itertools.product`."""
    tokens, words = len(documents.words), len(documents.vocabulary)
    owner = np.repeat(np.arange(len(documents)), np.diff(documents.offsets))
    logs = []
    for assigned in product(range(topics), repeat=tokens):
        by_document = np.zeros((len(documents), topics))
        by_word = np.zeros((words, topics))
        for token, topic in enumerate(assigned):
            by_document[owner[token], topic] += 1
            by_word[documents.words[token], topic] += 1
        log = sum(lgamma(n + alpha) for n in by_document.flat)
        log += sum(lgamma(n + beta) for n in by_word.flat)
        log -= sum(lgamma(n + words * beta) for n in by_word.sum(axis=0))
        logs.append(log)
    weights = np.exp(np.array(logs) - max(logs))
    normal: Probabilities = weights / weights.sum()
    return normal


def number_of(assignments: npt.NDArray[np.int32], topics: int) -> int:
    """The place of assignments in the order of `posterior`."""
    number = 0
    for topic in assignments.tolist():
        number = number * topics + topic
    return number


def distance(one: Probabilities, other: Probabilities) -> float:
    """The total variation distance of two distributions."""
    return float(np.abs(one - other).sum() / 2)
