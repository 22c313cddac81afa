"""A sparse table in a snapshot: the blocks of all shards, put in order when an array is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class JoinedTable(Mapping[str, torch.Tensor]):
    """The arrays of a table by name, each in the order of the keys.

    Sorting millions of rows takes seconds, which the step that a checkpoint is copied in need not
    wait for. So an array is joined whenever it is read, also in another thread.

    Args:
        blocks: the arrays of each block by name. They do not change any more.
    """

    def __init__(
        self,
        blocks: Sequence[Mapping[str, npt.NDArray[Any]]],
        orders: Mapping[str, str],
        more: Mapping[str, torch.Tensor],
    ) -> None:
        self._blocks: dict[str, list[npt.NDArray[Any]]] = {}
        for name, order in orders.items():
            some = [block for block in blocks if block[order].size] or blocks[:1]
            self._blocks[name] = [block[name] for block in some]
        self._orders = orders
        self._more = more
        self._ranks: dict[str, npt.NDArray[np.int64]] = {}
        # a meta tensor of the dtype and shape of each array, by name
        self.shapes = {name: _meta(found) for name, found in self._blocks.items()}
        self.shapes |= {name: tensor.to("meta") for name, tensor in more.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._more:
            return self._more[name]
        blocks, rank, first = self._blocks[name], self._rank(self._orders[name]), 0
        joined = np.empty((rank.size, *blocks[0].shape[1:]), blocks[0].dtype)
        for block in blocks:
            joined[rank[first : first + len(block)]] = block
            first += len(block)
        return torch.from_numpy(joined)

    def _rank(self, order: str) -> npt.NDArray[np.int64]:
        """Returns the place of each entry of the blocks in the order of an array."""
        if order not in self._ranks:
            places = np.argsort(np.concatenate(self._blocks[order]), kind="stable")
            rank = np.empty(places.size, np.int64)
            rank[places] = np.arange(places.size)
            self._ranks[order] = rank
        return self._ranks[order]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __contains__(self, name: object) -> bool:
        return name in self.shapes  # the one of Mapping would join the array


def _meta(blocks: Sequence[npt.NDArray[Any]]) -> torch.Tensor:
    shape = (sum(map(len, blocks)), *blocks[0].shape[1:])
    dtype = torch.from_numpy(np.empty(0, blocks[0].dtype)).dtype
    return torch.empty(shape, dtype=dtype, device="meta")
