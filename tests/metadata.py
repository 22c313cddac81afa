"""Metadata of distributions that tests pretend are installed."""

from __future__ import annotations

from pathlib import Path

from trireme import plugins


def write_metadata(folder: Path, name: str, *, points: str = "", more: str = "") -> None:
    """Writes the metadata of version 1.5 of a distribution into a folder of `sys.path`.

    Args:
        folder: the folder.
        name: the distribution.
        points: its `entry_points.txt`.
        more: further lines of its `METADATA`.
    """
    info = folder / f"{name}-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n{more}")
    (info / "entry_points.txt").write_text(points)
    forget()


def forget() -> None:
    """Clears what `trireme.plugins` has cached of the installed packages.

    A test restores `sys.path` first: a thread of an earlier test may fill the caches in between.
    """
    plugins._read.cache_clear()
    plugins._points.cache_clear()
    plugins._names.cache_clear()
    plugins._load.cache_clear()
