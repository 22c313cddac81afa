"""Topics of a corpus: LDA by collapsed Gibbs sampling; held-out perplexity after each sweep.

    python examples/topics.py                             the English text that ships with Python
    python examples/topics.py --file corpus.txt           one document a line

Every tenth document is held out: half of its words are given, and the other half is predicted.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from trireme.data import documents
from trireme.data.documents import Documents
from trireme.topics import LocalCounts, TopicSampler, perplexity, topic_words


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", metavar="FILE", help="default: text that ships with Python")
    parser.add_argument("--topics", type=int, default=50, metavar="N")
    parser.add_argument("--sweeps", type=int, default=300, metavar="N")
    parser.add_argument("--alpha", type=float, default=0.1, help="prior of a document's topics")
    parser.add_argument("--beta", type=float, default=0.1, help="prior of a topic's words")
    parser.add_argument("--words", type=int, default=10, metavar="N", help="printed of each topic")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def learn(
    train: Documents, held_out: Documents, given: argparse.Namespace
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distribution over words of each topic, and the tokens that each topic has."""
    counts = LocalCounts(len(train.vocabulary), given.topics)
    sampler = TopicSampler(train, given.topics, alpha=given.alpha, beta=given.beta, seed=given.seed)
    sampler.start(counts)
    every_word = np.arange(len(train.vocabulary))
    for sweep in range(1, given.sweeps + 1):
        began = time.perf_counter()
        tokens = sampler.sweep(counts).tokens
        seconds = time.perf_counter() - began
        learned = topic_words(counts.rows(every_word), given.beta)
        reached = perplexity(learned, held_out, alpha=given.alpha)
        speed = f"{tokens / seconds / 1e6:.1f} million tokens/s"
        print(f"sweep {sweep}: held-out perplexity {reached:.1f}, {speed}", flush=True)
    return learned, counts.totals()


def show(learned: np.ndarray, sizes: np.ndarray, vocabulary: tuple[str, ...], words: int) -> None:
    """Prints the most probable words of each topic, the largest topics first."""
    for topic in np.argsort(-sizes, kind="stable"):
        best = np.argsort(-learned[topic], kind="stable")[:words]
        print(f"{sizes[topic] / sizes.sum():6.1%}  {' '.join(vocabulary[word] for word in best)}")


def main() -> None:
    given = options()
    corpus = documents.read(given.file) if given.file else documents.of_python()
    train, held_out = documents.hold_out(corpus)
    print(
        f"{len(train)} documents of {len(train.words)} tokens, {len(held_out)} held out; "
        f"{len(corpus.vocabulary)} words"
    )
    learned, sizes = learn(train, held_out, given)
    show(learned, sizes, corpus.vocabulary, given.words)


if __name__ == "__main__":
    main()
