"""Topics on parameter servers: counts and assignments agree, whatever becomes of an update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from lda import SharedTopics, perplexity
from lda.documents import Documents
from lda.planted import planted_topics, recovered
from lda.shared_topics import Values

import trireme
from tests.clocks import VirtualClock
from tests.examples.lda.values import Memory, Stored
from tests.harness import Cluster, run_job
from trireme.errors import ConfigurationError
from trireme.tables.job.connection import Connection

PLANTED = planted_topics(6, 60, 80, length=30)
DOCUMENTS = PLANTED.documents
TOKENS = len(DOCUMENTS.words)
BLOCK = 150


def shared_topics(ps: Values, documents: Documents = DOCUMENTS, seed: int = 0) -> SharedTopics:
    return SharedTopics(
        ps, documents, 6, beta=0.05, seed=seed, block_tokens=BLOCK, initial_sweeps=0
    )


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead() -> None:
    """Servers and workers are threads here: while numba compiles in one, others do nothing."""
    with trireme.ps.connect() as ps:
        work(shared_topics(ps), 0)


def assert_exact(ps: Values, shared: SharedTopics, documents: Documents = DOCUMENTS) -> None:
    """Checks that each token is counted once, in the topic that it is assigned."""
    rows = shared.rows(np.arange(len(documents.vocabulary)))
    assert rows.sum() == len(documents.words)
    assert np.array_equal(rows.sum(axis=0), shared.totals())
    keys, assigned = 0, []
    for first, after in blocks_of(documents):
        tokens = int(documents.offsets[after] - documents.offsets[first])
        count = -(-tokens // 64)
        found = ps.pull("assignments", np.arange(keys, keys + count)).reshape(-1)
        assert (found[tokens:] == 0).all()
        assigned.append(found[:tokens] - 1)
        keys += count
    expected = np.zeros_like(rows)
    np.add.at(expected, (documents.words, np.concatenate(assigned)), 1)
    assert np.array_equal(rows, expected)


def blocks_of(documents: Documents) -> list[tuple[int, int]]:
    """The blocks by their definition: each ends with the document that reaches the tokens."""
    found, first, tokens = [], 0, 0
    for number, length in enumerate(np.diff(documents.offsets)):
        tokens += int(length)
        if tokens >= BLOCK or number + 1 == len(documents):
            found.append((first, number + 1))
            first, tokens = number + 1, 0
    return found


def work(shared: SharedTopics, sweeps: int) -> None:
    while shared.advance(sweeps):
        pass


@pytest.mark.thorough
def test_every_sweep_leaves_the_counts_of_the_assignments() -> None:
    ps = Memory(Stored())
    shared = shared_topics(ps)
    assert shared.sweeps == 0
    for sweeps in range(4):
        work(shared, sweeps)
        assert shared.sweeps == sweeps
        assert_exact(ps, shared)
    topics, sizes = shared.learned()
    assert np.allclose(topics.sum(axis=1), 1) and sizes.sum() == TOKENS


def test_workers_share_the_blocks() -> None:
    stored = Stored()
    connections = [Memory(stored, index, 2) for index in range(2)]
    workers = [shared_topics(ps) for ps in connections]
    for shared in workers:
        work(shared, 2)
    assert stored.clocks == 3 * len(blocks_of(DOCUMENTS)) >= 30
    assert all(shared.sweeps == 2 for shared in workers)
    assert_exact(connections[0], workers[0])


def lost(_: Callable[[], None]) -> bool:
    return False


def applied_but_not_told(apply: Callable[[], None]) -> bool:
    apply()
    return False


@pytest.mark.parametrize("fault", [lost, applied_but_not_told])
def test_an_update_that_is_lost_counts_once_or_not_at_all(
    fault: Callable[[Callable[[], None]], bool],
) -> None:
    def clock(number: int, apply: Callable[[], None]) -> bool:
        if number % 7 == 3:
            return fault(apply)
        apply()
        return True

    stored = Stored()
    ps = Memory(stored, clock=clock)
    shared = shared_topics(ps)
    work(shared, 3)
    assert shared.sweeps == 3
    done = ps.pull("sweeps")
    assert (done == 4).all(), "no block was sampled once more than wanted"
    assert_exact(ps, shared)


def test_a_worker_that_starts_again_goes_on_with_the_assignments_that_count() -> None:
    stored = Stored()
    going_on = True
    while going_on:  # each process dies after two updates
        ps = Memory(stored)
        shared = shared_topics(ps)
        going_on = shared.advance(3) and shared.advance(3)
    whole = Stored()
    work(shared_topics(Memory(whole)), 3)
    for place, row in whole.rows.items():
        assert np.array_equal(row, stored.rows[place]), f"{place}: as without a death"
    assert_exact(ps, shared)


@pytest.mark.parametrize("at", ["between updates", "while a block is sampled"])
def test_after_the_job_went_back_the_blocks_are_read_again(at: str) -> None:
    stored = Stored()
    ps = Memory(stored)
    shared = shared_topics(ps)
    work(shared, 1)
    checkpoint = stored.copy()
    for _ in range(len(blocks_of(DOCUMENTS)) + 5):
        shared.advance(4)

    def go_back() -> None:
        stored.rows, stored.life = checkpoint, 1

    if at == "between updates":
        go_back()
    else:
        pull = ps.pull

        def pull_late(name: str, keys: object = None) -> np.ndarray:
            if name == "totals" and not stored.life:
                go_back()
            return pull(name, keys)

        ps.pull = pull_late  # type: ignore[method-assign]
    work(shared, 4)
    assert (ps.pull("sweeps") == 5).all()
    assert_exact(ps, shared)


def test_values_of_other_documents_are_refused() -> None:
    stored = Stored()
    work(shared_topics(Memory(stored)), 1)
    others = planted_topics(6, 60, 80, length=30, seed=1).documents
    with pytest.raises(ConfigurationError, match="other documents, or of another division"):
        work(shared_topics(Memory(stored), others), 2)
    with pytest.raises(ConfigurationError, match="other documents, or of another division"):
        work(SharedTopics(Memory(stored), DOCUMENTS, 6, block_tokens=2 * BLOCK), 2)


def test_empty_documents_are_kept() -> None:
    documents = Documents.of([[], [0, 1], [], [1], []], ("a", "b"))
    ps = Memory(Stored())
    shared = SharedTopics(ps, documents, 3, block_tokens=2)
    work(shared, 2)
    assert shared.learned()[1].sum() == 3
    empty = SharedTopics(Memory(Stored()), Documents.of([], ("a",)), 3)
    assert not empty.advance(2)


def test_numbers_out_of_range() -> None:
    with pytest.raises(ConfigurationError, match="topics=0"):
        SharedTopics(Memory(Stored()), DOCUMENTS, 0)


def test_a_job_that_has_ended_is_sampled_no_more() -> None:
    ps = Memory(Stored())
    shared = shared_topics(ps)
    ps.stopping = True
    assert not shared.advance(1)
    assert ps.stored.clocks == 0


def test_a_worker_waits_for_the_others_as_long_as_they_go_on() -> None:
    stored, clock = Stored(), VirtualClock()
    first, second = (shared_topics(Memory(stored, index, 2)) for index in range(2))
    work(first, 1)
    waits: list[float] = []

    def others_work(seconds: float) -> None:
        clock.advance(50.0)
        waits.append(seconds)
        if len(waits) <= 4:
            second.advance(1)

    assert not first.finish(1, clock=clock, sleep=others_work)
    assert len(waits) == 6, "two more, after which a minute is over"
    waits.clear()
    assert not first.finish(1, patience=0.0, clock=clock, sleep=others_work)
    assert not waits
    work(second, 1)
    assert first.finish(1, clock=clock, sleep=others_work)
    assert not waits


@pytest.mark.parametrize("why", ["stopping", "interrupted"])
def test_nobody_waits_in_a_job_that_is_stopped(why: str) -> None:
    ps = Memory(Stored(), 0, 2)
    setattr(ps, why, True)
    assert not shared_topics(ps).finish(1, sleep=pytest.fail)


# On servers ---------------------------------------------------------------------------------------

LARGER = planted_topics(20, 1000, 1000, length=80, alpha=0.05, beta=0.05)
SSP = Cluster(workers=2, servers=1, strategy="ssp", staleness=3)


def learn(cluster: Cluster, seed: int, sweeps: int = 60) -> tuple[float, float]:
    """The share of planted topics that a job finds, and the perplexity of what it has learned."""
    documents = LARGER.documents
    train = documents.between(0, 900)

    def make(_: int) -> Connection:
        return trireme.ps.connect()

    def program(ps: Connection) -> tuple[float, float]:
        shared = SharedTopics(ps, train, 20, alpha=0.05, beta=0.05, seed=seed, block_tokens=8000)
        work(shared, sweeps)
        assert shared.finish(sweeps)
        topics, sizes = shared.learned()
        assert sizes.sum() == len(train.words)
        assert (ps.pull("sweeps") == sweeps + 1).all()
        held_out = documents.between(900, 1000)
        return recovered(LARGER.topics, topics), perplexity(topics, held_out, alpha=0.05)

    return run_job(cluster, make, program).values[0]  # type: ignore[arg-type, return-value]


@pytest.mark.slow
@pytest.mark.thorough
def test_two_workers_find_planted_topics_as_one_does() -> None:
    found, reached = learn(SSP, 0)
    alone, least = learn(Cluster(servers=0), 0)
    assert min(found, alone) >= 0.95
    assert 0.97 < reached / least < 1.03, "one process with two seeds differs by up to 2%"


@pytest.mark.parametrize("strategy", ["async", "sync"])
def test_counts_are_exact_on_two_servers_and_after_a_resume(strategy: str, tmp_path: Path) -> None:
    def make(_: int) -> Connection:
        return trireme.ps.connect(tmp_path)

    def program(ps: Connection, sweeps: int) -> None:
        shared = shared_topics(ps)
        work(shared, sweeps)
        assert shared.finish(sweeps)
        assert_exact(ps, shared)

    first = Cluster(workers=2, servers=2, strategy=strategy)
    _ = run_job(first, make, lambda ps: program(ps, 2)).values  # type: ignore[arg-type, return-value]
    second = Cluster(workers=3, servers=1, strategy=strategy)
    _ = run_job(second, make, lambda ps: program(ps, 4)).values  # type: ignore[arg-type, return-value]
    with make(0) as ps:
        program(ps, 5)
