"""Saves in an object store that are cut off, delayed, or doubted, at every request."""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec
import pytest
import torch

from tests.remote.bucket import Bucket, Killed, View, dies_at
from tests.session.checkpoint.samples import assert_same, sample
from trireme.errors import CheckpointError, ConfigurationError
from trireme.remote.claims import SILENT_SECONDS, RemoteLock
from trireme.remote.place import RemotePlace
from trireme.session.checkpoint import CheckpointData, latest, list_checkpoints, save, verify
from trireme.session.checkpoint import format as checkpoint_format
from trireme.session.checkpoint.run_lock import RunLock, Writer, writer_here

STEP = 3


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setattr("trireme.remote.claims.BEAT_SECONDS", 3600.0)  # a dead process beats not
    bucket = Bucket()
    monkeypatch.setattr(
        checkpoint_format, "place_of_checkpoint", lambda path: (RemotePlace(bucket.store()), path)
    )
    return bucket


def writer(epoch: str, *, view: int = 0, host: str | None = None) -> Writer:
    found = writer_here("worker:0", "job", epoch=epoch, view=view)
    return msgspec.structs.replace(found, host=host or socket.gethostname())


def claim(place: RemotePlace, writer: Writer) -> RunLock:
    """Claims without the probe of `first`."""
    return place.lock.claim(writer)


def old() -> CheckpointData:
    return CheckpointData(STEP, {"a": torch.arange(4.0), "b": torch.ones(2)}, state={"is": "old"})


def new() -> CheckpointData:
    return CheckpointData(STEP, {"a": torch.arange(9.0)}, state={"is": "new"})


def read(bucket: Bucket) -> CheckpointData:
    def fail(path: object, error: CheckpointError) -> None:
        raise error

    found = latest(RemotePlace(bucket.store()), fail)
    assert found is not None
    return found


def begin(bucket: Bucket) -> None:
    """Saves the old checkpoint, by a job that ends."""
    place = RemotePlace(bucket.store())
    lock = place.claim(writer("before"))
    save(place, old(), writer=lock.number)
    lock.release()


def count_requests(bucket: Bucket) -> tuple[int, int]:
    """The number of requests that a claim makes, and that a claim and a save make."""
    place = RemotePlace(bucket.store())
    view: View = place._store.file_system
    lock = claim(place, writer("count"))
    claimed = view.requests
    save(place, new(), writer=lock.number)
    saved = view.requests
    lock.release()
    return claimed, saved


def requests_of_a_save() -> range:
    bucket = Bucket()
    begin(bucket)
    claimed, saved = count_requests(bucket)
    return range(claimed + 1, saved + 1)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_any_request_leaves_the_old_checkpoint_or_the_new(
    bucket: Bucket, after: bool
) -> None:
    seen = set()
    for number in requests_of_a_save():
        bucket.objects.clear()
        begin(bucket)
        place = RemotePlace(bucket.store(**dies_at(number, after=after)))
        killed = claim(place, writer("killed", host="elsewhere"))
        with pytest.raises(Killed):
            save(place, new(), writer=killed.number)
        found = read(bucket)
        assert_same(found, old() if found.state["is"] == "old" else new())
        seen.add(found.state["is"])
        clock = Clock()
        successor = RemotePlace(bucket.store())
        successor.lock = RemoteLock(bucket.store(), clock, clock.sleep)
        lock = successor.lock.claim(writer("next"))
        save(successor, sample(9), writer=lock.number)
        lock.release()
        folders = {key.split("/")[1] for key in bucket.keys if key.startswith("checkpoints/")}
        assert len(folders) == len(list_checkpoints(successor)), "the garbage is gone"
    assert seen == {"old", "new"}


def test_a_writer_that_is_overtaken_at_any_request_saves_an_older_checkpoint(
    bucket: Bucket,
) -> None:
    outcomes = set()
    for number in requests_of_a_save():
        bucket.objects.clear()
        begin(bucket)
        takes: list[RunLock] = []

        def overtake(request: int, number: int = number, takes: list[RunLock] = takes) -> None:
            if request == number:
                place = RemotePlace(bucket.store())
                takes.append(claim(place, writer("same", view=2)))
                save(place, sample(2), writer=takes[0].number)

        place = RemotePlace(bucket.store(before=overtake))
        lock = claim(place, writer("same", view=1))
        try:
            save(place, new(), writer=lock.number)
            outcomes.add("published")
        except CheckpointError:  # what it had written was deleted
            outcomes.add("failed")
        assert_same(read(bucket), sample(2))
        for path in list_checkpoints(place):
            verify(path)
        for each in (lock, takes[0]):
            each.release()
    assert outcomes == {"published", "failed"}


def test_an_answer_that_is_lost_is_told_as_a_failure_and_the_next_save_succeeds(
    bucket: Bucket,
) -> None:
    for number in requests_of_a_save():
        bucket.objects.clear()
        begin(bucket)

        def lose(request: int, number: int = number) -> None:
            if request == number:
                raise ConnectionResetError("connection reset by peer")

        place = RemotePlace(bucket.store(after=lose))
        lock = claim(place, writer("a"))
        try:
            save(place, new(), writer=lock.number)
        except CheckpointError as error:
            assert "connection reset by peer" in str(error)
            found = read(bucket)
            assert_same(found, old() if found.state["is"] == "old" else new())
        save(place, sample(5), writer=lock.number)
        assert_same(read(bucket), sample(5))
        assert lock.held
        lock.release()


def test_a_claim_whose_answer_is_lost_is_made_again(bucket: Bucket) -> None:
    begin(bucket)
    place = RemotePlace(bucket.store())
    claimed, _ = count_requests(bucket)
    for number in range(1, claimed + 1):

        def lose(request: int, number: int = number) -> None:
            if request == number:
                raise ConnectionResetError("connection reset by peer")

        place = RemotePlace(bucket.store(after=lose))
        mine = writer(f"job {number}")
        try:
            lock = claim(place, mine)
        except OSError:
            lock = claim(place, mine)
        assert lock.held
        save(place, sample(number), writer=lock.number)
        lock.release()


class Clock:
    """A clock that only `sleep` moves."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.time = 0.0
        self._then = then

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self._then()


def test_a_writer_of_another_host_is_replaced_when_it_has_been_silent(bucket: Bucket) -> None:
    first = RemoteLock(bucket.store()).claim(writer("a", host="elsewhere"))
    clock = Clock()
    second = RemoteLock(bucket.store(), clock, clock.sleep).claim(writer("b"))
    assert clock.time >= SILENT_SECONDS
    assert second.held and second.number == first.number + 1
    first.release()
    assert second.held
    second.release()


def test_a_writer_learns_that_it_was_replaced(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme.remote.claims.BEAT_SECONDS", 0.01)
    claims = RemoteLock(bucket.store())
    first = claims.claim(writer("a", view=1))
    assert first.held
    second = RemoteLock(bucket.store()).claim(writer("a", view=2))
    assert claims._life is not None
    claims._life._thread.join(20)
    assert second.held and not first.held
    second.release()


def test_a_writer_of_another_host_that_lives_refuses_another_job(bucket: Bucket) -> None:
    claims = RemoteLock(bucket.store())
    first = claims.claim(writer("a", host="elsewhere"))
    assert claims._life is not None
    clock = Clock(claims._life.beat)
    with pytest.raises(ConfigurationError, match="on elsewhere"):
        RemoteLock(bucket.store(), clock, clock.sleep).claim(writer("b"))
    assert clock.time < SILENT_SECONDS
    first.release()


def test_a_store_without_conditional_puts_is_refused(bucket: Bucket) -> None:
    store = bucket.store()
    store.file_system.conditional = False
    with pytest.raises(ConfigurationError, match="ignores the condition"):
        RemotePlace(store).claim(writer("a"))


def test_a_store_that_does_not_answer_is_no_damaged_checkpoint(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(bucket)

    def fail(number: int) -> None:
        if number > 1:
            raise TimeoutError("no answer")

    passed: list[object] = []
    place = RemotePlace(bucket.store(before=fail))
    monkeypatch.setattr(checkpoint_format, "place_of_checkpoint", lambda path: (place, path))
    with pytest.raises((ConfigurationError, CheckpointError), match="no answer"):
        latest(place, lambda path, error: passed.append(path))
    assert passed == []


def test_a_checkpoint_of_an_earlier_version_is_read_and_is_older(bucket: Bucket) -> None:
    """Its folder had a random number, which an entry of a ledger named."""
    place = RemotePlace(bucket.store())
    path = save(place, sample(5), writer=1)
    for key in list(bucket.objects):
        named = key.replace(path.name, "step-000000005-1f2e3d4c")
        bucket.objects[named] = bucket.objects.pop(key)
    assert_same(read(bucket), sample(5))
    save(place, sample(4), writer=1)
    assert_same(read(bucket), sample(4))
