"""Digests of tensors' bytes, and parities that say which word has changed, where it is one.

The 64-bit words of a tensor lie in rows of a table. The exclusive ors of each row and each column
take one pass at the speed of memory, and their hash is the digest. A word that has changed shows in
its row and its column, with the bits that differ, so that it can be put back: a product code.
Source: Elias, Error-Free Coding (IRE Transactions on Information Theory 4(4), 1954).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trireme.tensors import COLUMNS, bytes_of, parities, to_local


class Change(NamedTuple):
    """What has changed in tensors: one word, or more."""

    name: str  # of the tensor
    tensor: torch.Tensor
    word: int  # of 64 bits, of that tensor as it lies in memory
    bits: int  # those that differ; 0 where it is more than one word

    def __str__(self) -> str:
        if not self.bits:
            return "several words"
        bit = (self.bits & -self.bits).bit_length() - 1
        byte, size = 8 * self.word + bit // 8, self.tensor.element_size()
        return f"bit {8 * (byte % size) + bit % 8} of element {byte // size} of {self.name}"

    def mend(self) -> None:
        """Puts one word back."""
        data = bytes_of(self.tensor)
        word = data[8 * self.word :][:8]
        word ^= np.frombuffer(self.bits.to_bytes(8, "little"), np.uint8)[: len(word)]
        self.tensor.copy_(torch.from_numpy(data).view(self.tensor.dtype).view_as(self.tensor))


class Seal:
    """Tensors with names, what they hold now, and how often they were written to until now."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]], writes: int = 0) -> None:
        self.named = [(name, to_local(tensor.detach())) for name, tensor in named]
        self.writes = writes
        self._parities = [(*each, parities(each[1])) for each in self.named]
        self.digests = {name: _hash(words) for name, _, words in self._parities}

    def changed(self) -> Change | None:
        """Returns what has changed since; None for nothing."""
        found = None
        for name, tensor, before in self._parities:
            differing = before ^ parities(tensor)
            places = np.flatnonzero(differing)
            if not len(places) or (found and found.tensor.data_ptr() == tensor.data_ptr()):
                continue  # nothing here, or the same memory under another name
            column, row = int(places[0]), int(places[-1]) - COLUMNS
            alone = found is None and len(places) == 2 and column < COLUMNS and row >= 0
            if not alone or differing[column] != differing[places[-1]]:
                return Change(name, tensor, 0, 0)
            found = Change(name, tensor, row * COLUMNS + column, int(differing[column]))
        return found


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Returns one number of all, as messages carry it: less than 2^62, and not 0, which is none."""
    return _hash(np.array([_hash(parities(each)) for each in tensors], np.uint64))


def _hash(words: NDArray[np.uint64]) -> int:
    found = hashlib.blake2b(words.data, digest_size=8).digest()
    return (int.from_bytes(found, "little") >> 2) or 1
