"""A topic model on parameter servers: its counts, and the assignments of all documents.

The documents are cut into blocks, which are dealt to the workers. A worker reads the counts of a
block's words, samples the block, and sends what has changed as one update: the counts of the words,
the totals, the assignments of the block and the number of its sweeps. Updates are applied exactly
once or not at all, so that the counts are those of the assignments at every step, whatever worker
is killed. A worker keeps nothing that the servers do not have: one that is started again goes on
with the assignments that are in the counts.

Source of the division of work: Yuan et al., LightLDA: Big Topic Models on Modest Computer Clusters,
WWW 2015, section 5. There the assignments stay on the workers' disks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, final

import numpy as np
import numpy.typing as npt

from trireme.data.seeds import derive
from trireme.errors import ConfigurationError
from trireme.wire.clock import Clock, MonotonicClock

from .counts import Counts, TopicCounts, Words, topic_words
from .documents import Documents
from .initial_topics import INITIAL_SWEEPS, InitialTopics
from .sampler import TopicSampler, divide

_BLOCK_TOKENS = 1 << 14
_LOOK_SECONDS = 0.1
_WIDTH = 64
"""The tokens of a row of assignments."""


class Values(Protocol):
    """What a `trireme.ps.Connection` does, as far as it is needed here."""

    @property
    def index(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def life(self) -> int: ...
    @property
    def stopping(self) -> bool: ...
    @property
    def interrupted(self) -> bool: ...
    def create(self, name: str, shape: Any, *, dtype: str = ...) -> None: ...
    def create_table(self, name: str, width: int, *, dtype: str = ...) -> None: ...
    def pull(self, name: str, keys: Any = None) -> npt.NDArray[Any]: ...
    def push(self, name: str, *what: Any) -> None: ...
    def clock(self) -> Any: ...
    def end(self) -> None: ...
    def finish(self) -> None: ...


@final
class SharedTopics(TopicCounts):
    """The counts of a topic model on parameter servers, and this worker's part in sampling it.

    Every worker makes one, of the same documents. Block b belongs to worker b mod `ps.workers`.

    Memory on the servers: 4 bytes a word and topic, 4 a token, and the overhead of tables.

    Args:
        ps: the connection, as `trireme.ps.connect` returns it. `words`, `totals`, `assignments` and
            `sweeps` are created in it.
        documents: all documents.
        topics: the number of topics.
        alpha: see `TopicSampler`.
        beta: see `TopicSampler`.
        seed: of the random numbers. Those of a block depend on it, on the block and on the sweep.
        steps: see `TopicSampler`.
        block_tokens: a block ends with the document in which it reaches so many tokens. `staleness`
            of the strategy `ssp` counts blocks.
        initial_sweeps: the sweeps by which each worker learns `InitialTopics`, the same as the
            others, before it first gives topics to a block; 0 for uniform assignments.

    Attributes:
        alpha: the same.
        beta: the same.

    Raises:
        ConfigurationError: a number is out of range.
    """

    def __init__(
        self,
        ps: Values,
        documents: Documents,
        topics: int,
        *,
        alpha: float = 0.1,
        beta: float = 0.01,
        seed: int = 0,
        steps: int = 2,
        block_tokens: int = _BLOCK_TOKENS,
        initial_sweeps: int = INITIAL_SWEEPS,
    ) -> None:
        self.alpha, self.beta = alpha, beta
        self._ps, self._seed, self._words = ps, seed, len(documents.vocabulary)
        ranges = divide(documents, max(block_tokens, 1))
        options: dict[str, Any] = {"alpha": alpha, "beta": beta, "steps": steps}
        self._blocks: dict[int, _Block] = {}
        key = 0
        for number, (first, after) in enumerate(ranges):
            part = documents.between(first, after)
            rows = -(-len(part.words) // _WIDTH)
            if number % ps.workers == ps.index:
                sampler = TopicSampler(
                    part,
                    topics,
                    seed=derive(seed, number),
                    block_tokens=len(part.words) + 1,  # one block, empty documents included
                    **options,
                )
                self._blocks[number] = _Block(part, sampler, np.arange(key, key + rows))
            key += rows
        self._count = len(ranges)
        self._done: dict[int, int] = {}  # see `_look`
        self._life = 0
        self._deltas: tuple[Words, Counts] | None = None
        self._initial: InitialTopics | None = None
        self._learn = partial(
            InitialTopics.learned,
            documents,
            topics,
            seed=derive(seed, len(ranges)),
            sweeps=initial_sweeps,
            **options,
        )
        self._initial_sweeps = initial_sweeps
        ps.create("totals", topics, dtype="int64")
        ps.create("sweeps", max(self._count, 1), dtype="int64")
        ps.create_table("words", topics, dtype="int32")
        ps.create_table("assignments", _WIDTH, dtype="int32")

    # -- counts -----------------------------------------------------------------------------------

    def rows(self, words: Words) -> Counts:
        return self._ps.pull("words", words)

    def totals(self) -> npt.NDArray[np.int64]:
        return self._ps.pull("totals")

    def add(self, words: Words, deltas: Counts) -> None:
        """Keeps what a block's sampler adds, until all of its update is there."""
        self._deltas = words, deltas

    def learned(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Returns what was learned by now.

        Returns:
            The distribution over words of each topic, float64 of shape (topics, words); and the
            number of tokens of each topic, int64 of shape (topics,).
        """
        rows = self.rows(np.arange(self._words))
        return topic_words(rows, self.beta), rows.sum(axis=0, dtype=np.int64)

    # -- sampling ---------------------------------------------------------------------------------

    @property
    def sweeps(self) -> int:
        """How often every document was sampled by now, by whichever worker."""
        return max(int(self._ps.pull("sweeps").min()) - 1, 0)

    def advance(self, sweeps: int) -> bool:
        """Samples one of this worker's blocks once: the one that was sampled least.

        The first time, each token of the block gets its first topic instead. Where the update is
        not applied, because the job has given this worker up meanwhile, nothing has changed.

        Args:
            sweeps: how often every block is to be sampled.

        Returns:
            Whether there was a block left; False also where the job has ended.
        """
        ps = self._ps
        self._look()
        left = [number for number, done in self._done.items() if done <= sweeps]
        if not left or ps.stopping:
            return False
        number = min(left, key=lambda each: self._done[each])
        block, done = self._blocks[number], self._done[number]
        if done:
            if block.stored is None:
                self._read(block)
            block.go_on(derive(self._seed, number, done))
            block.sampler.sweep(self)
        else:
            self._start(number)
        if self._push(number):
            block.stored = block.rows
            self._done[number] += 1
        else:
            self._done.clear()
        return True

    def finish(
        self,
        sweeps: int,
        *,
        patience: float = 60.0,
        meanwhile: Callable[[], None] = lambda: None,
        clock: Clock | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> bool:
        """Makes no more updates, and waits for the blocks of all workers; the chief saves.

        A worker that is killed may be started again, and then goes on with its blocks. It is waited
        for as long as blocks are sampled, and for `patience` seconds without.

        Args:
            sweeps: how often every block is to be sampled.
            patience: in seconds.
            meanwhile: is called several times a second.
            clock: the time; None for the machine's.
            sleep: waits for some seconds.

        Returns:
            Whether every block was sampled so often.
        """
        ps, clock = self._ps, clock or MonotonicClock()
        stopped = ps.stopping  # by others: they make no more updates either
        ps.end()
        since, before = clock.now(), -1
        while not stopped and not ps.interrupted and len(self._blocks) < self._count:
            found = ps.pull("sweeps")
            meanwhile()
            if int(found.sum()) != before:
                since, before = clock.now(), int(found.sum())
            if found.min() > sweeps or clock.now() - since >= patience:
                break
            sleep(_LOOK_SECONDS)
        ps.finish()
        return self.sweeps >= sweeps

    def _start(self, number: int) -> None:
        """Gives each token of a block its first topic."""
        block = self._blocks[number]
        if self._initial_sweeps:
            if self._initial is None:
                self._initial = self._learn()
            drawn = self._initial.draw(block.documents, derive(self._seed, number, 0))
            block.sampler.assignments[:] = drawn
        block.sampler.start(self)

    def _look(self) -> None:
        """Learns from the servers how far this worker's blocks are, unless it knows.

        The entry of a block is 0 before its tokens have topics, and one more than its sweeps then.
        """
        if self._done and self._life == self._ps.life:
            return
        found = self._ps.pull("sweeps")
        self._life = self._ps.life
        self._done = {number: int(found[number]) for number in self._blocks}
        for block in self._blocks.values():
            block.stored = None

    def _read(self, block: _Block) -> None:
        """Asks for the assignments of a block.

        Raises:
            ConfigurationError: the counts do not contain them.
        """
        block.stored = self._ps.pull("assignments", block.keys)
        tokens = len(block.documents.words)
        topics, rest = np.split(block.stored.reshape(-1), [tokens])
        words, rows = np.unique(block.documents.words, return_inverse=True)
        counts = self.rows(words.astype(np.int64))
        known = topics.min(initial=1) > 0 and topics.max(initial=1) <= counts.shape[1]
        if known and not rest.any():
            np.subtract.at(counts, (rows, topics - 1), 1)
            if counts.min(initial=0) >= 0:
                return
        raise ConfigurationError(
            "the values on the servers are of other documents, or of another division into blocks: "
            "choose another run directory, or give the documents and block_tokens that they are of"
        )

    def _push(self, number: int) -> bool:
        """Sends the update of a block; returns whether it was applied."""
        ps, block = self._ps, self._blocks[number]
        assert self._deltas is not None
        words, deltas = self._deltas
        self._deltas = None
        if ps.life != self._life:  # the job went back: these values are no more
            return False
        sweep = np.zeros(max(self._count, 1), np.int64)
        sweep[number] = 1
        ps.push("sweeps", sweep)
        ps.push("words", words, deltas)
        ps.push("totals", deltas.sum(axis=0, dtype=np.int64))
        ps.push("assignments", block.keys, block.rows - block.before())
        applied: bool = ps.clock().applied
        return applied


class _Block:
    """Some consecutive documents, and their assignments as the servers have them.

    The servers have a token's topic plus 1, and 0 where it has none: in rows of `_WIDTH` tokens,
    the last of them filled up with zeros.

    Args:
        documents: the documents.
        sampler: of these alone.
        keys: the keys of their rows.

    Attributes:
        documents: the same.
        sampler: the same.
        keys: the same.
        stored: the rows that the servers have, int32 of shape (keys, _WIDTH); None where they must
            be asked for.
    """

    def __init__(
        self, documents: Documents, sampler: TopicSampler, keys: npt.NDArray[np.int64]
    ) -> None:
        self.documents, self.sampler, self.keys = documents, sampler, keys
        self.stored: Counts | None = None

    @property
    def rows(self) -> Counts:
        """The sampler's assignments, as the servers are to have them."""
        rows = np.zeros(len(self.keys) * _WIDTH, np.int32)
        rows[: len(self.sampler.assignments)] = self.sampler.assignments + 1
        return rows.reshape(-1, _WIDTH)

    def before(self) -> Counts:
        """Returns the rows that the servers have; zeros where they have none."""
        return np.zeros_like(self.rows) if self.stored is None else self.stored

    def go_on(self, random: int) -> None:
        """Gives the sampler the assignments that the servers have, and new random numbers."""
        topics = self.before().reshape(-1)[: len(self.sampler.assignments)] - 1
        self.sampler.load_state_dict(
            {"assignments": topics, "random": np.array([random], np.uint64)}
        )
