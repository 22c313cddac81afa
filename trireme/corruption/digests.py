"""Digests of tensors' bytes, and parities that say which word has changed, where it is one.

The 64-bit words of a tensor lie in rows of a table. The exclusive ors of each row and each column
take one pass at the speed of memory, and their hash is the digest. A word that has changed shows in
its row and its column, with the bits that differ, so that it can be put back: a product code.
Source: Elias, Error-Free Coding (IRE Transactions on Information Theory 4(4), 1954).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from trireme.tensors import to_local

_Words: TypeAlias = NDArray[np.uint64]
_COLUMNS = 512
"""Words of a row: 4 KiB."""
_BLOCK = 128 * _COLUMNS


@dataclass(frozen=True, slots=True)
class Change:
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
        """Puts one word back, where the tensor lies."""
        data = _bytes_of(self.tensor)
        word = data[8 * self.word : 8 * self.word + 8]
        word ^= np.frombuffer(self.bits.to_bytes(8, "little"), np.uint8)[: len(word)]
        if data.ctypes.data != self.tensor.data_ptr():  # on another device, or in another order
            old = torch.from_numpy(data).view(self.tensor.dtype).reshape(self.tensor.shape)
            self.tensor.copy_(old)


class Seal:
    """Tensors, and what they hold now.

    Attributes:
        named: the tensors, with names.
        digests: the digest of each.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.named = [(name, to_local(tensor.detach())) for name, tensor in named]
        self._parities = [_parities(tensor) for _, tensor in self.named]
        self.digests = tuple(_hash(*each) for each in self._parities)

    def changed(self) -> Change | None:
        """Returns what has changed since; None for nothing."""
        found = None
        for (name, tensor), before in zip(self.named, self._parities, strict=True):
            columns, rows = (a ^ b for a, b in zip(before, _parities(tensor), strict=True))
            column, row = np.flatnonzero(columns), np.flatnonzero(rows)
            if not len(column) and not len(row):
                continue
            alone = found is None and len(column) == len(row) == 1
            if not alone or columns[column[0]] != rows[row[0]]:
                return Change(name, tensor, 0, 0)
            word = int(row[0]) * _COLUMNS + int(column[0])
            found = Change(name, tensor, word, int(rows[row[0]]))
        return found


def digests(tensors: Iterable[torch.Tensor]) -> tuple[int, ...]:
    """Returns for each tensor a number that depends on each of its bits, and its place."""
    return tuple(_hash(*_parities(to_local(tensor.detach()))) for tensor in tensors)


def digest(tensors: Iterable[torch.Tensor]) -> int:
    """Returns one number of all, as messages carry it: less than 2^62, and not 0, which is none."""
    return _hash(np.array(digests(tensors), np.uint64))


def _hash(*parts: _Words) -> int:
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part.data)
    return (int.from_bytes(found.digest(), "little") >> 2) or 1


def _parities(tensor: torch.Tensor) -> tuple[_Words, _Words]:
    """Returns the exclusive ors of the columns of its words in rows, and of the rows."""
    data = _bytes_of(tensor)
    whole = len(data) & ~7
    words, end = data[:whole].view(np.uint64), whole // (8 * _COLUMNS) * _COLUMNS
    columns, rows = np.zeros(min(len(words) + 1, _COLUMNS), np.uint64), list[_Words]()
    for start in range(0, end, _BLOCK):  # each is read twice, the second time from a cache
        table = words[start : min(start + _BLOCK, end)].reshape(-1, _COLUMNS)
        columns ^= np.bitwise_xor.reduce(table, axis=0)
        rows.append(np.bitwise_xor.reduce(table, axis=1))
    rest = words[end:]
    if whole < len(data):
        last = np.zeros(8, np.uint8)
        last[: len(data) - whole] = data[whole:]
        rest = np.append(rest, last.view(np.uint64))
    columns[: len(rest)] ^= rest
    rows.append(np.bitwise_xor.reduce(rest, keepdims=True))
    return columns, np.concatenate(rows)


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    flat = tensor.cpu().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # of one element or none, which counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    data: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return data
