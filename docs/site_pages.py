"""Which pages the site has, and whether one can get to each; without Sphinx, hence quick."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INDEX = ROOT / "docs" / "index.md"
CHILDREN: dict[str, tuple[str, ...]] = {
    "docs/decisions/README": ("0*",),
    "benchmarks/README": ("results/*",),
    "docs/from_tensorflow/index": ("*",),
    "docs/from_pytorch/index": ("*",),
    "docs/questions/index": ("*",),
    "docs/zh/index": (
        "start",
        "概览 <README>",
        "指南 <guides/index>",
        "from_tensorflow/index",
        "strategies",
        "data",
        "operations",
        "troubleshooting",
    ),
    "docs/zh/guides/index": (
        "parameter_servers",
        "collectives",
        "averaging",
        "pipelines_and_graphs",
        "checkpoints",
        "*",
    ),
    "docs/zh/from_tensorflow/index": ("*",),
}
"""Pages that list other pages, and which: GitHub would show a toctree as code."""
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.DOTALL | re.MULTILINE)


def unlisted(pages: Iterable[Path]) -> list[str]:
    """Returns a line for each page that no toctree has."""
    listed = {INDEX, *reachable()}
    return [
        f"{page.relative_to(ROOT)} is in no toctree: name it, or its folder, in docs/index.md"
        for page in pages
        if page not in listed
    ]


def reachable() -> Iterator[Path]:
    """Yields the pages that the toctrees name."""
    for entry in entries(INDEX.read_text(encoding="utf-8")):
        yield from matching(INDEX.parent, entry)
    for parent, patterns in CHILDREN.items():
        for pattern in patterns:
            yield from matching((ROOT / parent).parent, target(pattern))


def entries(page: str) -> Iterator[str]:
    """Yields the entries of a page's toctrees, titles left out."""
    for block in TOCTREE.findall(page):
        for line in block.splitlines():
            if line.strip() and not line.startswith(":"):
                yield target(line.strip())


def target(entry: str) -> str:
    """Returns what an entry of a toctree names, without its title."""
    named = re.search(r"<(.*)>$", entry)
    return named[1] if named else entry


def matching(folder: Path, entry: str) -> Iterator[Path]:
    """Yields the pages that an entry names, which may be a pattern."""
    while entry.startswith("../"):
        folder, entry = folder.parent, entry.removeprefix("../")
    yield from folder.glob(f"{entry}.md")
