"""Named tensors in safetensors files, sharded as by Hugging Face's libraries.

    NAME.safetensors                        one file, or
    NAME-00001-of-00003.safetensors ...     several, and always
    NAME.safetensors.index.json             which tensor lies in which file

This module writes the files itself, as https://huggingface.co/docs/safetensors defines them, so
that each is hashed while it is written and no second copy is made. The `safetensors` library reads
them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import torch
from safetensors import safe_open

from trireme.errors import CheckpointError
from trireme.location import Location
from trireme.session.checkpoint.streamed import StreamedTensors, renamed, shapes_of

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"

_T = TypeVar("_T")


class FileRecord(msgspec.Struct, frozen=True):
    """The size of a file in bytes, and its SHA-256 in hexadecimal."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


WriteFile = Callable[[Any, Iterable[bytes | memoryview]], FileRecord]
"""Writes a file of a checkpoint, given its path or URL, and its content; see `write_file`."""


def write_file(
    path: Path, chunks: Iterable[bytes | memoryview], *, durable: bool = True
) -> FileRecord:
    """Writes a file, waits until it is on the disk if it is `durable`, and returns its record."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        if durable:
            os.fsync(file.fileno())
        return FileRecord(file.tell(), digest.hexdigest())


def write_tensors(
    directory: Location,
    group: str,
    tensors: Mapping[str, torch.Tensor],
    shard_bytes: int,
    write: WriteFile = write_file,
) -> dict[str, FileRecord]:
    """Writes tensors of any device, layout in memory and sharing, with their index."""
    if not tensors:
        return {}
    shapes = shapes_of(tensors)
    for name, tensor in shapes.items():  # before anything asks a tensor for its size
        check_held(name, tensor, streamed=isinstance(tensors, StreamedTensors))
    shards = list(_shards(shapes, shard_bytes))
    records: dict[str, FileRecord] = {}
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file_name = f"{group}{part}.safetensors"
        shard = renamed(tensors, {name: name for name in names})
        records[file_name] = write_tensors_file(directory / file_name, shard, write)
        weight_map.update(dict.fromkeys(names, file_name))
    total = sum(tensor.nbytes for tensor in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    name = f"{group}{INDEX}"
    records[name] = write(directory / name, [json.dumps(index, indent=2).encode()])
    return records


def write_tensors_file(
    path: Location, tensors: Mapping[str, torch.Tensor], write: WriteFile = write_file
) -> FileRecord:
    """Writes one safetensors file."""
    # Large items first keeps every tensor aligned to its item size without holes, which the
    # format forbids.
    shapes = shapes_of(tensors)
    names = sorted(shapes, key=lambda name: -shapes[name].itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        tensor = shapes[name]
        stop = offset + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, stop],
        }
        offset = stop
    return write(path, _chunks(header, (tensors[name] for name in names)))


def _chunks(
    header: dict[str, object], tensors: Iterable[torch.Tensor]
) -> Iterator[bytes | memoryview]:
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data


def held(
    group: str, tensors: Mapping[str, torch.Tensor], lacks: list[str]
) -> Mapping[str, torch.Tensor]:
    """Returns the tensors that a checkpoint can hold; adds to `lacks` which it cannot."""
    odd: dict[str, str] = {}
    for name, tensor in shapes_of(tensors).items():
        try:
            check_held(name, tensor, streamed=isinstance(tensors, StreamedTensors))
        except CheckpointError:
            odd[name] = f"{name!r} of {tensor.dtype}"
    if odd:
        lacks.append(f"what it cannot hold of the {group}: {', '.join(odd.values())}")
    return renamed(tensors, {name: name for name in tensors if name not in odd})


def check_held(name: str, tensor: torch.Tensor, *, streamed: bool = False) -> None:
    """Checks that a checkpoint can hold a tensor."""
    if name == "__metadata__" or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise CheckpointError(f"no tensor can be named {name!r} in a checkpoint: rename it")
    if tensor.layout != torch.strided or (tensor.is_meta and not streamed):
        kind = "has no values (it is on the meta device)" if tensor.is_meta else "is sparse"
        raise CheckpointError(f"tensor {name!r} {kind}: a checkpoint holds dense values only")
    if tensor.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise CheckpointError(
            f"tensor {name!r} is of {tensor.dtype}, which a checkpoint cannot hold; it can: {known}"
        )


def _shards(tensors: Mapping[str, torch.Tensor], shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def read_tensors(directory: Path, group: str, files: Iterable[str]) -> dict[str, torch.Tensor]:
    """Reads what `write_tensors` wrote; the bytes of the files are taken to be right."""
    # A copy: memory that is mapped from a file changes, or faults, when the file is changed.
    return each_tensor(directory, group, files, lambda file, name: file.get_tensor(name).clone())


def stream_tensors(directory: Path, group: str, files: Iterable[str]) -> StreamedTensors:
    """As `read_tensors`, but reads each tensor, of a file that stays open, when it is asked for."""
    opened = each_tensor(directory, group, files, lambda file, name: file)
    shapes = each_tensor(directory, group, files, lambda file, name: _shape(file.get_slice(name)))
    return StreamedTensors(shapes, lambda name: opened[name].get_tensor(name).clone())


def _shape(part: Any) -> torch.Tensor:
    dtype = next(dtype for dtype, short in _DTYPES.items() if short == part.get_dtype())
    return torch.empty(part.get_shape(), dtype=dtype, device="meta")


def tensor_shapes(
    directory: Path, group: str, files: Iterable[str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype (as `F32`) and shape of each tensor of a group, reading no values."""

    def shape(file: Any, name: str) -> tuple[str, tuple[int, ...]]:
        part = file.get_slice(name)
        return part.get_dtype(), tuple(part.get_shape())

    return each_tensor(directory, group, files, shape)


def _names(file: Any) -> list[str]:
    return list(file.keys())


def each_tensor(
    directory: Path, group: str, files: Iterable[str], read: Callable[[Any, str], _T]
) -> dict[str, _T]:
    """Returns what `read` returns for each tensor of a group, given its open file."""
    found: dict[str, _T] = {}
    for file_name in files:
        if not (file_name.startswith((f"{group}.", f"{group}-")) and file_name.endswith(SUFFIX)):
            continue
        path = directory / file_name
        try:
            file = safe_open(path, framework="pt", device="cpu")
            found |= {name: read(file, name) for name in _names(file)}
        except Exception as error:  # the library's own, and whatever odd dtypes and shapes set off
            raise CheckpointError(f"{path} is not a file of tensors: {error}") from error
    return found
