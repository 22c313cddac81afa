"""The parts of a checkpoint: what it can hold of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from trireme.errors import CheckpointError
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
