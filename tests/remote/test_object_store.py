"""What an object store answers, or does not, in the words of the user."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.remote.bucket import URL, Bucket, View
from trireme.errors import CheckpointError, ConfigurationError, TriremeError
from trireme.location import StoreError
from trireme.remote.object_store import ObjectStore
from trireme.remote.place import RemotePlace


def test_a_store_that_never_answers_is_waited_for_once() -> None:
    released = threading.Event()

    def never(_: int) -> None:
        released.wait(60)

    view = View(Bucket(), before=never)
    try:
        with pytest.raises(StoreError, match=r"run did not answer within 0\.05 s"):
            ObjectStore(URL, view, probe_seconds=0.05).check_writable()
    finally:
        released.set()


class ClientError(Exception):
    """As botocore's."""

    def __init__(self, code: str, message: str, status: int) -> None:
        super().__init__("an error occurred")
        self.response = {
            "Error": {"Code": code, "Message": message},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


def fails_with(error: Callable[[], BaseException]) -> ObjectStore:
    """A store of which each request raises an error that s3fs has made of the server's."""

    def before(_: int) -> None:
        try:
            raise error()
        except ClientError as cause:
            raise OSError(16, "m") from cause

    return ObjectStore(URL, View(Bucket(), before=before))


def test_the_reason_of_a_server_is_told() -> None:
    busy = fails_with(lambda: ClientError("SlowDown", "Please reduce your request rate.", 503))
    with pytest.raises(StoreError, match=r"HTTP status 503: SlowDown: Please reduce") as told:
        busy.put("a", b"")
    assert not told.value.denied


def test_what_the_store_denies_it_denies_again() -> None:
    with pytest.raises(StoreError, match="Check the credentials") as told:
        fails_with(lambda: PermissionError("Access Denied")).put("a", b"")
    assert told.value.denied


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ClientError("SlowDown", "Please wait.", 503), CheckpointError, "try again later"),
        (PermissionError("Access Denied"), ConfigurationError, "choose another"),
    ],
)
def test_a_job_says_whether_to_try_again(
    error: Exception,
    kind: type[TriremeError],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.session.checkpoint.test_storage import session

    place = RemotePlace(fails_with(lambda: error))
    monkeypatch.setattr("trireme.session.checkpoint.storage.place_of", lambda _: place)
    with pytest.raises(kind, match=words), session(tmp_path):
        pass


class HttpError(Exception):
    """As gcsfs's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class HttpResponseError(Exception):
    """As azure.core's."""

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code


@pytest.mark.parametrize(
    "error",
    [
        HttpError(401, "Anonymous caller does not have storage.objects.create access"),
        OSError("Forbidden: https://storage.googleapis.com/b/o\nbob does not have access"),
        HttpResponseError(403, "AuthorizationFailure\nRequestId:1\nTime:2"),
    ],
)
def test_refusals_of_google_and_azure_are_told_in_one_line(error: Exception) -> None:
    with pytest.raises(StoreError, match="Check the credentials") as told:
        fails_with(lambda: error).check_writable()
    assert told.value.denied
    assert "\n" not in str(told.value)


def test_a_container_that_is_not_there_is_told() -> None:
    missing = HttpResponseError(404, "ContainerNotFound\nRequestId:1")
    with pytest.raises(FileNotFoundError, match="its bucket is not"):
        fails_with(lambda: missing).check_writable()


def test_a_store_that_fails_is_asked_once_by_the_check() -> None:
    def fail(number: int) -> None:
        assert number == 1, "each request may take as long as the library tries again"
        raise TimeoutError("name or service not known")

    with pytest.raises(StoreError, match="name or service not known"):
        ObjectStore(URL, View(Bucket(), before=fail)).check_writable()
