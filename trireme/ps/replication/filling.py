"""What fills another replica: the state with which the generation began, and rows of tables."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trireme.cluster.view import View
from trireme.ps.flat import as_bytes
from trireme.ps.replication_messages import Fill, FillRows
from trireme.ps.shard.quiet_state import Quiet
from trireme.ps.shard.values.snapshot_tensors import Tensors


def filling(view: View, quiet: Quiet | None) -> tuple[Fill, Sequence[memoryview]]:
    """Returns the message, and its payload, that fills another replica."""
    if quiet is None:
        return Fill(view, b"", ()), ()
    tensors = [(spec, tensor.detach()) for spec, tensor in quiet.tensors]
    payload = [as_bytes(tensor) for _, tensor in tensors if tensor.numel()]
    specs = tuple(spec for spec, _ in tensors)
    return Fill(view, msgspec.msgpack.encode(quiet.state), specs), payload


def filling_rows(slots: tuple[int, int], tensors: Tensors) -> tuple[FillRows, Sequence[memoryview]]:
    """Returns the message, and its payload, with rows of some slots."""
    payload = [as_bytes(tensor) for _, tensor in tensors if tensor.numel()]
    return FillRows(slots, tuple(spec for spec, _ in tensors)), payload
