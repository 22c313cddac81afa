"""Writes the pictures that `trireme graph` asks for."""

from __future__ import annotations

import os
from pathlib import Path

from trireme.errors import ConfigurationError
from trireme.graph.drawing.picture import Picture
from trireme.graph.drawing.svg import svg
from trireme.graph.drawing.text import text
from trireme.launch.config.task_config import DrawRequest


def write(picture: Picture, request: DrawRequest) -> str:
    """Writes the file of a request, and returns the text to print."""
    if request.svg is None:
        return text(picture)
    path = Path(request.svg)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(svg(picture), encoding="utf-8")
    except OSError as error:
        raise _refusal(request.svg, error.strerror or str(error)) from error
    return f"{text(picture)}\n\nwrote {request.svg}"


def check_file(name: str) -> None:
    """Checks, before anything is computed, that a file can probably be written."""
    path = Path(name)
    if path.is_dir():
        raise _refusal(name, "it is a directory")
    there = next(each for each in path.absolute().parents if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise _refusal(name, f"nothing can be written in {there}")


def _refusal(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the picture {name} cannot be written: {why}. Name a file in a directory that you may "
        "write to"
    )
