"""`SharedTopics` on a corpus; the chief writes what all workers have learned."""

from __future__ import annotations

import time

from lda import SharedTopics
from lda.documents import Documents

import trireme
from benchmarks.programs.topic_files import Corpus, Learned, arguments


def main() -> None:
    given = arguments()
    corpus = Corpus.read(given.corpus)
    vocabulary = tuple(map(str, range(corpus.size)))
    documents = Documents(corpus.offsets, corpus.words, vocabulary)
    with trireme.ps.connect() as ps:
        shared = SharedTopics(
            ps, documents, given.topics, alpha=given.alpha, beta=given.beta, seed=given.seed
        )
        while shared.advance(0):  # only the first assignments
            pass
        began = time.perf_counter()
        while shared.advance(given.sweeps):
            pass
        if not shared.finish(given.sweeps):
            raise SystemExit("some documents were not sampled so often")
        taken = time.perf_counter() - began
        if ps.is_chief:
            Learned(shared.learned()[0], taken).write(given.learned)


if __name__ == "__main__":
    main()
