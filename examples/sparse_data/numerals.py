"""Numbers in text, for the kernels that parse: each returns a number and where its text ends."""

from __future__ import annotations

import numpy as np

from trireme.tables.compiled import compiled

MINUS, PLUS, DOT, ZERO, NINE = 45, 43, 46, 48, 57
_SMALL_E, _LARGE_E = 101, 69
_MOST_DIGITS = 18  # what an int64 always holds
_POWERS = 10.0 ** np.arange(309)
_LAST_POWER = 308


@compiled
def whole_number(data: np.ndarray, at: int, stop: int) -> tuple[int, int]:
    """Parses a whole number without a sign.

    Returns:
        The number and the place after it; the place `at` where there is none, or one of more than
        18 digits.
    """
    number, place = 0, at
    while place < stop and ZERO <= data[place] <= NINE:
        number = number * 10 + (int(data[place]) - ZERO)
        place += 1
    return (number, place) if place - at <= _MOST_DIGITS else (number, at)


@compiled
def real_number(data: np.ndarray, at: int, stop: int) -> tuple[float, int]:
    """Parses a number such as -12, 0.5 or 1e-3, within a unit of a float64's last digit.

    Returns:
        The number and the place after it; the place `at` where there is none, or an infinite one.
    """
    if at < stop and ZERO <= data[at] <= NINE and (at + 1 == stop or data[at + 1] < DOT):
        return float(int(data[at]) - ZERO), at + 1  # one digit: most of counts and of indicators
    place = at
    negative = place < stop and data[place] == MINUS
    if place < stop and (negative or data[place] == PLUS):
        place += 1
    mantissa, exponent, digits, place = _decimal(data, place, stop)
    if digits == 0:
        return 0.0, at
    if place + 1 < stop and (data[place] == _SMALL_E or data[place] == _LARGE_E):
        power, end = _exponent(data, place + 1, stop)
        if end > place + 1:
            exponent, place = exponent + power, end
    value = _scaled(float(mantissa), exponent)
    if np.isinf(value):
        return 0.0, at
    return (-value if negative else value), place


@compiled
def _decimal(data: np.ndarray, place: int, stop: int) -> tuple[int, int, int, int]:
    """Parses digits with at most one dot: mantissa, exponent, number of digits, end."""
    mantissa = exponent = digits = kept = 0
    fraction = False
    while place < stop:
        letter = data[place]
        if letter == DOT and not fraction:
            fraction = True
        elif ZERO <= letter <= NINE:
            digits += 1
            if kept < _MOST_DIGITS:
                mantissa = mantissa * 10 + (int(letter) - ZERO)
                kept += 1 if mantissa > 0 else 0
                exponent -= 1 if fraction else 0
            else:
                exponent += 0 if fraction else 1
        else:
            break
        place += 1
    return mantissa, exponent, digits, place


@compiled
def _exponent(data: np.ndarray, at: int, stop: int) -> tuple[int, int]:
    """Parses what follows the letter e; the end is `at` where that is no number."""
    place = at
    negative = data[place] == MINUS
    if negative or data[place] == PLUS:
        place += 1
    power, end = whole_number(data, place, stop)
    if end == place:
        return 0, at
    return (-power if negative else power), end


@compiled
def _scaled(value: float, exponent: int) -> float:
    """Returns value * 10^exponent."""
    if value == 0.0 or exponent == 0:
        return value
    if exponent > 0:
        return value * float(_POWERS[exponent]) if exponent <= _LAST_POWER else float(np.inf)
    if -exponent <= _LAST_POWER:
        return value / float(_POWERS[-exponent])
    if -exponent <= 2 * _LAST_POWER:
        return value / float(_POWERS[_LAST_POWER]) / float(_POWERS[-exponent - _LAST_POWER])
    return 0.0
