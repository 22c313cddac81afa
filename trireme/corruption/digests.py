"""Digests of tensors' bytes, and parities that say which word has changed, where it is one.

The 64-bit words of a tensor lie in rows of a table. The exclusive ors of each row and each column
take one pass at the speed of memory, and their hash is the digest. A word that has changed shows in
its row and its column, with the bits that differ, so that it can be put back: a product code.
Source: Elias, Error-Free Coding (IRE Transactions on Information Theory 4(4), 1954).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
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
class Flip:
    """One word that has changed."""

    tensor: int  # which of the tensors
    word: int  # of 64 bits, of that tensor as it lies in memory
    bits: int  # those that differ

    def within(self, size: int) -> tuple[int, int]:
        """Returns which element of so many bytes has its lowest bit, and which bit that is."""
        bit = (self.bits & -self.bits).bit_length() - 1
        byte = 8 * self.word + bit // 8
        return byte // size, 8 * (byte % size) + bit % 8


class Seal:
    """The parities of tensors as they are now, and their digest."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._parities = [_parities(_bytes_of(to_local(each.detach()))) for each in tensors]
        found = hashlib.blake2b(digest_size=8)
        for columns, rows in self._parities:
            found.update(len(rows).to_bytes(8, "little"))
            found.update(columns.data)
            found.update(rows.data)
        # As messages carry it: less than 2^62, and not 0, which is none.
        self.digest = (int.from_bytes(found.digest(), "little") >> 2) or 1

    def find(self, tensors: Sequence[torch.Tensor]) -> Flip | None:
        """Returns the one word that differs now; None if it is not one."""
        found = None
        for place, (before, now) in enumerate(
            zip(self._parities, Seal(tensors)._parities, strict=True)
        ):
            columns, rows = (a ^ b for a, b in zip(before, now, strict=True))
            column, row = np.flatnonzero(columns), np.flatnonzero(rows)
            if not len(column) and not len(row):
                continue
            alone = found is None and len(column) == len(row) == 1
            if not alone or columns[column[0]] != rows[row[0]]:
                return None
            found = Flip(place, int(row[0]) * _COLUMNS + int(column[0]), int(rows[row[0]]))
        return found


def digest(tensors: Sequence[torch.Tensor]) -> int:
    """Returns a number of 62 bits that depends on each bit of tensors, and its place; never 0."""
    return Seal(tensors).digest


def mend(tensors: Sequence[torch.Tensor], flip: Flip) -> None:
    """Puts one word back, where the tensor lies."""
    tensor = to_local(tensors[flip.tensor].detach())
    data = _bytes_of(tensor)
    word = data[8 * flip.word : 8 * flip.word + 8]
    word ^= np.frombuffer(flip.bits.to_bytes(8, "little"), np.uint8)[: len(word)]
    if data.ctypes.data != tensor.data_ptr():  # it lies on another device, or in another order
        tensor.copy_(torch.from_numpy(data).view(tensor.dtype).reshape(tensor.shape))


def _parities(data: NDArray[np.uint8]) -> tuple[_Words, _Words]:
    """Returns the exclusive ors of the columns of bytes in rows, and of the rows."""
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
