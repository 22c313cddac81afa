"""Topics of a corpus: LDA by collapsed Gibbs sampling; held-out perplexity after each sweep.

    python examples/topics.py                             the English text that ships with Python
    python examples/topics.py --file corpus.txt           one document a line
    trireme run --ps 1 --workers 2 --strategy ssp examples/topics.py

Every tenth document is held out: half of its words are given, and the other half is predicted. The
others are dealt to the workers in blocks. `--staleness` counts blocks.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from lda import SharedTopics, documents, perplexity
from lda.documents import Documents

import trireme


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", metavar="FILE", help="default: text that ships with Python")
    parser.add_argument("--topics", type=int, default=50, metavar="N")
    parser.add_argument("--sweeps", type=int, default=300, metavar="N")
    parser.add_argument(
        "--initial-sweeps",
        type=int,
        default=200,
        metavar="N",
        help="of a sample, which gives the first topics; 0 begins with random ones",
    )
    parser.add_argument("--alpha", type=float, default=0.1, help="prior of a document's topics")
    parser.add_argument("--beta", type=float, default=0.1, help="prior of a topic's words")
    parser.add_argument("--block-tokens", type=int, default=1 << 14, metavar="N", help="an update")
    parser.add_argument("--words", type=int, default=10, metavar="N", help="printed of each topic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", "--run_dir", metavar="DIR", help="saves there, and resumes")
    return parser.parse_args(trireme.program_arguments())


class Progress:
    """Prints what all workers have reached, on the chief.

    Args:
        shared: the topics.
        held_out: the documents to predict.
        tokens: the number of tokens that a sweep samples.
    """

    def __init__(self, shared: SharedTopics, held_out: Documents, tokens: int) -> None:
        self._shared, self._held_out, self._tokens = shared, held_out, tokens
        self._sweep, self._began = shared.sweeps, time.perf_counter()

    def show(self) -> None:
        """Prints the sweep that every document has had, if there is a new one."""
        sweep = self._shared.sweeps
        if sweep == self._sweep:
            return
        seconds = time.perf_counter() - self._began
        speed = self._tokens * (sweep - self._sweep) / seconds / 1e6
        learned, _ = self._shared.learned()
        reached = perplexity(learned, self._held_out, alpha=self._shared.alpha)
        print(
            f"sweep {sweep}: held-out perplexity {reached:.1f}, {speed:.1f} million tokens/s",
            flush=True,
        )
        self._sweep, self._began = sweep, time.perf_counter()


def show(learned: np.ndarray, sizes: np.ndarray, vocabulary: tuple[str, ...], words: int) -> None:
    """Prints the most probable words of each topic, the largest topics first."""
    for topic in np.argsort(-sizes, kind="stable"):
        best = np.argsort(-learned[topic], kind="stable")[:words]
        print(f"{sizes[topic] / sizes.sum():6.1%}  {' '.join(vocabulary[word] for word in best)}")


def main() -> None:
    given = options()
    corpus = documents.read(given.file) if given.file else documents.of_python()
    train, held_out = documents.hold_out(corpus)
    with trireme.ps.connect(given.run_dir) as ps:
        shared = SharedTopics(
            ps,
            train,
            given.topics,
            alpha=given.alpha,
            beta=given.beta,
            seed=given.seed,
            block_tokens=given.block_tokens,
            initial_sweeps=given.initial_sweeps,
        )
        if ps.is_chief:
            print(
                f"{len(train)} documents of {len(train.words)} tokens, {len(held_out)} held out; "
                f"{len(corpus.vocabulary)} words"
            )
        progress = Progress(shared, held_out, len(train.words))
        while shared.advance(given.sweeps):
            if ps.is_chief:
                progress.show()
        shared.finish(given.sweeps, meanwhile=progress.show if ps.is_chief else lambda: None)
        if ps.is_chief:
            progress.show()
            show(*shared.learned(), corpus.vocabulary, given.words)


if __name__ == "__main__":
    main()
