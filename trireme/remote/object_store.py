"""The objects below one URL of an object store: reads, writes, lists and deletes them, by fsspec.

The one operation that a file system does not have is `create`, a conditional put
(`If-None-Match: *`): of several processes that create an object of the same key, one succeeds.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trireme.errors import ConfigurationError
from trireme.location import RemotePath, StoreError

CONNECT_SECONDS = 10  # the longest that a connection to an S3 server may take to open

READ_SECONDS = 30
"""The longest that an S3 server may be silent. A request is tried again a few times."""

PROBE_SECONDS = 60.0  # the longest that the check of a run directory may take, with all attempts

_DENIED = (401, 403)
_NOT_FOUND = 404
_MOST_SAID = 500
_S3 = ("s3", "s3a")
_T = TypeVar("_T")


class ObjectStore:
    """The objects below a URL. Any thread may use it. Keys are relative to the URL.

    Every method raises `StoreError` where the store refuses or does not answer, after a few
    attempts with deadlines.
    """

    def __init__(
        self, root: RemotePath, file_system: Any = None, *, probe_seconds: float = PROBE_SECONDS
    ) -> None:
        self.root = root
        self.probe_seconds = probe_seconds
        self.file_system = _file_system(root) if file_system is None else file_system
        self._base = self.file_system._strip_protocol(str(root)).rstrip("/")

    def path(self, key: str) -> str:
        """Returns the name of an object as the file system knows it."""
        return f"{self._base}/{key}"

    def attempt(self, what: str, key: str, action: Callable[[], _T]) -> _T:
        """Calls `action`; translates what the file system raises."""
        try:
            return action()
        except FileExistsError:
            raise
        except Exception as error:  # the libraries of file systems raise their own
            if isinstance(error, FileNotFoundError) or _status(error) == _NOT_FOUND:
                raise FileNotFoundError(
                    f"{self.root / key} cannot be {what}: it is not there, or its bucket is not"
                ) from error
            refused = StoreError(f"{self.root / key} cannot be {what}: {_why(error)}")
            refused.denied = _denied(error)
            raise refused from error

    def create(self, key: str, content: bytes) -> bool:
        """Writes an object that is not there yet; returns False where there is one already."""
        try:
            self.attempt(
                "created",
                key,
                lambda: self.file_system.pipe_file(self.path(key), content, mode="create"),
            )
        except (FileExistsError, StoreError) as error:
            # Some servers name the failed condition in words of their own, and an answer that was
            # lost and requested again finds the object of the first request.
            try:
                return self.read(key) == content
            except OSError:
                raise error from None
        return True

    def put(self, key: str, content: bytes) -> None:
        self.attempt("written", key, lambda: self.file_system.pipe_file(self.path(key), content))

    def upload(self, key: str, file: Path) -> None:
        """Writes an object with the content of a file, and replaces one that is there.

        S3 receives the parts of a large one over several connections.
        """
        put = self.file_system.put_file
        self.attempt("written", key, lambda: put(str(file), self.path(key)))

    def read(self, key: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Returns the content of an object, or its bytes [start, stop)."""
        read = self.file_system.cat_file
        return bytes(self.attempt("read", key, lambda: read(self.path(key), start=start, end=stop)))

    def list(self, prefix: str) -> dict[str, int]:
        """Returns the size of each object below a directory, by key."""
        self.file_system.invalidate_cache()
        find, found = self.file_system.find, dict[str, dict[str, Any]]()
        with suppress(FileNotFoundError):
            found = self.attempt("listed", prefix, lambda: find(self.path(prefix), detail=True))
        keys = {name.removeprefix(self._base).lstrip("/"): each for name, each in found.items()}
        return {key: int(each["size"]) for key, each in keys.items()}

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes objects; those that are gone already are no error."""
        for key in keys:
            with suppress(FileNotFoundError):
                self.attempt("deleted", key, partial(self.file_system.rm_file, self.path(key)))

    def check_writable(self) -> None:
        """Checks that objects can be written here, and that `create` is conditional."""
        # The deadlines of a file system's requests, attempts and connections multiply.
        checked: Future[None] = Future()

        def check() -> None:
            try:
                self._check_writable()
            except BaseException as error:
                checked.set_exception(error)
            else:
                checked.set_result(None)

        threading.Thread(target=check, name="store-check", daemon=True).start()
        try:
            checked.result(self.probe_seconds)
        except TimeoutError as error:
            if checked.done():
                raise
            raise StoreError(
                f"{self.root} did not answer within {self.probe_seconds:g} s: is the endpoint the "
                "right one, and does the server behind it live?"
            ) from error

    def _check_writable(self) -> None:
        key = f".probe-{secrets.token_hex(8)}"
        # A plain request first: where the store does not answer, each takes its library's attempts.
        self.put(key, b"first")
        try:
            overwritten = self.create(key, b"second")
            refused = not self.create(f"{key}-new", b"third")
        finally:
            with suppress(OSError):
                self.delete([key, f"{key}-new"])
        if refused or overwritten:
            raise ConfigurationError(
                f"{self.root} ignores the condition of a conditional put (If-None-Match: *), so "
                "that two jobs that write there could not be told apart: use a server that knows "
                "it, as Amazon S3, MinIO, Google Cloud Storage and Azure do"
            )


def _file_system(root: RemotePath) -> Any:
    try:
        import fsspec

        options = _S3_OPTIONS if root.scheme in _S3 else {}
        file_system, _ = fsspec.url_to_fs(str(root), use_listings_cache=False, **options)
    except Exception as error:  # such as no credentials, where a file system looks at once
        raise ConfigurationError(
            f"the run directory {root} cannot be opened: {_why(error)}"
        ) from error
    if root.scheme in _S3:
        file_system.retries = 2  # times the attempts below; its own 5 take minutes
    return file_system


_S3_OPTIONS: Mapping[str, Any] = {
    "max_concurrency": 4,  # parts of 50 MiB that are in memory, and under way, at a time
    "config_kwargs": {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "retries": {"mode": "standard", "total_max_attempts": 3},
        "max_pool_connections": 32,
    },
}


def _why(error: Exception) -> str:
    # The answers of some servers have several lines, of which a report shows the first.
    said = " ".join((_answer(error) or str(error) or type(error).__name__).split())[:_MOST_SAID]
    if not _denied(error):
        return said
    return (
        f"the store denies it ({said}). Check the credentials, which are those of other tools of "
        "this store, and that they may read, list, write and delete there (docs/file_systems.md)"
    )


def _denied(error: Exception) -> bool:
    return (
        type(error).__name__.endswith("CredentialsError")
        or isinstance(error, PermissionError)
        or _status(error) in _DENIED
        or str(error).startswith("Forbidden: ")  # as gcsfs says it
    )


def _status(error: Exception) -> int:
    for name in ("status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int | str) and str(status).isdigit():
            return int(status)
    return 0


def _answer(error: Exception) -> str:
    """Returns the code and the message of an S3 server's refusal; "" for other errors.

    s3fs raises an `OSError` in its place, which may have the message's first letter only.
    """
    for each in (error, error.__cause__, error.__context__):
        response = getattr(each, "response", None)
        if isinstance(response, Mapping) and isinstance(response.get("Error"), Mapping):
            refusal = response["Error"]
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", "")
            words = [str(refusal.get(key, "")) for key in ("Code", "Message")]
            return ": ".join(dict.fromkeys(filter(None, [f"HTTP status {status}", *words])))
    return ""
