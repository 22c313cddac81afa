"""Saves in an object store that are cut off, delayed, or doubted, at every request."""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec
import pytest
import torch

from tests.remote.bucket import Bucket, Killed, View, dies_at
from tests.session.checkpoint.samples import assert_same, sample
from trireme.errors import CheckpointError, CheckpointLockLost, ConfigurationError
from trireme.remote.lock import SILENT_SECONDS, RemoteLock
from trireme.remote.place import RemotePlace
from trireme.session.checkpoint import CheckpointData, latest, list_checkpoints, save
from trireme.session.checkpoint import format as checkpoint_format
from trireme.session.checkpoint.run_lock import Writer, writer_here

STEP = 3


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = Bucket()
    monkeypatch.setattr(
        checkpoint_format,
        "place_of_checkpoint",
        lambda path: (RemotePlace(bucket.store()), path),
    )
    return bucket


def writer(epoch: str, *, view: int = 0, host: str | None = None) -> Writer:
    found = writer_here("worker:0", "job", epoch=epoch, view=view)
    return msgspec.structs.replace(found, host=host or socket.gethostname())


def claim(place: RemotePlace, writer: Writer) -> RemoteLock:
    """Claims without the probe of `first`."""
    place._lock = RemoteLock.claim(place._store, writer)
    return place._lock


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
    save(place, old())
    lock.release()


def count_requests(bucket: Bucket) -> tuple[int, int]:
    """The number of requests that a claim makes, and that a claim and a save make."""
    place = RemotePlace(bucket.store())
    view: View = place._store.file_system
    lock = claim(place, writer("count"))
    claimed = view.requests
    save(place, new())
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
        claim(place, writer("killed", host="elsewhere"))
        with pytest.raises(Killed):
            save(place, new())
        found = read(bucket)
        assert_same(found, old() if found.state["is"] == "old" else new())
        seen.add(found.state["is"])
        clock = Clock()
        successor = RemotePlace(bucket.store())
        successor._lock = RemoteLock.claim(
            successor._store, writer("next"), clock=clock, sleep=clock.sleep
        )
        save(successor, sample(9))
        successor._lock.release()
        folders = {key.split("/")[1] for key in bucket.keys if key.startswith("checkpoints/")}
        assert len(folders) == len(list_checkpoints(successor)) == 2, "the garbage is gone"
    assert seen == {"old", "new"}


def test_a_writer_that_is_overtaken_at_any_request_does_not_publish(bucket: Bucket) -> None:
    overtaken = 0
    for number in requests_of_a_save():
        bucket.objects.clear()
        begin(bucket)
        takes: list[RemotePlace] = []

        def overtake(request: int, number: int = number, takes: list[RemotePlace] = takes) -> None:
            if request == number:
                takes.append(RemotePlace(bucket.store()))
                claim(takes[0], writer("same", view=2))
                save(takes[0], sample(9))

        place = RemotePlace(bucket.store(before=overtake))
        lock = claim(place, writer("same", view=1))
        try:
            save(place, new())
        except (CheckpointLockLost, CheckpointError):
            overtaken += 1
            assert_same(read(bucket), sample(9))
            names = [each.name[-1] for each in list_checkpoints(takes[0])]
            assert names == [str(STEP), "9"]
        else:  # it had published before
            assert [each.name[-1] for each in list_checkpoints(takes[0])] == [str(STEP), "9"]
        for each in (lock, takes[0]._lock):
            assert each is not None
            each.release()
    assert overtaken > 5


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
            save(place, new())
        except CheckpointError as error:
            assert "connection reset by peer" in str(error)
            found = read(bucket)
            assert_same(found, old() if found.state["is"] == "old" else new())
        save(place, sample(5))
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
        save(place, sample(number))
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
    store = bucket.store()
    first = RemoteLock.claim(store, writer("a", host="elsewhere"))
    clock = Clock()
    second = RemoteLock.claim(bucket.store(), writer("b"), clock=clock, sleep=clock.sleep)
    assert clock.time >= SILENT_SECONDS
    assert second.held
    with pytest.raises(CheckpointLockLost, match=r"worker:0 \(process .*\) does"):
        first.commit({})
    assert not first.held
    second.release()


def test_a_writer_of_another_host_that_lives_refuses_another_job(bucket: Bucket) -> None:
    first = RemoteLock.claim(bucket.store(), writer("a", host="elsewhere"))
    clock = Clock(first._beat)
    with pytest.raises(ConfigurationError, match="on elsewhere"):
        RemoteLock.claim(bucket.store(), writer("b"), clock=clock, sleep=clock.sleep)
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
