"""The format of checkpoints: writes, reads, verifies and describes them.

    checkpoints/step-000001234-writer-3/
      model.safetensors, model.safetensors.index.json          parameters and buffers by name
      optimizer.safetensors, optimizer.safetensors.index.json  by "PARAMETER/STATE"
      average.safetensors, average.safetensors.index.json      the moving average, if there is one
      local.safetensors, local.safetensors.index.json          the state of workers' own optimizers,
                                                               by "WORKER/PARAMETER/STATE", if any
      tables.safetensors, tables.safetensors.index.json        the rows of sparse tables, by
                                                               "TABLE/ARRAY", in the order of keys
      state.json                                               other state, and every file's
      checksum

`state.json` is written last and ends with its own checksum (see `manifest`). Large groups of
tensors are split into shards (see `tensors`). The format is the same for every strategy, every
optimizer and any number of servers and workers, so that a job may continue with others.

An earlier version wrote changes of tables beside the rows of a save before: they are read.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trireme.errors import CheckpointError
from trireme.location import Location
from trireme.ps.extension import of_extension
from trireme.session.checkpoint.manifest import (
    CHECKPOINTS,
    LAST_STEP,
    Manifest,
    checkpoint_name,
    read_manifest,
    verify_files,
    write_manifest,
)
from trireme.session.checkpoint.place import Place, RunDir, place_of, place_of_checkpoint
from trireme.session.checkpoint.run_lock import writer_here
from trireme.session.checkpoint.tensors import (
    INDEX,
    FileRecord,
    WriteFile,
    read_tensors,
    stream_tensors,
    tensor_shapes,
    write_tensors,
)

_GROUPS = ("model", "optimizer", "average", "local", "tables")
_NOTHING = "/nothing"  # a tensor in a group of changes that would be empty otherwise

_SHARD_BYTES = 2 << 30

Shapes = dict[str, dict[str, tuple[str, tuple[int, ...]]]]
"""The dtype (as `F32`) and shape of each tensor by group and name; of tables, of the whole save."""


@dataclass(frozen=True)
class CheckpointData:
    """The state from which a job continues.

    Attributes:
        step: the global step.
        model: parameters and buffers by name.
        optimizer: the optimizer's state, keyed "PARAMETER/STATE" as `fc1.weight/exp_avg`;
            numbers in it (as `step`) are tensors without dimensions.
        average: the parameters' moving average by name; empty if there is none.
        state: other state, as JSON values: None, bool, int, float, str, lists, and dicts with str
            keys. Tuples are read back as lists; floats, infinities and NaN exactly.
        local: the state of workers' own optimizers, keyed "WORKER/PARAMETER/STATE"; empty where
            they have none.
        tables: the rows of sparse tables, keyed "TABLE/ARRAY": the arrays of a
            `trireme.tables.block.Block`, in the order of the keys.
    """

    step: int
    model: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor] = field(default_factory=dict)
    average: Mapping[str, torch.Tensor] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    local: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tables: Mapping[str, torch.Tensor] = field(default_factory=dict)


def save(
    run_dir: RunDir,
    data: CheckpointData,
    *,
    writer: int | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> Location:
    """Writes a checkpoint, and syncs it to the disk, or uploads it; returns where it is.

    The tensors must not change meanwhile. It is saved under the number of a `writer`'s claim of the
    directory; without one, the directory is claimed for this save. Earlier checkpoints are unharmed
    by a failure.
    """
    if not 0 <= data.step <= LAST_STEP:
        raise CheckpointError(
            f"step {data.step} cannot be saved: steps count from 0, up to {LAST_STEP}"
        )
    place = place_of(run_dir)

    def fill(directory: Location, write: WriteFile) -> None:
        files: dict[str, FileRecord] = {}
        for group in _GROUPS:
            files |= write_tensors(directory, group, getattr(data, group), shard_bytes, write)
        write_manifest(directory, data.step, files, data.state, write)

    try:
        with _claimed(place, writer) as number:
            return place.write(checkpoint_name(data.step, number), fill)
    except (OSError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint of step {data.step} could not be written to "
            f"{place.run_dir / CHECKPOINTS}: {error}. Earlier checkpoints are unharmed"
        ) from error


@contextmanager
def _claimed(place: Place, writer: int | None) -> Iterator[int]:
    """Yields a writer's number; without one, that of a claim that a program has for a moment."""
    if writer is not None:
        yield writer
        return
    lock = place.claim(writer_here("program", "program", epoch=uuid.uuid4().hex))
    try:
        yield lock.number
    finally:
        lock.release()


def load(path: str | Location, *, streamed: bool = False) -> CheckpointData:
    """Verifies and reads a checkpoint, into memory of its own.

    One in an object store is copied to the directory of temporary files first. With `streamed`,
    each tensor is read when it is asked for, from files that stay open.
    """
    place, path = place_of_checkpoint(path)
    with place.fetched(path) as directory:
        manifest = read_manifest(directory)
        verify_files(directory, manifest)
        read = stream_tensors if streamed else read_tensors
        groups: dict[str, Any] = {g: read(directory, g, manifest.files) for g in _GROUPS}
        if manifest.chain:
            parts = [groups["tables"]]
            for group in manifest.changes:
                found = read_tensors(directory, group, manifest.files)
                found.pop(_NOTHING, None)
                parts.append(found)
            groups["tables"] = of_extension("tables", "merged")(parts)
        if read_manifest(directory).files != manifest.files:
            raise CheckpointError(f"{path} was replaced by another checkpoint while it was read")
    return CheckpointData(manifest.step, **groups, state=manifest.state)


def verify(path: str | Location) -> None:
    """Verifies the checksum of every file of a checkpoint, and that its tensors can be read."""
    place, path = place_of_checkpoint(path)
    with place.fetched(path) as directory:
        manifest = read_manifest(directory)
        verify_files(directory, manifest)
        _shapes(directory, manifest)


def describe(path: str | Location) -> tuple[Manifest, Shapes]:
    """Returns the manifest of a checkpoint, and the dtype and shape of each tensor of each group.

    No values are read. It verifies `state.json`, the indexes, and the size of every file; see
    `verify` for the rest.
    """
    place, path = place_of_checkpoint(path)
    with place.fetched(path, content=False) as directory:
        manifest = read_manifest(directory)
        verify_files(directory, manifest, lambda name: name.endswith(INDEX))
        return manifest, _shapes(directory, manifest)


def _shapes(directory: Path, manifest: Manifest) -> Shapes:
    return {group: tensor_shapes(directory, group, manifest.files) for group in _GROUPS}
