"""Tells which translated pages are older than their originals.

python docs/translations.py                   one line for each page that is older; status 1 if any
python docs/translations.py --accept PAGE...  notes that pages say what their originals say now

A translation names its original, and the digest of the text that it translates, in its first line:
`<!-- translation of README.md at 0123456789ab -->`. What is generated in the original does not
count, nor its toctree.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LANGUAGES = ("zh",)
STAMP = re.compile(r"\A<!-- translation of (\S+) at ([0-9a-f]+) -->\n")
GENERATED = re.compile(r"<!-- generated: (.+?) -->.*?<!-- end: \1 -->", re.DOTALL)
TOCTREE = re.compile(r"^```\{toctree\}\n.*?^```\n", re.DOTALL | re.MULTILINE)


def translations() -> list[Path]:
    """Returns all translated pages."""
    return sorted(
        page for language in LANGUAGES for page in (ROOT / "docs" / language).rglob("*.md")
    )


def older(pages: Sequence[Path] | None = None) -> Iterator[str]:
    """Yields a line for each page that does not translate what its original says now.

    Args:
        pages: the translations to look at; None for all.
    """
    for page in translations() if pages is None else pages:
        name = page.relative_to(ROOT)
        stamp = STAMP.match(page.read_text(encoding="utf-8"))
        if stamp is None:
            yield (
                f"{name} does not name its original: begin it with "
                "`<!-- translation of PAGE at 000000000000 -->`"
            )
        elif not (ROOT / stamp[1]).is_file():
            yield f"{name} translates {stamp[1]}, which is not there any more: remove or rename it"
        elif stamp[2] != digest(ROOT / stamp[1]):
            yield (
                f"{name} is older than {stamp[1]}: translate what has changed, then "
                f"`python docs/translations.py --accept {name}`"
            )


def accept(page: Path) -> None:
    """Notes that a page translates what its original says now.

    Raises:
        ValueError: the page does not name its original, or that is not there.
    """
    text = page.read_text(encoding="utf-8")
    stamp = STAMP.match(text)
    if stamp is None or not (ROOT / stamp[1]).is_file():
        raise ValueError(next(older([page])))
    line = f"<!-- translation of {stamp[1]} at {digest(ROOT / stamp[1])} -->\n"
    page.write_text(line + text[stamp.end() :], encoding="utf-8")


def digest(original: Path) -> str:
    """Returns twelve hexadecimal digits that change when the original's text does."""
    text = TOCTREE.sub("", GENERATED.sub("", original.read_text(encoding="utf-8")))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def main(words: Sequence[str] | None = None) -> int:
    """Returns 0 if no page is older than its original, else 1."""
    parser = argparse.ArgumentParser(description="Which translations are older than their pages?")
    parser.add_argument("--accept", nargs="+", type=Path, metavar="PAGE", default=[])
    for page in parser.parse_args(words).accept:
        try:
            accept(page.resolve())
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
            return 2
    lines = list(older())
    print("\n".join(lines) or f"{len(translations())} translations say what their originals say")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
