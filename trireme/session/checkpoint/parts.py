"""The parts of a checkpoint: what it can hold of each, and the arrays of sparse tables in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trireme.errors import CheckpointError
from trireme.ps.joined_table import JoinedTable
from trireme.session.checkpoint.streamed import StreamedTensors, renamed, shapes_of
from trireme.session.checkpoint.tensors import check_held


class Parts:
    """Collects the parts of a checkpoint; what it cannot hold is left out and listed."""

    def __init__(self, lacks: Sequence[str]) -> None:
        self.lacks = list(lacks)

    def held(self, group: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Returns the tensors that a checkpoint can hold."""
        streamed, odd = isinstance(tensors, StreamedTensors), dict[str, str]()
        for name, tensor in shapes_of(tensors).items():
            try:
                check_held(name, tensor, streamed=streamed)
            except CheckpointError:
                odd[name] = f"{name!r} of {tensor.dtype}"
        if odd:
            self.lacks.append(f"what it cannot hold of the {group}: {', '.join(odd.values())}")
        return renamed(tensors, {name: name for name in tensors if name not in odd})


def streamed_tables(tables: Mapping[str, Mapping[str, torch.Tensor]]) -> StreamedTensors:
    """Returns the arrays of tables by "TABLE/ARRAY"; whoever writes them has them put in order."""
    places = {f"{name}/{array}": (name, array) for name, each in tables.items() for array in each}
    shapes: dict[str, torch.Tensor] = {}
    for key, (name, array) in places.items():
        table = tables[name]
        shapes[key] = table.shapes[array] if isinstance(table, JoinedTable) else table[array]

    def read(key: str) -> torch.Tensor:
        name, array = places[key]
        return tables[name][array]

    return StreamedTensors(shapes, read)


def tables_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the arrays of each table by name, from tensors by "TABLE/ARRAY"."""
    tables: dict[str, dict[str, torch.Tensor]] = {}
    for key in tensors:
        name, _, array = key.rpartition("/")
        tables.setdefault(name, {})[array] = tensors[key]
    return tables
