"""A sampler of topics: the assignments of some documents, sweep by sweep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from trireme.data.seeds import derive
from trireme.errors import ConfigurationError

from .counts import TopicCounts
from .documents import Documents
from .kernel import sample
from .proposals import propose

_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep has done.

    Attributes:
        tokens: the number of tokens whose topic was sampled.
        accepted: the number of proposals of another topic that were accepted.
    """

    tokens: int
    accepted: int


@dataclass(frozen=True, slots=True)
class _Block:
    """Some consecutive documents.

    Attributes:
        tokens: the range of their tokens.
        offsets: of the documents, from the beginning of the block.
        words: the words that they have, each once, int64.
        rows: the index in `words` of each token's word, int32.
    """

    tokens: slice
    offsets: npt.NDArray[np.int64]
    words: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int32]


@final
class TopicSampler:
    """Samples the topics of documents' tokens by collapsed Gibbs sampling, as LightLDA does.

    Documents are sampled in blocks. A block reads the counts of its words once, builds the
    proposals from them, samples, and adds what has changed. Time is constant for each token,
    however many topics there are. Memory: 8 bytes a token; for a block also 4 bytes a token, and 8
    to 20 for each of its words and topics.

    The proposals of a block depend on the assignments at its beginning. So the posterior is met
    exactly in the limit of many `steps`; with 2 its distance is a few hundredths for a corpus of
    eight tokens, and less for larger ones.

    Attributes:
        assignments: the topic of each token, int32 of shape (tokens,).
        alpha: the concentration of the prior of documents' topics, for each topic.
        beta: the concentration of the prior of topics' words, for each word.
    """

    def __init__(
        self,
        documents: Documents,
        topics: int,
        *,
        alpha: float = 0.1,
        beta: float = 0.01,
        seed: int = 0,
        steps: int = 2,
        block_tokens: int = _BLOCK_TOKENS,
    ) -> None:
        """Divides the documents into blocks, and draws a topic for each token.

        Args:
            documents: the documents; empty ones are kept.
            topics: the number of topics.
            alpha: the concentration of the prior of documents' topics, for each topic.
            beta: the concentration of the prior of topics' words, for each word.
            seed: of the random numbers; samplers that share counts need different ones.
            steps: how often each of the two proposals is made for a token in a sweep.
            block_tokens: a block ends with the document in which it reaches so many tokens.

        Raises:
            ConfigurationError: a number is out of range.
        """
        if topics < 1 or steps < 1 or block_tokens < 1 or not (alpha > 0 and beta > 0):
            raise ConfigurationError(
                f"topics={topics}, steps={steps}, block_tokens={block_tokens}, alpha={alpha}, "
                f"beta={beta}: whole numbers start at 1, and the others are positive"
            )
        self.alpha, self.beta = alpha, beta
        self._topics, self._steps = topics, steps
        self._vocabulary = len(documents.vocabulary)
        self._blocks = _blocks(documents, block_tokens)
        generator = np.random.Generator(np.random.Philox(key=derive(seed, 0)))
        self.assignments = generator.integers(topics, size=len(documents.words), dtype=np.int32)
        self._state = np.array([derive(seed, 1)], np.uint64)

    def start(self, counts: TopicCounts) -> None:
        """Adds the assignments to the counts: once, before the first sweep.

        They are uniform, unless others were written to `assignments` before, such as those that
        `InitialTopics` draws.
        """
        for block in self._blocks:
            deltas = np.zeros((len(block.words), self._topics), np.int32)
            np.add.at(deltas, (block.rows, self.assignments[block.tokens]), 1)
            counts.add(block.words, deltas)

    def sweep(self, counts: TopicCounts) -> Sweep:
        """Samples the topic of each token once, block by block."""
        accepted = sum(self._sample(block, counts) for block in self._blocks)
        return Sweep(len(self.assignments), accepted)

    def state_dict(self) -> dict[str, npt.NDArray[np.generic]]:
        """Returns copies of the assignments and of the state of the random numbers."""
        return {"assignments": self.assignments.copy(), "random": self._state.copy()}

    def load_state_dict(self, state: dict[str, npt.NDArray[np.generic]]) -> None:
        """Goes on with the assignments of a state; the counts must contain them.

        Raises:
            ConfigurationError: the state is of other documents, or of more topics.
        """
        found = state["assignments"]
        if found.shape != self.assignments.shape or found.max(initial=0) >= self._topics:
            raise ConfigurationError(
                f"the state has the topics of {found.size} tokens, and these documents have "
                f"{self.assignments.size} in {self._topics} topics: it is of another corpus or "
                "model"
            )
        self.assignments[:] = found
        self._state[:] = state["random"]

    def _sample(self, block: _Block, counts: TopicCounts) -> int:
        stale, totals = counts.rows(block.words), counts.totals()
        proposals = propose(stale, totals, self.beta, self._vocabulary)
        rows = stale.copy()
        assignments = self.assignments[block.tokens]
        accepted = sample(
            block.offsets,
            block.rows,
            assignments,
            assignments.copy(),
            rows,
            totals,
            stale,
            proposals.inverse,
            proposals.starts,
            proposals.topics,
            proposals.others,
            proposals.limits,
            proposals.masses,
            self.alpha,
            self.beta,
            self._vocabulary,
            self._steps,
            self._state,
        )
        rows -= stale
        counts.add(block.words, rows)
        return accepted


def divide(documents: Documents, tokens: int) -> list[tuple[int, int]]:
    """Divides documents into blocks of about so many tokens.

    Returns:
        The first document of each block, and the one after its last.
    """
    found, first = list[tuple[int, int]](), 0
    offsets = documents.offsets
    while first < len(documents):
        after = int(np.searchsorted(offsets, offsets[first] + tokens))
        after = min(max(after, first + 1), len(documents))
        found.append((first, after))
        first = after
    return found


def _blocks(documents: Documents, tokens: int) -> list[_Block]:
    """Divides documents into blocks of about so many tokens."""
    found = []
    offsets = documents.offsets
    for first, after in divide(documents, tokens):
        part = slice(int(offsets[first]), int(offsets[after]))
        words, rows = np.unique(documents.words[part], return_inverse=True)
        inside = offsets[first : after + 1] - offsets[first]
        found.append(_Block(part, inside, words.astype(np.int64), rows.astype(np.int32)))
    return found
