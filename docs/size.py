"""Prints how large the project is: lines of the core and of each plug-in, words of the pages.

    python docs/size.py           lines, words, and the files that an option touches
    python docs/size.py --push    also the functions on the way of a push, which runs a small job

Lines are those of `*.py` in `trireme/`, docstrings included. Words of a page are what `wc -w`
counts, code and generated parts included. That counts a run of Chinese characters between two
spaces as one word, so the characters are printed too.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "trireme"
MOST_LINES = {"core": 32_000, "trireme/": 58_000 + 2_050 + 1_900}
"""The second with what `trireme verify` and the watch may add, and engines of clusters so far."""
MOST_WORDS = 90_000 + 600  # what pages say of further clusters
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PLUGINS: dict[str, tuple[str, ...]] = {
    name: tuple(file.removeprefix("trireme/") + "/" for file in about["files"])
    for name, about in PROJECT["tool"]["plugins"].items()
}
"""Each plug-in with the folders of its files in `trireme/`."""
PAGES: dict[str, tuple[str, ...]] = {
    "README, CONTRIBUTING, CHANGELOG, SECURITY": ("*.md",),
    "docs/decisions, docs/log.md": ("docs/decisions/*.md", "docs/log.md"),
    "docs/zh": ("docs/zh/**/*.md",),
    "docs/reference, docs/cli.md, docs/protocol.md": (
        *("docs/reference/*.md", "docs/cli.md", "docs/protocol.md"),
    ),
    "the rest of docs/": ("docs/**/*.md",),
}
"""Groups of pages; a page belongs to the first group that has it."""
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def main() -> None:
    """Prints the tables."""
    print("\n".join([*line_table(), "", *word_table(), "", *option_table()]))
    if "--push" in sys.argv[1:]:
        import push_path

        counted = push_path.count(push_path.follow(push_path.ONE))
        print(f"\nthe way of a push: {counted} At most 30 in 16.")


def part_of(path: str) -> str:
    """Returns the plug-in that has a file of `trireme/`, or `core`.

    Args:
        path: the path of the file in `trireme/`.
    """
    for name, beginnings in PLUGINS.items():
        if path.startswith(beginnings):
            return name
    return "core"


def line_table() -> Iterator[str]:
    """Yields the lines of each package of the core, of each plug-in, and their sums."""
    lines: Counter[tuple[str, str]] = Counter()
    files: Counter[tuple[str, str]] = Counter()
    for path, text in sources():
        part = part_of(path)
        package = path.split("/")[0] if "/" in path else "(files)"
        key = (part, package if part == "core" else "")
        lines[key] += len(text.splitlines())
        files[key] += 1
    for part, package in sorted(lines, key=lambda key: (key[0] != "core", key)):
        key = (part, package)
        yield row(f"{part} {package}".strip(), lines[key], f"{files[key]} files")
    core = sum(count for (part, _), count in lines.items() if part == "core")
    for name, count in (("core", core), ("trireme/", lines.total())):
        yield row(f"all of {name}", count, f"at most {MOST_LINES[name]:,}")


def word_table() -> Iterator[str]:
    """Yields the words of each group of pages, and their sum."""
    seen: set[Path] = set()
    total = 0
    for name, patterns in PAGES.items():
        pages = {page for pattern in patterns for page in ROOT.glob(pattern)} - seen
        seen |= pages
        texts = [page.read_text(encoding="utf-8") for page in pages]
        words = sum(len(text.split()) for text in texts)
        chinese = sum(len(CHINESE.findall(text)) for text in texts)
        total += words
        note = f", {chinese:,} Chinese characters" if chinese > 1000 else ""
        yield row(f"words of {name}", words, f"{len(pages)} pages{note}")
    yield row("all words", total, f"{len(seen)} pages, at most {MOST_WORDS:,} words")


def option_table() -> Iterator[str]:
    """Yields in how many files an option is read, and in how many its name stands at all.

    An option is read as an attribute of its group, such as `timeouts.join_timeout`. Its name may
    also be that of something else: of `start` there are many.
    """
    groups = options()
    read: dict[str, set[str]] = {option: {"job_config.py"} for option in groups}
    named: dict[str, set[str]] = {option: set() for option in groups}
    for path, text in sources():
        tree = ast.parse(text)
        for name in names(tree) & named.keys():
            named[name].add(path)
        for group, name in attributes(tree):
            if groups.get(name) == group:
                read[name].add(path)
    for what, files in (("files that read an option", read), ("files that name one", named)):
        median = round(statistics.median(len(paths) for paths in files.values()))
        yield row(what, median, f"the median of {len(files)} options")


def options() -> dict[str, str]:
    """Returns the options of a job, each with the field of `JobConfig` that holds its group."""
    tree = ast.parse((PACKAGE / "job_config.py").read_text(encoding="utf-8"))
    fields = {
        each.name: [
            node
            for node in each.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        ]
        for each in tree.body
        if isinstance(each, ast.ClassDef)
    }
    groups = {
        ast.unparse(node.annotation): ast.unparse(node.target) for node in fields["JobConfig"]
    }
    return {
        ast.unparse(node.target): groups[name]
        for name, nodes in fields.items()
        if name in groups
        for node in nodes
    }


def attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields each attribute that a file names, after the last word of what has it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node.value).rpartition(".")[2], node.attr


def names(tree: ast.AST) -> set[str]:
    """Returns the attributes, keywords, arguments and fields that a file names."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.keyword, ast.arg)) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def sources() -> Iterator[tuple[str, str]]:
    """Yields the path in `trireme/` and the text of each source file."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")


def row(name: str, count: int, note: str) -> str:
    """Returns a line of a table."""
    return f"{name:<52}{count:>8,}  {note}"


if __name__ == "__main__":
    main()
