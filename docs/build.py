"""Writes what is generated in docs/, and checks every link between the pages.

python docs/build.py            write docs/cli.md, then check
python docs/build.py --check    write nothing; status 1 if anything is out of date or broken
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from trireme.cli.parser import COMMANDS, Parser
from trireme.launch.settings import OPTIONS

ROOT = Path(__file__).resolve().parent.parent
COMMAND_LINE = ROOT / "docs" / "cli.md"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def main() -> int:
    """Returns 0 if all is well, else 1."""
    check = "--check" in sys.argv[1:]
    text = command_line_page()
    problems = []
    if check and (not COMMAND_LINE.exists() or COMMAND_LINE.read_text(encoding="utf-8") != text):
        problems.append("docs/cli.md is out of date: run `make docs`")
    elif not check:
        COMMAND_LINE.write_text(text, encoding="utf-8")
    problems += broken_links()
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"docs: {len(pages())} pages, every link leads somewhere")
    return 1 if problems else 0


# The command line ------------------------------------------------------------------------------


def command_line_page() -> str:
    """Returns the page that says what each command and option is."""
    parts = [
        "# The command line",
        "",
        "<!-- Written by docs/build.py from the parser itself: change that, then `make docs`. -->",
        "",
        "Exit status: 0 the run finished; 1 a task failed; 2 bad usage; 130 interrupted after a "
        "clean save.",
        "",
    ]
    for name, (build, summary) in COMMANDS.items():
        parts += [*command(name, build(), summary), ""]
    return "\n".join([*parts, *where_values_come_from()])


def command(name: str, parser: Parser, summary: str) -> Iterator[str]:
    """Yields the section of one command."""
    yield f"## trireme {name}"
    yield ""
    yield f"{summary[0].upper()}{summary[1:]}."
    yield ""
    yield "```"
    yield (parser.usage or "").strip()
    yield "```"
    yield ""
    yield parser.description or ""
    yield ""
    yield "| option | what it does |"
    yield "| --- | --- |"
    for action in parser.arguments:
        if action.help != argparse.SUPPRESS:
            yield f"| {words(action)} | {action.help} |"


def words(action: argparse.Action) -> str:
    """Returns how an option or argument is written."""
    value = str(action.metavar or "") if action.nargs != 0 else ""
    if action.nargs == "?":
        value = f"[{value}]"
    value = value.replace("|", "\\|")
    names = [f"`{f'{name} {value}'.strip()}`" for name in action.option_strings]
    return ", ".join(names) or f"`{value}`"


def where_values_come_from() -> Iterator[str]:
    """Yields the table of the options' other sources."""
    yield "## Where values come from"
    yield ""
    yield (
        "Command line over environment over file over default. The file is `trireme.toml` in the "
        "current directory, else the table `[tool.trireme]` of its `pyproject.toml`, or what "
        "`--config` names. `--dry-run` prints each value with its origin."
    )
    yield ""
    yield "| option | environment | key in the file | default |"
    yield "| --- | --- | --- | --- |"
    for option in OPTIONS:
        default = "" if option.default is None else f"`{option.default}`"
        yield f"| `--{option.name}` | `{option.variable}` | `{option.name}` | {default} |"
    yield ""
    yield (
        "A job started by hand takes its secret from `--secret-file`, else from `TRIREME_SECRET`, "
        "else, where every task is on one host, from a file of the user's own "
        "(`$XDG_CONFIG_HOME/trireme/secret`). `TRIREME_TASK` is what a launcher tells a task; "
        "nobody sets it by hand. `NO_COLOR` does what it says. `OMP_NUM_THREADS`, where it is set, "
        "overrides one BLAS thread a task."
    )
    yield ""


# Links -----------------------------------------------------------------------------------------


def pages() -> list[Path]:
    """Returns every page of the project."""
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def broken_links() -> list[str]:
    """Returns one line for each link, between pages or to a heading, that leads nowhere."""
    return [problem for page in pages() for problem in broken_in(page)]


def broken_in(page: Path) -> Iterator[str]:
    """Yields the broken links of one page."""
    text = CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in LINK.findall(text):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue  # another site: not asked, so that this needs no network
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{page.relative_to(ROOT)}: {target} leads to no file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{page.relative_to(ROOT)}: {target} leads to no heading"


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.replace(" ", "-") for heading in headings}


if __name__ == "__main__":
    sys.exit(main())
