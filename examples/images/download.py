"""Downloads MNIST and CIFAR-10: resumes broken downloads, verifies checksums, writes atomically."""

from __future__ import annotations

import hashlib
import http
import http.client
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from images import cifar
from images import mnist as mnist_files

from trireme.errors import DataError
from trireme.files import write_atomically

Progress = Callable[[str, int, int], None]
"""Called with the name of a file, the number of bytes received so far, and its size."""

_CHUNK = 1 << 17
_PASSES = 5
_FOLDER = "cifar-10-batches-bin"


@dataclass(frozen=True, slots=True)
class Remote:
    """A file to fetch.

    Attributes:
        name: the name of the file on disk.
        size: the size in bytes.
        sha256: the SHA-256 of the content, in hexadecimal.
        urls: the addresses; each is tried if those before it fail.
    """

    name: str
    size: int
    sha256: str
    urls: tuple[str, ...]


_MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)
_MNIST_CONTENTS = (
    (9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    (28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    (1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    (4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)
MNIST = tuple(
    Remote(f"{name}.gz", size, sha256, tuple(f"{each}/{name}.gz" for each in _MNIST_MIRRORS))
    for name, (size, sha256) in zip(mnist_files.FILES, _MNIST_CONTENTS, strict=True)
)
"""MNIST's four files, as first published."""

CIFAR10 = Remote(
    "cifar-10-binary.tar.gz",
    170052171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
)
"""CIFAR-10's binary version, as published."""


def mnist(
    directory: str | Path, *, progress: Progress | None = None, files: Sequence[Remote] = MNIST
) -> Path:
    """Fetches MNIST's four files into `directory`, for `mnist.load`; returns the directory.

    Raises:
        DataError: as `fetch`.
    """
    for remote in files:
        fetch(remote, directory, progress=progress)
    return Path(directory)


def cifar10(
    directory: str | Path, *, progress: Progress | None = None, archive: Remote = CIFAR10
) -> Path:
    """Fetches CIFAR-10 and unpacks it; returns the folder below `directory` for `cifar.load`.

    Nothing is fetched if all files exist. The archive is deleted after it was unpacked.

    Raises:
        DataError: as `fetch`; or the archive lacks a file.
    """
    folder = Path(directory) / _FOLDER
    names = (*cifar.TRAIN_FILES, *cifar.TEST_FILES)
    if not all((folder / name).is_file() for name in names):
        packed = fetch(archive, directory, progress=progress)
        _unpack(packed, folder, names)
        packed.unlink()
    return folder


def fetch(
    remote: Remote,
    directory: str | Path,
    *,
    progress: Progress | None = None,
    timeout: float = 30.0,
) -> Path:
    """Fetches one file, unless it is there.

    Received bytes are kept in `NAME.part`, from which a later call continues. The file is renamed
    to its own name, atomically, after its checksum has been verified.

    Args:
        remote: the file.
        directory: the directory for it; created if it does not exist.
        progress: called for every piece that is received.
        timeout: the longest time without data from a server, in seconds.

    Returns:
        The path of the file.

    Raises:
        DataError: no URL provided the file (the message says why, and how to fetch it by hand); or
            the directory has a file of this name with other content.
    """
    path = Path(directory) / remote.name
    if path.exists():
        if _is_right(path, remote):
            return path
        raise DataError(
            f"{path} is there, and its checksum is not that of {remote.urls[0]}. If it is yours, "
            "load it as it is; else remove it, and fetch again."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(remote.name + ".part")
    report = progress or (lambda name, there, total: None)
    failures: dict[str, str] = {}
    for _ in range(_PASSES):
        before = _size(part)
        for url in remote.urls:
            try:
                _receive(url, part, remote, report, timeout)
                if _is_right(part, remote):
                    return part.replace(path)
                part.unlink()
                failures[url] = "the content has another checksum"
            except (OSError, http.client.HTTPException) as error:
                failures[url] = str(error) or type(error).__name__
        if _size(part) == before:  # no URL got any further
            break
    tried = "; ".join(f"{url}: {why}" for url, why in failures.items())
    raise DataError(
        f"could not fetch {remote.name} ({tried}). Without internet here, fetch it elsewhere and "
        f"put it at {path}."
    )


def _receive(url: str, part: Path, remote: Remote, report: Progress, timeout: float) -> None:
    """Receives the rest of `part`; raises OSError or HTTPException on failure."""
    there = _size(part)
    if there == remote.size:
        return
    if there > remote.size:
        there = 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={there}-"} if there else {})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            there = 0  # the server sends the file from its beginning
        elif not str(response.headers["Content-Range"]).startswith(f"bytes {there}-"):
            raise OSError(f"asked from byte {there} on, got {response.headers['Content-Range']}")
        with part.open("ab" if there else "wb") as file:
            report(remote.name, there, remote.size)
            while there < remote.size and (piece := response.read(_CHUNK)):
                there += file.write(piece)
                report(remote.name, there, remote.size)
    if there < remote.size:
        raise OSError(f"it broke off after {there} of {remote.size} bytes")


def _unpack(archive: Path, folder: Path, names: Sequence[str]) -> None:
    folder.mkdir(exist_ok=True)
    missing = set(names)
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                # By name, and only files: an archive cannot write anywhere else.
                name = Path(member.name).name
                source = tar.extractfile(member) if name in missing else None
                if source is not None:
                    write_atomically(folder / name, source.read())
                    missing.remove(name)
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{archive} cannot be unpacked into {folder}: {error}") from error
    if missing:
        raise DataError(f"{archive} lacks {', '.join(sorted(missing))}: it is another archive")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_right(path: Path, remote: Remote) -> bool:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == remote.sha256
