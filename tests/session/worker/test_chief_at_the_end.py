"""The last step is saved once, by whoever is chief when training has ended on all workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

from tests.harness import JOB, SECRET, Cluster, Ran, run_job
from trireme.cluster.member import Member, Observer
from trireme.errors import CheckpointError, CheckpointLockLost, JobFailed
from trireme.ps.shard import shard
from trireme.session.checkpoint import latest, list_checkpoints, step_of
from trireme.session.options import Checkpoint
from trireme.session.session import Session
from trireme.session.worker import lifecycle

STEPS = 12


class Killed(Exception):
    pass


def run(tmp_path: Path, servers: int, *, kill: bool) -> tuple[Ran[None], list[bool], int | None]:
    """Runs a job, whose chief retires later than the other worker, or dies instead.

    Returns:
        How the job ended, whether each worker was chief then, and the saved step.
    """
    torch.manual_seed(3)
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))
    retired, sessions = Event(), list[Session]()

    def session(worker: int) -> Session:
        torch.manual_seed(4)
        sessions.append(
            Session(
                nn.Linear(8, 2),
                nn.CrossEntropyLoss(),
                lambda parameters: torch.optim.SGD(parameters, lr=0.01),
                run_dir=tmp_path,
                max_steps=STEPS,
            )
        )
        return sessions[worker]

    def program(session: Session) -> None:
        worker = session.worker
        if session.is_chief:
            worker.backend.retire = die if kill else worker.backend.retire  # type: ignore[method-assign]
        else:
            worker.backend.drain = partial(drain, worker.backend.drain)  # type: ignore[method-assign]
        while not session.should_stop():
            session.step(batch)

    def drain(then: Callable[[], None]) -> None:
        retired.set()
        then()
        member = sessions[1].worker.lifecycle.member
        assert member is not None
        gone = member.wait_until(lambda: member.view.chief == 1, time.monotonic() + 30)
        assert gone, "the chief has not left"

    def die() -> None:
        assert retired.wait(30)
        member = sessions[0].worker.lifecycle.member
        assert member is not None
        member.close()
        raise Killed

    cluster = Cluster(
        workers=2,
        servers=servers,
        strategy="async",
        run_dir=tmp_path,
        policy={"reconnect_grace": 0.2, "wait_for_restart": 0.0},
    )
    ran = run_job(cluster, session, program)
    checkpoint = latest(tmp_path, lambda path, error: None)
    chiefs = [session.is_chief for session in sessions]
    return ran, chiefs, None if checkpoint is None else checkpoint.step


@pytest.mark.parametrize("servers", [1, 2])
def test_who_has_retired_takes_over_from_a_chief_that_is_lost(tmp_path: Path, servers: int) -> None:
    ran, chiefs, saved = run(tmp_path, servers, kill=True)
    assert isinstance(ran.raised.pop(0), Killed)
    assert not ran.raised
    assert ran.over is not None and ran.over.outcome == "finished"
    assert chiefs[1]
    assert saved == STEPS


def test_nobody_takes_over_from_a_chief_that_has_saved(tmp_path: Path) -> None:
    ran, chiefs, saved = run(tmp_path, 2, kill=False)
    assert ran.values == [None, None]
    assert chiefs == [True, False]
    assert saved == STEPS


def test_who_takes_over_from_a_chief_that_died_in_its_save_saves_at_its_next_step(
    tmp_path: Path,
) -> None:
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))

    def session(worker: int) -> Session:
        model = nn.Linear(8, 2)
        return Session(
            model,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(model.parameters(), lr=0.01),
            checkpoint=Checkpoint(every_steps=STEPS // 2, every_seconds=None),
            max_steps=STEPS,
        )

    def program(session: Session) -> None:
        worker, member = session.worker, session.worker.lifecycle.member
        assert member is not None

        def die(*_: object, **__: object) -> None:
            member.close()
            raise Killed

        if session.is_chief:
            worker.storage.submit = die  # type: ignore[method-assign]
        while not session.should_stop():
            session.step(batch)
            if session.global_step == STEPS // 2:
                gone = member.wait_until(lambda: member.view.chief == 1, time.monotonic() + 30)
                assert gone, "the chief has not left"
            worker.storage.settle()  # else one that is slow may be left out

    policy = {"reconnect_grace": 0.2, "wait_for_restart": 0.0}
    ran = run_job(Cluster(2, 1, "sync", run_dir=tmp_path, policy=policy), session, program)
    assert {worker: type(error) for worker, error in ran.raised.items()} == {0: Killed}
    steps = [step_of(path) for path in list_checkpoints(tmp_path)]
    assert steps == [STEPS // 2 + 1, STEPS]


def session(worker: int) -> Session:
    """A worker's session, in a job without a last step."""
    model = nn.Linear(8, 2)
    return Session(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.01))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("strategy", ["async", "ssp", "sync", "averaging"])
def test_a_chief_whose_loop_ends_first_saves_what_the_others_learn(
    tmp_path: Path, strategy: str, servers: int
) -> None:
    """Updates that other workers make after the chief's last step are in the checkpoint."""
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))
    retired = Event()

    def program(session: Session) -> None:
        backend, chief = session.worker.backend, session.is_chief
        if chief:
            backend.retire = partial(retire, backend.retire)  # type: ignore[method-assign]
        for _ in range(3):
            session.step(batch)
        if not chief:
            assert retired.wait(30)
            for _ in range(STEPS):
                session.step(batch)

    def retire(then: Callable[[], None]) -> None:
        then()
        retired.set()

    more = {"averaging": {"every": 3}}.get(strategy, {})
    cluster = Cluster(2, servers, strategy, run_dir=tmp_path, **more)
    ran = run_job(cluster, session, program)
    assert ran.values == [None, None]
    checkpoint = latest(tmp_path, lambda path, error: None)
    made = 6 if strategy in ("async", "ssp") else 3  # rounds count once
    assert checkpoint is not None and checkpoint.step == made + STEPS


@pytest.mark.parametrize("called", ["interrupted", "leaves", "dismissed"])
def test_a_worker_that_waits_for_the_others_can_be_called_away(
    tmp_path: Path, called: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted chief asks the job to stop, and saves. Others leave, also as chief."""
    monkeypatch.setattr(shard, "NOTICE_SECONDS", 0.05)
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))
    waits, left, pause = Event(), Event(), Event()
    waiter = 1 if called == "dismissed" else 0

    def program(session: Session) -> None:
        lifecycle, backend = session.worker.lifecycle, session.worker.backend
        session.step(batch)
        if lifecycle.task.index == waiter:
            backend.drain = partial(drain, backend.drain)  # type: ignore[method-assign]
            lifecycle.exits.callback(left.set)
            return
        assert waits.wait(30)
        if called == "dismissed":
            Observer(lifecycle.task.coordinator, JOB, SECRET).scale(workers=1)
        else:
            number = "SIGINT" if called == "interrupted" else "SIGTERM"
            sessions[waiter].worker.lifecycle.interrupt(number)
        while True:  # a step at least, however soon the other is gone
            session.step(batch)
            assert session.global_step < 10_000
            if session.should_stop() or left.is_set():
                break
            pause.wait(0.001)

    def drain(then: Callable[[], int]) -> int:
        waits.set()
        return then()

    sessions: dict[int, Session] = {}
    cluster = Cluster(2, 1, "async", scheme="tcp", run_dir=tmp_path, policy={"elastic": True})
    ran = run_job(cluster, lambda worker: sessions.setdefault(worker, session(worker)), program)
    ended = {worker: repr(error) for worker, error in ran.raised.items()}
    ends = {
        "interrupted": {0: "SystemExit(130)", 1: "SystemExit(130)"},
        "leaves": {0: "SystemExit(143)"},
        "dismissed": {},
    }
    assert ended == ends[called]
    checkpoint = latest(tmp_path, lambda path, error: None)
    assert checkpoint is not None
    assert checkpoint.step == sessions[1 - waiter].worker.global_step > 2
    assert sessions[waiter].worker.lifecycle.state == (
        "finished" if called == "dismissed" else "interrupted"
    )


def test_a_chief_that_is_interrupted_twice_while_it_waits_leaves_the_others_to_train(
    tmp_path: Path,
) -> None:
    """The second interrupt ends the chief, and not the job."""
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))
    interrupted = Event()

    def program(session: Session) -> None:
        lifecycle, backend = session.worker.lifecycle, session.worker.backend
        session.step(batch)
        if lifecycle.task.index == 0:
            backend.drain = interrupt  # type: ignore[method-assign]
            lifecycle.exits.callback(interrupted.set)
            return
        assert interrupted.wait(30)
        for _ in range(STEPS):
            session.step(batch)

    def interrupt() -> int:
        raise KeyboardInterrupt  # as the handler of a second signal

    ran = run_job(Cluster(2, 1, "async", run_dir=tmp_path), session, program)
    assert {worker: repr(error) for worker, error in ran.raised.items()} == {
        0: "KeyboardInterrupt()"
    }
    assert ran.over is not None and ran.over.outcome == "interrupted"
    checkpoint = latest(tmp_path, lambda path, error: None)
    assert checkpoint is not None and checkpoint.step == 2 + STEPS


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("strategy", ["async", "averaging"])
def test_what_others_learn_is_saved_when_it_is_due_while_the_chief_waits_for_them(
    tmp_path: Path, lost: bool, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chief that waits saves periodic checkpoints.

    Where the chief is lost, another worker that waits takes over.
    """
    monkeypatch.setattr(shard, "NOTICE_SECONDS", 0.02)
    monkeypatch.setattr(lifecycle, "_WAIT_SHOWN", 0.0)
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))
    waiting, shown = [Event(), Event()], list[tuple[str, ...]]()

    def session(worker: int) -> Session:
        model = nn.Linear(8, 2)
        return Session(
            model,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(model.parameters(), lr=0.01),
            checkpoint=Checkpoint(every_steps=4, every_seconds=None),
        )

    def program(session: Session) -> None:
        backend, index = session.worker.backend, session.worker.lifecycle.task.index
        session.step(batch)
        if index < 2:
            backend.drain = partial(drain, backend.drain, index, session)  # type: ignore[method-assign]
            if index == lost:  # who is chief
                session.worker.progress.waiting_for_update = show  # type: ignore[method-assign]
            return
        assert all(each.wait(30) for each in waiting)
        deadline = time.monotonic() + 30
        for step in range(STEPS):
            session.step(batch)
            reached = session.global_step
            while step == STEPS - 1 and newest() <= reached - 4:
                assert time.monotonic() < deadline, f"step {reached}, and saved is {newest()}"
                time.sleep(0.01)

    def drain(then: Callable[[], int], index: int, session: Session) -> int:
        waiting[index].set()
        if lost and not index:
            assert waiting[1].wait(30)
            member = session.worker.lifecycle.member
            assert member is not None
            member.close()
            raise Killed
        return then()

    def show(reason: str, names: Sequence[str], seconds: float) -> None:
        shown.append(tuple(names))

    def newest() -> int:
        checkpoint = latest(tmp_path, lambda path, error: None)
        return -1 if checkpoint is None else checkpoint.step

    more = {"averaging": {"every": 3, "staleness": 2}}.get(strategy, {})
    policy = {"reconnect_grace": 0.1, "wait_for_restart": 0.0}
    cluster = Cluster(3, 1, strategy, run_dir=tmp_path, policy=policy, **more)
    ran = run_job(cluster, session, program)
    assert [repr(error) for error in ran.raised.values()] == ["Killed()"] * lost
    assert newest() == 3 + STEPS
    assert ("worker:2",) in shown


LOOPS = (3, 11, 29)


@pytest.mark.thorough
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "async"},
        {"strategy": "async", "prefetch": True},
        {"strategy": "ssp", "staleness": 1},
        {"strategy": "sync"},
        {"strategy": "sync", "aggregate": 2},
        {"strategy": "averaging", "every": 3},
        {"strategy": "averaging", "every": 3, "staleness": 2},
        {"strategy": "diloco", "every": 3, "aggregate": 2},
    ],
    ids=str,
)
def test_loops_of_different_lengths_are_all_saved(
    tmp_path: Path, options: dict[str, Any], servers: int
) -> None:
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))

    def program(session: Session) -> Session:
        for _ in range(LOOPS[session.worker.lifecycle.task.index]):
            session.step(batch)
        return session

    ran = run_job(Cluster(3, servers, run_dir=tmp_path, **options), session, program)
    checkpoint = latest(tmp_path, lambda path, error: None)
    assert checkpoint is not None
    assert [checkpoint.step] * 3 == [session.worker.global_step for session in ran.values]
    by_themselves = options["strategy"] in ("async", "ssp") or options.get("staleness")
    made = sum(LOOPS) if by_themselves else max(LOOPS)
    # Where two workers make a round, the third one's updates may be stale, and rounds are more.
    assert checkpoint.step >= made if options.get("aggregate") else checkpoint.step == made


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("max_steps", [None, STEPS])
def test_the_last_step_is_saved_where_the_chief_is_lost_while_it_saves(
    tmp_path: Path, max_steps: int | None, servers: int
) -> None:
    """All have made their last update then: one of those that wait for the chief takes over."""
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))

    def session(worker: int) -> Session:
        model = nn.Linear(8, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return Session(model, nn.CrossEntropyLoss(), optimizer, max_steps=max_steps)

    def program(session: Session) -> Session:
        if session.is_chief:
            before_the_last_save(session, partial(die, session))
        for _ in range(STEPS):
            if session.should_stop():
                break
            session.step(batch)
        return session

    def die(session: Session, *copy: object) -> None:
        member = session.worker.lifecycle.member
        assert member is not None
        member.close()
        raise Killed

    policy = {"reconnect_grace": 0.1, "wait_for_restart": 0.0}
    ran = run_job(Cluster(3, servers, "async", run_dir=tmp_path, policy=policy), session, program)
    assert [repr(error) for error in ran.raised.values()] == ["Killed()"]
    assert ran.over is not None and ran.over.outcome == "finished"
    checkpoint = latest(tmp_path, lambda path, error: None)
    assert checkpoint is not None
    assert checkpoint.step == ran.returned[1].worker.global_step == (max_steps or 3 * STEPS)
    assert {worker: each.is_chief for worker, each in ran.returned.items()} == {1: True, 2: False}


@pytest.mark.parametrize("early", [False, True])
def test_a_checkpoint_that_cannot_be_written_fails_the_job_on_all_workers(
    tmp_path: Path, early: bool
) -> None:
    """Also on a worker that hears of it before it waits for the chief."""
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))
    waits = Event()

    def program(session: Session) -> None:
        lifecycle, backend = session.worker.lifecycle, session.worker.backend
        if session.is_chief:
            before_the_last_save(session, fail)
        elif early:
            backend.drain = partial(drain, backend.drain, lifecycle.member)  # type: ignore[method-assign]
        else:
            lifecycle.wait_for_chief = partial(wait, lifecycle.wait_for_chief)  # type: ignore[method-assign]
        session.step(batch)

    def fail(*copy: object) -> None:
        assert early or waits.wait(30)
        raise CheckpointError("the disk is full")

    def drain(then: Callable[[], int], member: Member) -> int:
        step = then()
        assert member.wait_until(lambda: bool(member.over), time.monotonic() + 30)
        return step

    def wait(then: Callable[[], bool]) -> bool:
        waits.set()
        return then()

    ran = run_job(Cluster(2, 1, "async", run_dir=tmp_path), session, program)
    assert str(ran.raised[0]) == "the disk is full"
    assert "failed: worker:0" in str(ran.raised[1]) and "the disk is full" in str(ran.raised[1])


def before_the_last_save(session: Session, do: Callable[[], object]) -> None:
    """Has a chief call a function before it saves the last step."""
    storage = session.worker.storage
    save = storage.submit

    def then_save(*copy: Any, last: bool = False) -> None:
        if last:
            do()
        save(*copy, last=last)

    storage.submit = then_save  # type: ignore[method-assign]


def test_who_loses_the_directory_and_hears_no_reason_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is another job's now, or the news of another chief does not come."""
    monkeypatch.setattr(lifecycle, "_REJOIN_SECONDS", 0.1)
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))

    def program(session: Session) -> None:
        if session.is_chief:
            before_the_last_save(session, lose)
        session.step(batch)

    def lose(*copy: object) -> None:
        raise CheckpointLockLost("worker:7 has it")

    ran = run_job(Cluster(2, 1, "async", run_dir=tmp_path), session, program)
    assert str(ran.raised[0]) == "worker:7 has it"
    assert isinstance(ran.raised[1], JobFailed)


def test_nobody_waits_for_long_for_a_coordinator_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chief has saved, and cannot tell the others."""
    monkeypatch.setattr(lifecycle, "_REJOIN_SECONDS", 0.2)
    monkeypatch.setattr(lifecycle, "_WAIT_SHOWN", 0.05)
    away = property(lambda member: 0.0, lambda member, since: None)
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))
    ended, shown = Event(), list[str]()

    def program(session: Session) -> None:
        if session.is_chief:
            before_the_last_save(session, wait)
        else:  # the server has joined by now
            monkeypatch.setattr(Member, "away_since", away, raising=False)
            session.worker.progress.warn = shown.append  # type: ignore[method-assign]
            session.worker.lifecycle.exits.callback(ended.set)
        session.step(batch)

    def wait() -> None:
        assert ended.wait(30), "the other worker has not ended"

    ran = run_job(Cluster(2, 1, "async", run_dir=tmp_path), session, program)
    assert not ran.raised
    assert any("does not know whether worker:0 has saved the last step" in text for text in shown)


@pytest.mark.parametrize("status", [3, "no data"])
def test_a_program_that_ends_with_a_status_of_its_own_fails_its_job(
    tmp_path: Path, status: object
) -> None:
    batch = torch.randn(5, 8), torch.randint(0, 2, (5,))

    def program(session: Session) -> None:
        session.step(batch)
        if session.is_chief:
            raise SystemExit(status)
        while not session.should_stop():
            session.step(batch)

    ran = run_job(Cluster(2, 1, "async", run_dir=tmp_path), session, program)
    assert ran.over is not None and ran.over.outcome == "failed"
    assert f"SystemExit: {status}" in ran.over.reason
