"""scikit-learn's LatentDirichletAllocation: batch variational Bayes, `--sweeps` passes."""

from __future__ import annotations

import time

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.decomposition import LatentDirichletAllocation

from benchmarks.programs.topic_files import Corpus, Learned, arguments


def main() -> None:
    given = arguments()
    corpus = Corpus.read(given.corpus)
    ones = np.ones(len(corpus.words))
    shape = len(corpus.offsets) - 1, corpus.size
    counts = csr_matrix((ones, corpus.words, corpus.offsets), shape=shape)
    counts.sum_duplicates()
    model = LatentDirichletAllocation(
        given.topics,
        doc_topic_prior=given.alpha,
        topic_word_prior=given.beta,
        learning_method="batch",
        max_iter=given.sweeps,
        random_state=given.seed,
    )
    began = time.perf_counter()
    model.fit(counts)
    taken = time.perf_counter() - began
    sums = model.components_.sum(axis=1, keepdims=True)
    Learned(model.components_ / sums, taken).write(given.learned)


if __name__ == "__main__":
    main()
