"""The manifest of a checkpoint, `state.json`: what belongs to it, with the checksum of every file.

The manifest is written last and ends with its own checksum. A reader trusts nothing else: only the
files that the manifest names are read, each is a regular file of the recorded size and SHA-256, and
the directory has the name of the manifest's step. Reading a damaged manifest takes little memory,
however large the file is, and no kind of file makes a reader wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from trireme.errors import CheckpointError
from trireme.files import open_regular
from trireme.location import Location
from trireme.session.checkpoint.tensors import FileRecord, WriteFile, write_file
from trireme.version import __version__
from trireme.wire.message import Number

CHECKPOINTS = "checkpoints"  # the folder of checkpoints in a run directory

STATE = "state.json"  # the name of the file

LAST_STEP = 1 << 62  # the largest global step, as in messages

_FORMAT = 1
_FORMAT_OF_CHANGES = 2  # older releases would take what has changed for all there is
_CHUNK = 1 << 20
# Without a writer, and in object stores with a random number in its place, are those that were
# written before saves were named by their writers.
_NAME = re.compile(r"step-([0-9]{9}|[1-9][0-9]{9,18})(?:-writer-([0-9]{1,9})|-[0-9a-f]{8})?")

_TAIL = b'"checksum": "sha256:%s"\n}\n'
_TAIL_BYTES = len(_TAIL % b"") + 64

_FileName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"\A(model|optimizer|average|local|tables|changes-[0-9]{9,19})"
        r"(-[0-9]{5,}-of-[0-9]{5,})?"
        r"\.safetensors(\.index\.json)?\Z"
    ),
]


class Manifest(msgspec.Struct, frozen=True):
    """The content of `state.json`, without its checksum."""

    format: int  # 1, or 2 with `chain`
    step: Number
    saved_at: str  # in UTC and ISO 8601
    versions: dict[str, str]  # of `trireme` and `torch` that wrote the checkpoint
    files: dict[_FileName, FileRecord]
    state: dict[str, Any]
    # the steps of the saves that the tables are of: of the one that has all rows, and of those
    # that have what had changed since the one before, up to this one. Empty where all rows are of
    # this save
    chain: tuple[Number, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(record.size for record in self.files.values())

    @property
    def changes(self) -> list[str]:
        return [changes_group(step) for step in self.chain[1:]]


def changes_group(step: int) -> str:
    """Returns the name of the group of tensors with the changes that were saved at a step."""
    return f"changes-{step:09d}"


def checkpoint_name(step: int, writer: int) -> str:
    """Returns the name of the folder of a save."""
    return f"step-{step:09d}-writer-{writer}"


def order_of(name: str) -> tuple[int, int] | None:
    """Returns the writer's number and the step of a checkpoint's name; None for other names."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[2] or 0), int(match[1]))


def in_order(paths: Iterable[Location]) -> list[Location]:
    """Returns those paths that have names of checkpoints, oldest first."""
    orders = {path: order_of(path.name) for path in paths}
    return sorted((p for p, order in orders.items() if order), key=lambda path: orders[path] or ())


def write_manifest(
    directory: Location,
    step: int,
    files: dict[str, FileRecord],
    state: Mapping[str, Any],
    write: WriteFile = write_file,
) -> None:
    """Writes the manifest of a checkpoint whose other files are written, by `write`."""
    fields = {
        "format": _FORMAT,
        "step": step,
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"trireme": __version__, "torch": str(torch.__version__)},
        "files": msgspec.to_builtins(files),
        "state": dict(state),
    }
    # Python's json, for its exact floats and for integers of any size.
    lines = [f"{json.dumps(name)}: {json.dumps(value)},\n" for name, value in fields.items()]
    body = "".join(["{\n", *lines]).encode()
    write(directory / STATE, [body, _TAIL % hashlib.sha256(body).hexdigest().encode()])


def read_manifest(directory: Path) -> Manifest:
    """Reads and verifies the manifest of a checkpoint; looks at no other file."""
    path = directory / STATE
    try:
        manifest = msgspec.convert(json.loads(_verified_content(path)), Manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{directory} has no {STATE}: it is not a checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is not the state of a checkpoint: {error}") from error
    if manifest.format not in (_FORMAT, _FORMAT_OF_CHANGES):
        raise CheckpointError(
            f"{path} is of format {manifest.format} and this release of trireme reads formats "
            f"{_FORMAT} and {_FORMAT_OF_CHANGES}: use the release that wrote it, or a newer one"
        )
    named = order_of(directory.name)
    if named is not None and named[1] != manifest.step:
        raise CheckpointError(
            f"{path} is of step {manifest.step}, and the directory of step {named[1]}: the files "
            "of another checkpoint were put there"
        )
    return manifest


def verify_files(
    directory: Path, manifest: Manifest, content: Callable[[str], bool] = lambda name: True
) -> None:
    """Verifies that the files of a checkpoint are there, each with its size and checksum."""
    for name, record in manifest.files.items():
        path, found = directory / name, record.sha256
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size == record.size and content(name):
                    found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if size != record.size:
            raise CheckpointError(
                f"{path} is damaged: it has {size} bytes instead of {record.size}"
            )
        if found != record.sha256:
            raise CheckpointError(
                f"{path} is damaged: its content is not what was written (SHA-256 "
                f"{found[:16]}... instead of {record.sha256[:16]}...)"
            )


def _verified_content(path: Path) -> bytes:
    """Returns the content of a manifest; reads it into memory only if its checksum is right."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size - _TAIL_BYTES, 0))
        tail = file.read(_TAIL_BYTES)
        file.seek(0)
        digest, left = hashlib.sha256(), size - _TAIL_BYTES
        while tail.startswith(b'"checksum"') and left > 0:
            digest.update(chunk := file.read(min(left, _CHUNK)))
            left -= len(chunk)
        if tail != _TAIL % digest.hexdigest().encode():
            raise CheckpointError(
                f"{path} is damaged: it is not what its own checksum says ({size} bytes); the "
                "file was cut short or changed"
            )
        file.seek(0)
        return file.read(size)
