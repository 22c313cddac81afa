"""Kernels that write rows as text."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trireme.tables.compiled import compiled

Text = npt.NDArray[np.uint8]

_ZERO, _ONE, _SPACE, _COLON, _NEWLINE, _TAB, _LETTER = 48, 49, 32, 58, 10, 9, 87
_HEX_DIGITS = 8


@compiled
def libsvm_rows(
    labels: npt.NDArray[np.float32],
    bounds: npt.NDArray[np.int64],
    keys: npt.NDArray[np.int64],
    text: Text,
) -> int:
    """Writes rows whose labels are 0 or 1 and whose values are all 1; returns the length."""
    at = 0
    for row in range(len(labels)):
        text[at] = _ONE if labels[row] > 0 else _ZERO
        at += 1
        for entry in range(bounds[row], bounds[row + 1]):
            text[at] = _SPACE
            at = whole_number(keys[entry], text, at + 1)
            text[at], text[at + 1] = _COLON, _ONE
            at += 2
        text[at] = _NEWLINE
        at += 1
    return at


@compiled
def criteo_rows(
    labels: npt.NDArray[np.bool_],
    counts: npt.NDArray[np.int64],
    categories: npt.NDArray[np.int64],
    text: Text,
) -> int:
    """Writes rows of Criteo's format; returns the length.

    Args:
        labels: of shape (rows,).
        counts: of shape (rows, 13); -1 for one that is missing.
        categories: of shape (rows, 26), below 2^32; -1 for one that is missing.
        text: filled.
    """
    at = 0
    for row in range(len(labels)):
        text[at] = _ONE if labels[row] else _ZERO
        at += 1
        for column in range(counts.shape[1]):
            text[at] = _TAB
            at += 1
            if counts[row, column] >= 0:
                at = whole_number(counts[row, column], text, at)
        for column in range(categories.shape[1]):
            text[at] = _TAB
            at += 1
            if categories[row, column] >= 0:
                at = _hexadecimal(categories[row, column], text, at)
        text[at] = _NEWLINE
        at += 1
    return at


@compiled
def whole_number(number: int, text: Text, at: int) -> int:
    """Writes a number of 0 or more; returns the place after it."""
    digits, rest = 1, number
    while rest >= 10:
        rest //= 10
        digits += 1
    for place in range(digits):
        text[at + digits - 1 - place] = _ZERO + number % 10
        number //= 10
    return at + digits


@compiled
def _hexadecimal(number: int, text: Text, at: int) -> int:
    for place in range(_HEX_DIGITS):
        digit = (number >> (4 * (_HEX_DIGITS - 1 - place))) & 15
        text[at + place] = digit + (_ZERO if digit < 10 else _LETTER)
    return at + _HEX_DIGITS
