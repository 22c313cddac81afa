"""The sampler's stationary distribution is the posterior, as exact Gibbs sampling's."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba")

from lda import LocalCounts, TopicSampler
from lda.documents import Documents
from lda.kernel import sample
from lda.proposals import propose

from tests.examples.lda.posterior import Probabilities, distance, number_of, posterior

DOCUMENTS = Documents.of([[0, 0, 1], [1, 2], [0, 2, 2]], ("a", "b", "c"))
TOPICS, ALPHA, BETA = 2, 0.5, 0.3
NOISE = 0.03
"""What 20,000 sweeps of exact Gibbs sampling differ from the posterior, and a little more."""


@pytest.fixture(scope="module")
def exact() -> Probabilities:
    return posterior(DOCUMENTS, TOPICS, ALPHA, BETA)


def sampler(steps: int) -> tuple[TopicSampler, LocalCounts]:
    made = TopicSampler(DOCUMENTS, TOPICS, alpha=ALPHA, beta=BETA, steps=steps)
    counts = LocalCounts(3, TOPICS)
    made.start(counts)
    return made, counts


@pytest.mark.parametrize("steps", [1, 2])
def test_any_fixed_proposals_leave_the_posterior_as_it_is(exact: Probabilities, steps: int) -> None:
    made, counts = sampler(steps)
    rows, totals = counts.rows(np.arange(3)), counts.totals()
    proposals = propose(rows.copy(), totals, BETA, 3)
    before, state = made.assignments.copy(), np.array([7], np.uint64)
    sizes = np.zeros(len(exact))
    for _ in range(40_000):
        sample(
            DOCUMENTS.offsets,
            DOCUMENTS.words,
            made.assignments,
            before,
            rows,
            totals,
            proposals.stale,
            proposals.inverse,
            proposals.starts,
            proposals.topics,
            proposals.others,
            proposals.limits,
            proposals.masses,
            ALPHA,
            BETA,
            3,
            steps,
            state,
        )
        sizes[number_of(made.assignments, TOPICS)] += 1
    assert distance(sizes / sizes.sum(), exact) < NOISE


@pytest.mark.thorough
@pytest.mark.parametrize(("steps", "bound"), [(8, 0.04), (2, 0.06)])
def test_sweeps_with_proposals_of_each_block(
    exact: Probabilities, steps: int, bound: float
) -> None:
    made, counts = sampler(steps)
    sizes = np.zeros(len(exact))
    for _ in range(20_000):
        made.sweep(counts)
        sizes[number_of(made.assignments, TOPICS)] += 1
    assert distance(sizes / sizes.sum(), exact) < bound
