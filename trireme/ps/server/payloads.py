"""What the payloads of messages to a server hold, and the memory that receives them.

A gradient has a buffer of its own; see `receive_buffer`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from trireme.errors import ConfigurationError, FrameError
from trireme.ps.layout import ITEM_SIZES, Layout
from trireme.ps.messages import Attach, Share
from trireme.ps.optimizers import OPTIMIZERS
from trireme.ps.replication.messages import Fill, FillExtra
from trireme.ps.shard.state import ShardState
from trireme.ps.shard.values.snapshot_tensors import tensors_from
from trireme.ps.snapshot_messages import AddParameters, Load, TensorSpec, WriteValues
from trireme.wire.message import Message

_SHARE_BYTES = 1 << 32
_MOST_TENSORS = 16  # of the size of the model that a checkpoint has for a server, at most
_SLACK_BYTES = 1 << 20  # for scalars
_EXTRA_BYTES = 1 << 40  # how many extra values come is not known before
_OF_TENSORS = (Fill, FillExtra, Load, WriteValues, AddParameters)


def memory_for(message: Message, length: int, state: ShardState) -> Sequence[memoryview]:
    """Returns memory for the payload of a message, whose length the frame announces."""
    if isinstance(message, _OF_TENSORS):
        expected, what = sum(map(_size_of, message.tensors)), type(message).__name__
        if length != expected:
            raise FrameError(f"{what} announces {length} bytes, and its tensors take {expected}")
        added = message.shown.layout.parameters if isinstance(message, AddParameters) else ()
        most = _most_loaded(state, sum(math.prod(each.shape) for each in added))
        if not isinstance(message, Fill | FillExtra) and length > most:
            raise FrameError(f"{what} announces {length} bytes, more than its model can have")
    elif not isinstance(message, Share) or length > _SHARE_BYTES:
        raise FrameError(f"{type(message).__name__} has no payload of {length} bytes")
    return [memoryview(bytearray(length))]


def needed_bytes(request: Attach, shard: int) -> int:
    """Returns how many bytes a shard of a model takes at least; 0 for what is no model."""
    try:
        parts = Layout(request.layout).parts(shard)
    except (ConfigurationError, IndexError):
        return 0
    optimizer = request.optimizer
    states = [
        len(OPTIMIZERS.load(name).needs(group.values) - {"step"})
        for name, group in zip(optimizer.names, optimizer.groups, strict=False)
        if name in OPTIMIZERS
    ]
    copies = 2 + max(states, default=0) + (request.rule.average is not None)
    return copies * sum(part.bytes for part in parts)


def unpack(message: Message, payload: Sequence[memoryview]) -> Any:
    """Returns the payload of a message as a shard takes it: tensors, or of `Share` the bytes."""
    if isinstance(message, _OF_TENSORS):
        return tensors_from(message.tensors, payload or [memoryview(bytearray())])
    data = bytearray().join(payload)
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)


def _most_loaded(state: ShardState, added: int) -> int:
    if state.layout is None:
        return 0
    if state.extension is not None:
        return _EXTRA_BYTES
    elements = added + sum(part.length for part in state.layout.parts(state.number))
    return _SLACK_BYTES + _MOST_TENSORS * 8 * elements


def _size_of(spec: TensorSpec) -> int:
    sizes = {**ITEM_SIZES, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
    if spec.dtype not in sizes or spec.stop < spec.start:
        raise FrameError(f"a tensor of a load makes no sense: {spec}")
    return sizes[spec.dtype] * (1 if spec.group >= 0 else spec.stop - spec.start)
