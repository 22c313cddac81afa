"""tomotopy's LDAModel: collapsed Gibbs sampling, `--sweeps` iterations."""

from __future__ import annotations

import time

import numpy as np
import tomotopy

from benchmarks.programs.topic_files import Corpus, Learned, arguments


def main() -> None:
    given = arguments()
    corpus = Corpus.read(given.corpus)
    model = tomotopy.LDAModel(k=given.topics, alpha=given.alpha, eta=given.beta, seed=given.seed)
    model.optim_interval = 0  # alpha stays as it is, as in the others
    for document in corpus.documents():
        if len(document):
            model.add_doc(list(map(str, document)))
    model.train(0, workers=given.threads)  # prepares the documents
    began = time.perf_counter()
    model.train(given.sweeps, workers=given.threads)
    taken = time.perf_counter() - began
    topics = np.full((given.topics, corpus.size), 0.0)
    present = [int(word) for word in model.used_vocabs]
    for topic in range(given.topics):
        topics[topic, present] = model.get_topic_word_dist(topic)
    topics += 1e-12  # words that only held-out documents have
    Learned(topics / topics.sum(axis=1, keepdims=True), taken).write(given.learned)


if __name__ == "__main__":
    main()
