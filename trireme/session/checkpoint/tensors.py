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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
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
_NUMPY_DTYPES = {"F64": "float64", "F32": "float32", "I64": "int64", "I32": "int32"}
_HEADER_ALIGNMENT = 8

INDEX = ".safetensors.index.json"
"""What the names of indexes end with."""

_T = TypeVar("_T")


class FileRecord(msgspec.Struct, frozen=True):
    """The size of a file in bytes, and its SHA-256 in hexadecimal."""

    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]


WriteFile = Callable[[Any, Iterable[bytes | memoryview]], FileRecord]
"""Writes a file of a checkpoint, given its path or URL, and its content; see `write_file`."""


class _IndexMetadata(msgspec.Struct, frozen=True):
    total_size: int


class _Index(msgspec.Struct, frozen=True):
    metadata: _IndexMetadata
    weight_map: dict[str, str]


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


def strict_json(content: bytes) -> Any:
    """Returns a JSON value in which no object has a name twice: all readers understand it alike."""
    return json.loads(content, object_pairs_hook=_fields)


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is there twice")
    return fields


def index_name(group: str) -> str:
    """Returns the name of the index of a group of tensors."""
    return f"{group}{INDEX}"


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
    shapes = _checked_shapes(tensors)  # before anything asks a tensor for its size
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
    name = index_name(group)
    records[name] = write(directory / name, [json.dumps(index, indent=2).encode()])
    return records


def write_tensors_file(
    path: Location, tensors: Mapping[str, torch.Tensor], write: WriteFile = write_file
) -> FileRecord:
    """Writes one safetensors file."""
    # Large items first keeps every tensor aligned to its item size without holes, which the
    # format forbids.
    shapes = _checked_shapes(tensors)
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
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors:
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data


def _checked_shapes(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Returns tensors of the same dtypes and shapes, of which a checkpoint can hold each."""
    shapes = shapes_of(tensors)
    for name, tensor in shapes.items():
        dtype_name(name, tensor, streamed=isinstance(tensors, StreamedTensors))
    return shapes


def dtype_name(name: str, tensor: torch.Tensor, *, streamed: bool = False) -> str:
    """Returns the name of a tensor's dtype in a file, such as `F32`."""
    if name == "__metadata__":
        raise CheckpointError("no tensor can be named __metadata__ in a checkpoint: rename it")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"no tensor can be named {name!r} in a checkpoint, as it is not Unicode: rename it"
        ) from None
    if tensor.layout != torch.strided or (tensor.is_meta and not streamed):
        kind = "has no values (it is on the meta device)" if tensor.is_meta else "is sparse"
        raise CheckpointError(f"tensor {name!r} {kind}: a checkpoint holds dense values only")
    if tensor.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise CheckpointError(
            f"tensor {name!r} is of {tensor.dtype}, which a checkpoint cannot hold; it can: {known}"
        )
    return _DTYPES[tensor.dtype]


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


def read_tensors(directory: Path, group: str, files: Collection[str]) -> dict[str, torch.Tensor]:
    """Reads what `write_tensors` wrote; the bytes of the files are taken to be right."""
    index = _read_index(directory, group, files)
    # A copy: memory that is mapped from a file changes, or faults, when the file is changed.
    found = _each(directory, index, lambda file, name: file.get_tensor(name).clone())
    total = sum(tensor.nbytes for tensor in found.values())
    if total != index.metadata.total_size:
        raise CheckpointError(
            f"{directory / index_name(group)} announces {index.metadata.total_size} bytes of "
            f"tensors, and the files hold {total}"
        )
    return found


def stream_tensors(directory: Path, group: str, files: Collection[str]) -> StreamedTensors:
    """As `read_tensors`, but reads each tensor when it is asked for.

    The files must stay as they are meanwhile.
    """
    index = _read_index(directory, group, files)
    known = {short: dtype for dtype, short in _DTYPES.items()}

    def shape(file: Any, name: str) -> torch.Tensor:
        part = file.get_slice(name)
        return torch.empty(part.get_shape(), dtype=known[part.get_dtype()], device="meta")

    def read(name: str) -> torch.Tensor:
        path = directory / index.weight_map[name]
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor.clone()
        except Exception as error:  # the library's own
            raise CheckpointError(f"{name!r} cannot be read from {path}: {error}") from error

    return StreamedTensors(_each(directory, index, shape), read)


class TensorSlices(NamedTuple):
    """A tensor in a file, of which some entries are read at a time.

    Attributes:
        shape: its shape.
        dtype: its dtype.
        read: returns entries [start, stop) of its first dimension.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[int, int], npt.NDArray[Any]]


def slice_tensors(directory: Path, group: str, files: Collection[str]) -> dict[str, TensorSlices]:
    """As `stream_tensors`, for tensors of dtypes that NumPy has, of which parts are read."""
    index = _read_index(directory, group, files)
    opened = {
        name: safe_open(directory / name, framework="numpy")
        for name in dict.fromkeys(index.weight_map.values())
    }

    def found(_: Any, name: str) -> TensorSlices:
        part: Any = opened[index.weight_map[name]].get_slice(name)  # type: ignore[no-untyped-call]
        shape = tuple(part.get_shape())
        empty = np.empty(0, _NUMPY_DTYPES[part.get_dtype()])
        if not all(shape):
            return TensorSlices(shape, empty.dtype, lambda *_: empty.reshape(shape))
        return TensorSlices(shape, empty.dtype, lambda start, stop: part[start:stop])

    return _each(directory, index, found)


def tensor_shapes(
    directory: Path, group: str, files: Collection[str]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns the dtype (as `F32`) and shape of each tensor of a group, reading no values."""

    def shape(file: Any, name: str) -> tuple[str, tuple[int, ...]]:
        part = file.get_slice(name)
        return part.get_dtype(), tuple(part.get_shape())

    return _each(directory, _read_index(directory, group, files), shape)


def _read_index(directory: Path, group: str, files: Collection[str]) -> _Index:
    name = index_name(group)
    shards = {f for f in files if f.startswith((f"{group}.", f"{group}-")) and f != name}
    if name not in files and not shards:
        return _Index(_IndexMetadata(total_size=0), {})
    path = directory / name
    try:
        index = msgspec.convert(strict_json(path.read_bytes()), _Index)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise CheckpointError(f"{path} is not an index of tensors: {error}") from error
    if set(index.weight_map.values()) != shards:
        raise CheckpointError(
            f"{path} speaks of the files {sorted(set(index.weight_map.values()))}, and the "
            f"checkpoint has {sorted(shards)}"
        )
    return index


def _each(directory: Path, index: _Index, read: Callable[[Any, str], _T]) -> dict[str, _T]:
    """Returns what `read` returns for each tensor, given its open file, in the index's order."""
    names: dict[str, list[str]] = {}
    for name, file_name in index.weight_map.items():
        names.setdefault(file_name, []).append(name)
    found: dict[str, _T] = {}
    for file_name, inside in names.items():
        path = directory / file_name
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                if odd := sorted(set(file.keys()) ^ set(inside)):
                    raise CheckpointError(
                        f"{path} and its index do not hold the same tensors; the first that only "
                        f"one of them has is {odd[0]!r}"
                    )
                _check_header(path)
                found |= {name: read(file, name) for name in inside}
        except CheckpointError:
            raise
        except Exception as error:  # the library's own, and whatever odd dtypes and shapes set off
            raise CheckpointError(f"{path} is not a file of tensors: {error}") from error
    return {name: found[name] for name in index.weight_map}


def _check_header(path: Path) -> None:
    """Checks that no tensor is in a file twice; the library returns the last of them."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        strict_json(file.read(size))
