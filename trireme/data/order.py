"""The order of a data set's examples: an endless sequence of shuffled epochs."""

from __future__ import annotations

from collections import OrderedDict

import torch

from trireme.data.seeds import derive, permutation

__all__ = ["Order"]

_EPOCHS_KEPT = 2


class Order:
    """Maps positions to examples.

    Positions count 0, 1, 2, ... without end. Position p belongs to epoch p // size, and each epoch
    holds every example once, in an order of its own. So every batch, a range of positions, is
    full; one that crosses the end of an epoch takes the rest from the next.

    The order follows from (size, seed) alone: every worker computes it for itself, and a position
    means the same example in a job that is resumed.

    Attributes:
        size: how many examples the data set has.
        seed: chooses the shuffles.
        shuffle: whether epochs are shuffled; without, each runs from 0 to size - 1.
    """

    def __init__(self, size: int, seed: int = 0, shuffle: bool = True) -> None:
        """Makes an order for `size` examples.

        Raises:
            ValueError: there are no examples.
        """
        if size < 1:
            raise ValueError(f"the data set has {size} examples: there must be at least one")
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self._epochs: OrderedDict[int, torch.Tensor] = OrderedDict()

    def indices(self, start: int, stop: int) -> torch.Tensor:
        """Returns the examples at positions start to stop - 1: int64, shape (stop - start,).

        The tensor may be a view of one that is kept: read it, do not write to it.

        Raises:
            ValueError: the range is empty, or begins before 0.
        """
        if not 0 <= start < stop:
            raise ValueError(f"[{start}, {stop}) is not a range of positions")
        epoch, first = divmod(start, self.size)
        count = stop - start
        if first + count <= self.size:
            return self._epoch(epoch)[first : first + count]
        return torch.cat(self._pieces(epoch, first, count))

    def _pieces(self, epoch: int, first: int, count: int) -> list[torch.Tensor]:
        pieces = []
        while count > 0:
            piece = self._epoch(epoch)[first : first + count]
            pieces.append(piece)
            count -= len(piece)
            epoch, first = epoch + 1, 0
        return pieces

    def _epoch(self, epoch: int) -> torch.Tensor:
        # The last two used are kept: a batch may cross their border, and spans that a lost worker
        # gave back may belong to the epoch before.
        if not self.shuffle:
            epoch = 0
        kept = self._epochs.get(epoch)
        if kept is None:
            kept = self._build(epoch)
            if len(self._epochs) >= _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
            self._epochs[epoch] = kept
        elif len(self._epochs) > 1:
            self._epochs.move_to_end(epoch)
        return kept

    def _build(self, epoch: int) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.from_numpy(permutation(self.size, derive(self.seed, epoch)))
