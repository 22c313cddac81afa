"""What a worker knows of a job's tables: in snapshots, in checkpoints, and as servers see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from trireme.errors import CheckpointError
from trireme.ps.extension import Tensors
from trireme.ps.extra import ShownExtension
from trireme.session.checkpoint.streamed import StreamedTensors
from trireme.session.model.extension import TrainedExtension
from trireme.tables.job.chain import FIELDS, ROWS, WAITING, Blocks
from trireme.tables.job.requests import slots_of_shard
from trireme.tables.job.shard_tables import Arrays, arrays_in, tensors_of, within
from trireme.tables.row_optimizers import row_optimizer
from trireme.tables.table_spec import TableSpec, optimizer_name


class TableExtension(TrainedExtension):
    """The tables of a job."""

    specs: tuple[TableSpec, ...]

    @property
    def shown(self) -> ShownExtension:  # type: ignore[override]
        return ShownExtension("tables", tuple(msgspec.json.encode(s).decode() for s in self.specs))

    def joined(self, parts: Sequence[Tensors]) -> Mapping[str, torch.Tensor]:
        return joined(parts)

    def tensors(
        self, extra: Mapping[str, torch.Tensor], bounds: Sequence[int], shard: int
    ) -> Tensors:
        return tensors_for(extra, bounds, shard)

    def described(self) -> dict[str, str]:
        return {spec.name: optimizer_name(spec.optimizer) for spec in self.specs}

    def check(
        self, step: int, tensors: Mapping[str, torch.Tensor], described: Mapping[str, str]
    ) -> None:
        """Checks that the program has each table that has rows; another one begins empty."""
        known = {spec.name: spec for spec in self.specs}
        for key, tensor in tensors.items():
            name, _, array = key.rpartition("/")
            if not len(tensor) or array not in ("rows", "states", "waiting_keys"):
                continue
            has = f"the checkpoint of step {step} has the sparse table {name!r}"
            advice = "Choose another run directory, or give the table as it was"
            if (spec := known.get(name)) is None:
                others = ", ".join(map(repr, known)) or "none"
                raise CheckpointError(f"{has}, and the program has {others}. {advice}")
            if array == "waiting_keys":
                continue
            state = row_optimizer(spec.optimizer).state(spec.width)
            width, what = (spec.width, "row") if array == "rows" else (state, "optimizer's state")
            saved, dtype = tensor.shape[1], str(tensor.dtype).removeprefix("torch.")
            if (saved, dtype) != (width, spec.dtype):
                raise CheckpointError(
                    f"{has}, whose {what} is of {saved} {dtype}, and the program's is of {width} "
                    f"{spec.dtype}. {advice}"
                )
            optimizer = optimizer_name(spec.optimizer)
            before = described.get(name, optimizer)
            if array == "states" and saved and before != optimizer:
                raise CheckpointError(
                    f"{has}, trained by {before}, and the program's optimizer of it is "
                    f"{optimizer}: the state of one means nothing to the other. {advice}"
                )


def tensors_for(extra: Mapping[str, torch.Tensor], bounds: Sequence[int], shard: int) -> Tensors:
    """Returns what tables have in the slots of a shard, as tensors to load."""
    slots = slots_of_shard(bounds, shard)
    return [
        entry
        for name in dict.fromkeys(key.rpartition("/")[0] for key in extra)
        for entry in tensors_of(
            name, within({field: extra[f"{name}/{field}"].numpy() for field in FIELDS}, slots)
        )
    ]


def joined(parts: Sequence[Tensors]) -> Mapping[str, torch.Tensor]:
    """Returns the tables in the snapshots of all shards by "TABLE/ARRAY", in the order of keys.

    Sorting millions of rows takes seconds, which the step that a checkpoint is copied in need not
    wait for. So an array is joined whenever it is read, also in another thread. The tensors must
    stay as they are.
    """
    tables: dict[str, list[Arrays]] = {}
    for name, arrays in (found for tensors in parts for found in arrays_in(tensors)):
        tables.setdefault(name, []).append(arrays)
    places: dict[str, tuple[Blocks, str]] = {}
    for name, several in tables.items():
        for group in (ROWS, WAITING):
            blocks = Blocks(several, group[0])
            places |= {f"{name}/{field}": (blocks, field) for field in group}
    shapes = {key: blocks.shape(field) for key, (blocks, field) in places.items()}

    def read(key: str) -> torch.Tensor:
        blocks, field = places[key]
        return blocks.read(field)

    return StreamedTensors(shapes, read)
