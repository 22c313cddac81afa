"""The files between the benchmark of topic models and the programs that learn them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Corpus(NamedTuple):
    """Documents as in `lda.documents`, which the peers' environments do not have.

    Attributes:
        offsets: int64 of shape (documents + 1,).
        words: int32 of shape (tokens,).
        size: of the vocabulary.
    """

    offsets: npt.NDArray[np.int64]
    words: npt.NDArray[np.int32]
    size: int

    @classmethod
    def read(cls, path: Path) -> Corpus:
        """Reads what `write` has written."""
        with np.load(path) as found:
            return cls(found["offsets"], found["words"], int(found["size"]))

    def write(self, path: Path) -> None:
        """Writes the documents to a file that ends with `.npz`."""
        np.savez(path, offsets=self.offsets, words=self.words, size=self.size)

    def documents(self) -> list[npt.NDArray[np.int32]]:
        """Returns the words of each document."""
        return np.split(self.words, self.offsets[1:-1])


class Learned(NamedTuple):
    """The topics that a program has learned.

    Attributes:
        topics: the distribution over words of each topic, float64 of shape (topics, words).
        seconds: what the sweeps have taken.
    """

    topics: npt.NDArray[np.float64]
    seconds: float

    @classmethod
    def read(cls, path: Path) -> Learned:
        """Reads what `write` has written."""
        with np.load(path) as found:
            return cls(found["topics"], float(found["seconds"]))

    def write(self, path: Path) -> None:
        """Writes it to a file that ends with `.npz`."""
        np.savez(path, topics=self.topics, seconds=self.seconds)


def arguments() -> argparse.Namespace:
    """Parses the command line that all programs have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("corpus", type=Path)
    parser.add_argument("learned", type=Path)
    parser.add_argument("--topics", type=int, required=True)
    parser.add_argument("--alpha", type=float, required=True)
    parser.add_argument("--beta", type=float, required=True)
    parser.add_argument("--sweeps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--threads", type=int, default=1, help="where the program has any")
    return parser.parse_args()
