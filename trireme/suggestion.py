"""Suggestions for misspelt words in error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["suggestion"]


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns ` (did you mean X?)` if a known word is similar, else an empty string."""
    close = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
