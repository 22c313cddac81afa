"""Uploads of large objects while their content is produced, in parts, several at once.

S3 takes the parts of an object over parallel connections. Other file systems take one after the
other. No more than a few parts are in memory at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

from trireme.remote.object_store import ObjectStore

PART_BYTES = 16 << 20
"""The size of a part; S3 takes 10,000 of them, so that an object may have 160 GB."""

_CONNECTIONS = 6
_PENDING = 8  # parts in memory that are not uploaded yet

_Chunk = bytes | memoryview


class Uploaded(NamedTuple):
    """The size of an object in bytes, and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


class Uploads:
    """Uploads objects; as a context, gives up those that are not complete when the block fails.

    Args:
        store: where.
        part_bytes: the size of a part.
    """

    def __init__(self, store: ObjectStore, part_bytes: int = PART_BYTES) -> None:
        self._store = store
        self._part_bytes = part_bytes
        self._threads = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="trireme-upload")
        self._pending: list[Future[Any]] = []
        self._open: list[_Multipart] = []

    def __enter__(self) -> Uploads:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for each in self._open:
            each.abort()

    def upload(self, key: str, chunks: Iterable[_Chunk]) -> Uploaded:
        """Reads all chunks and uploads them; returns before the last parts have arrived.

        Args:
            key: of the object.
            chunks: its content. The memory of a chunk may change when the next one is requested.

        Raises:
            OSError: the store has refused this object or one before it.
        """
        digest, total = hashlib.sha256(), 0
        parts = _parts(chunks, self._part_bytes)
        first = next(parts, b"")
        second = next(parts, None)
        if second is None:
            self._submit(self._store.put, key, first)
            return Uploaded(len(first), hashlib.sha256(first).hexdigest())
        target = self._multipart(key)
        for number, part in enumerate(_again(first, second, parts), start=1):
            target.send(self, number, part)
            digest.update(part)
            total += len(part)
        target.complete(self)
        return Uploaded(total, digest.hexdigest())

    def finish(self) -> None:
        """Waits until all objects are complete.

        Raises:
            OSError: one is not.
        """
        self._settle(0)
        for each in self._open:
            each.finish()
        self._open.clear()

    def _multipart(self, key: str) -> _Multipart:
        kind = _S3Object if hasattr(self._store.file_system, "call_s3") else _FileObject
        target = kind(self._store, key)
        self._open.append(target)
        return target

    def _submit(self, action: Any, *arguments: Any) -> Future[Any]:
        self._settle(_PENDING - 1)
        future = self._threads.submit(action, *arguments)
        self._pending.append(future)
        return future

    def _settle(self, most: int) -> None:
        """Waits until at most so many requests are under way."""
        while len(self._pending) > most:
            self._pending.pop(0).result()


class _Multipart:
    """An object that is uploaded in parts."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self._store = store
        self._key = key

    def send(self, uploads: Uploads, number: int, part: bytes) -> None:
        raise NotImplementedError

    def complete(self, uploads: Uploads) -> None:
        """All parts were sent."""

    def finish(self) -> None:
        """Makes the object visible, after all requests have succeeded."""

    def abort(self) -> None:
        """Gives up the object."""


class _FileObject(_Multipart):
    """An object written as a file, by the file system's own buffer."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        super().__init__(store, key)
        open_file = store.file_system.open
        self._file = store.attempt(
            "written", key, lambda: open_file(store.path(key), "wb", block_size=PART_BYTES)
        )

    def send(self, uploads: Uploads, number: int, part: bytes) -> None:
        self._store.attempt("written", self._key, lambda: self._file.write(part))

    def complete(self, uploads: Uploads) -> None:
        self._store.attempt("written", self._key, self._file.close)

    def abort(self) -> None:
        if not self._file.closed:
            with suppress(Exception):  # not all file systems can; what stays is swept later
                self._file.discard()
            self._file.closed = True  # else it is completed when it is collected


class _S3Object(_Multipart):
    """A multipart upload of S3."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        super().__init__(store, key)
        bucket, name, _ = store.file_system.split_path(store.path(key))
        self._place = {"Bucket": bucket, "Key": name}
        self._tags: dict[int, Future[str]] = {}
        self._id = self._call("create_multipart_upload")["UploadId"]

    def _call(self, method: str, **arguments: Any) -> Any:
        call = self._store.file_system.call_s3
        return self._store.attempt(
            "written", self._key, lambda: call(method, **self._place, **arguments)
        )

    def send(self, uploads: Uploads, number: int, part: bytes) -> None:
        self._tags[number] = uploads._submit(self._send, number, part)

    def _send(self, number: int, part: bytes) -> str:
        answer = self._call("upload_part", UploadId=self._id, PartNumber=number, Body=part)
        return str(answer["ETag"])

    def finish(self) -> None:
        parts = [
            {"PartNumber": number, "ETag": future.result()} for number, future in self._tags.items()
        ]
        self._call("complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": parts})

    def abort(self) -> None:
        with suppress(OSError):  # what stays is swept later
            self._call("abort_multipart_upload", UploadId=self._id)


def list_uploads(store: ObjectStore, prefix: str) -> list[dict[str, str]]:
    """Returns the uploads below a directory that are not complete.

    Only S3 keeps such parts, for which it charges; elsewhere there are none.
    """
    call = getattr(store.file_system, "call_s3", None)
    if call is None:
        return []
    bucket, name, _ = store.file_system.split_path(store.path(f"{prefix}/"))
    name = f"{name.rstrip('/')}/"
    listed = store.attempt(
        "listed", prefix, lambda: call("list_multipart_uploads", Bucket=bucket, Prefix=name)
    )
    return [
        {"Bucket": bucket, "Key": each["Key"], "UploadId": each["UploadId"]}
        for each in listed.get("Uploads") or ()
        if each["Key"].startswith(name)
    ]


def abort_uploads(store: ObjectStore, uploads: Iterable[dict[str, str]]) -> None:
    """Gives up uploads that killed processes have left behind, as far as the store lets it."""
    for each in uploads:
        with suppress(OSError):
            _abort(store, each)


def _abort(store: ObjectStore, upload: dict[str, str]) -> None:
    call = store.file_system.call_s3
    store.attempt("deleted", upload["Key"], lambda: call("abort_multipart_upload", **upload))


def _parts(chunks: Iterable[_Chunk], size: int) -> Iterator[bytes]:
    """Yields the content of chunks in parts of one size; the last one may be smaller."""
    rest = bytearray()
    for chunk in chunks:
        view = memoryview(chunk)
        while rest or len(view) < size:
            taken = size - len(rest)
            rest += view[:taken]
            view = view[taken:]
            if len(rest) < size:
                break
            yield bytes(rest)
            rest.clear()
        while len(view) >= size:
            yield bytes(view[:size])
            view = view[size:]
        rest += view
    if rest:
        yield bytes(rest)


def _again(first: bytes, second: bytes, others: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield second
    yield from others
