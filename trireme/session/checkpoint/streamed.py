"""Named tensors that are read one at a time, so that they need not fit into memory together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch


class StreamedTensors(Mapping[str, torch.Tensor]):
    """Tensors of known shape that are read from elsewhere whenever one is asked for."""

    def __init__(
        self, shapes: Mapping[str, torch.Tensor], read: Callable[[str], torch.Tensor]
    ) -> None:
        self.shapes = dict(shapes)
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.shapes:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes  # the one of Mapping would read the tensor


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Returns tensors of the same dtypes and shapes, without reading any value."""
    return tensors.shapes if isinstance(tensors, StreamedTensors) else tensors


def joined(*groups: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Returns the tensors of several groups, without reading any; of equal names the last one."""
    if not any(isinstance(group, StreamedTensors) for group in groups):
        return {name: tensor for group in groups for name, tensor in group.items()}
    place = {name: group for group in groups for name in group}
    shapes = {name: shapes_of(group)[name] for name, group in place.items()}
    return StreamedTensors(shapes, lambda name: place[name][name])


def renamed(
    tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]
) -> Mapping[str, torch.Tensor]:
    """Returns tensors under other names, without reading any."""
    if not isinstance(tensors, StreamedTensors):
        return {new: tensors[own] for new, own in names.items()}
    shapes = {new: tensors.shapes[own] for new, own in names.items()}
    return StreamedTensors(shapes, lambda new: tensors[names[new]])
