"""Runs examples/digits.py, and prints a line after its first step."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import trireme

FIRST_STEP = "the first step is made"


def announce_first_step() -> None:
    """Has the first call of `session.step` in this process print a line when it returns."""
    step = trireme.Session.step

    def first(session: trireme.Session, *args: Any, **options: Any) -> Any:
        trireme.Session.step = step  # type: ignore[method-assign]
        result = step(session, *args, **options)
        print(FIRST_STEP, flush=True)
        return result

    trireme.Session.step = first  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    announce_first_step()
    example = Path(__file__).resolve().parents[2] / "examples" / "digits.py"
    runpy.run_path(str(example), run_name="__main__")
