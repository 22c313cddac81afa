"""Writes what is generated in the pages, and checks every link between them.

python docs/build.py            write what is generated, then check
python docs/build.py --check    write nothing; status 1 if anything is out of date or broken

Generated are docs/cli.md as a whole, and what stands between a pair of comments such as
`<!-- generated: messages -->` and `<!-- end: messages -->` in other pages.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import get_args
from unittest import mock

import chinese_tables
import guide_figures
import guide_tables
import msgspec
import push_drawing
import push_path
import reference_text
import site_pages
import translations

from trireme import plugins
from trireme.cli.command import COMMANDS, Parser
from trireme.cluster import messages as cluster_messages
from trireme.cluster import view as cluster_view
from trireme.job_config import declared
from trireme.ps import lending_messages, snapshot_messages
from trireme.ps import messages as ps_messages
from trireme.ps import rule as ps_rule
from trireme.ps.leader import decisions
from trireme.ps.replication import messages as replication_messages
from trireme.ray.options import RayOptions
from trireme.wire import handshake
from trireme.wire.message import Message

ROOT = Path(__file__).resolve().parent.parent
COMMAND_LINE = ROOT / "docs" / "cli.md"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.MULTILINE)


def main() -> int:
    """Returns 0 if all is well, else 1."""
    problems = []
    for page, text in generated():
        if page.exists() and page.read_text(encoding="utf-8") == text:
            continue
        if "--check" in sys.argv[1:]:
            problems.append(f"{page.relative_to(ROOT)} is out of date: run `make pages`")
        else:
            page.write_text(text, encoding="utf-8")
    problems += [
        f"docs/images/guides/{name}.svg is out of date: run `make docs`"
        for name in guide_figures.stale()
    ]
    problems += [*site_pages.unlisted(pages()), *broken_links()]
    for problem in problems:
        print(problem, file=sys.stderr)
    for line in translations.older():
        print(line)  # no problem of the page that was changed
    if not problems:
        print(f"docs: {len(pages())} pages, every link leads somewhere")
    return 1 if problems else 0


# What is generated -----------------------------------------------------------------------------


def generated() -> Iterator[tuple[Path, str]]:
    """Yields each page that has something generated in it, and its text as it should be."""
    yield COMMAND_LINE, command_line_page()
    path = push_path.follow()
    yield ROOT / "docs" / "images" / "push.svg", push_drawing.drawing(path)
    regions = (
        *REGIONS,
        *guide_tables.REGIONS,
        *chinese_tables.regions(),
        ("docs/architecture.md", "push", lambda: push_path.count(path)),
    )
    pages: dict[Path, str] = {}
    for name, region, write in regions:
        page = ROOT / name
        text = pages.get(page) or page.read_text(encoding="utf-8")
        pages[page] = with_region(text, region, write())
    yield from pages.items()
    yield from recipe_pages()


def recipe_pages() -> Iterator[tuple[Path, str]]:
    """Yields the pages of recipes, with how their programs differ from plain ones."""
    for page in sorted((ROOT / "docs" / "recipes").glob("[a-z]*.md")):
        program = (ROOT / "recipes" / f"{page.stem}.py").read_text(encoding="utf-8")
        plain = (ROOT / "recipes" / f"{page.stem}_plain.py").read_text(encoding="utf-8")
        changed = difflib.unified_diff(plain.splitlines(), program.splitlines(), n=0, lineterm="")
        lines = [line for line in changed if not line.startswith(("---", "+++", "@@"))]
        difference = "\n".join(["```diff", *lines, "```"])
        yield page, with_region(page.read_text(encoding="utf-8"), "difference", difference)


def with_region(text: str, region: str, content: str) -> str:
    """Returns a page with the content of one region replaced.

    Raises:
        ValueError: the page has no such region.
    """
    begin, end = f"<!-- generated: {region} -->", f"<!-- end: {region} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no region {region}: it wants {begin} and {end}")
    return f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}"


# The command line ------------------------------------------------------------------------------


def command_line_page() -> str:
    """Returns the page that says what each command and option is."""
    parts = [
        "# The command line",
        "",
        "<!-- Written by docs/build.py from the parser itself: change that, then `make pages`. -->",
        "",
        "Exit status: 0 the run finished; 1 a task failed; 2 bad usage; 130 interrupted after a "
        "clean save; 143, of a worker, it left as SIGTERM asked it to.",
        "",
    ]
    with own_plugins():
        for name, each in COMMANDS.all().items():
            parts += [*command(name, each.parser(), each.summary), ""]
            if name == "run":
                parts += [*ray_options(), ""]
    return "\n".join([*parts, *where_values_come_from()])


@contextmanager
def own_plugins() -> Iterator[None]:
    """Has the plug-ins that `pyproject.toml` declares, and no others, whatever is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def points(group: str) -> tuple[EntryPoint, ...]:
        own = project["entry-points"].get(group, {})
        return tuple(EntryPoint(name, what.partition(" ")[0], group) for name, what in own.items())

    def forget() -> None:
        plugins._names.cache_clear()
        plugins._load.cache_clear()

    forget()
    try:
        with mock.patch.object(plugins, "_points", points):
            yield
    finally:
        forget()


def command(name: str, parser: Parser, summary: str) -> Iterator[str]:
    """Yields the section of one command; the options of `run` that others have stand there."""
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
    told = set() if name == "run" else set(option_rows(COMMANDS.load("run").parser()))
    rows = option_rows(parser)
    shared = [written for row, written in rows.items() if row in told and written.startswith("`--")]
    yield from (row for row, written in rows.items() if written not in shared)
    if shared:
        names = ", ".join(written.split()[0].strip("`,") for written in shared)
        most = "--ps" in names and "--on" in names
        yield ""
        yield f"As for [trireme run](#trireme-run): {'its options' if most else f'`{names}`'}."


def option_rows(parser: Parser) -> dict[str, str]:
    """Returns the row of each option or argument, with how that is written."""
    return {
        f"| {words(action)} | {action.help} |": words(action)
        for action in parser.arguments
        if action.help != argparse.SUPPRESS and not action.dest.startswith("ray_")
    }


def ray_options() -> Iterator[str]:
    """Yields the options of `--on ray`."""
    yield "With `--on ray`, where `trireme-train[ray]` is installed:"
    yield ""
    yield "| option | what it does |"
    yield "| --- | --- |"
    for option in declared(RayOptions, engine="ray"):
        yield f"| `{f'--{option.name} {option.metavar}'.strip()}` | {option.help} |"


def words(action: argparse.Action) -> str:
    """Returns how an option or argument is written."""
    value = str(action.metavar or "") if action.nargs != 0 else ""
    if action.nargs == "?":
        value = f"[{value}]"
    value = value.replace("|", "\\|")
    names = [f"`{f'{name} {value}'.strip()}`" for name in action.option_strings]
    return ", ".join(names) or f"`{value}`"


def where_values_come_from() -> Iterator[str]:
    """Yields what the options' other sources are."""
    yield "## Where values come from"
    yield ""
    yield (
        "Command line over environment over file over default. The file is `trireme.toml` in the "
        "current directory, else the table `[tool.trireme]` of its `pyproject.toml`, or what "
        "`--config` names. `--dry-run` prints each value with its origin."
    )
    yield ""
    yield (
        "The variable of an option is `TRIREME_` and its name in capitals, with `_` for `-`: "
        "`TRIREME_MAX_RESTARTS`. Its key in the file is its name: `max-restarts`."
    )
    yield ""
    yield (
        "A job started by hand takes its secret from `--secret-file`, else from `TRIREME_SECRET`, "
        "else, where every task is on one host, from a file of the user's own "
        "(`$XDG_CONFIG_HOME/trireme/secret`). `TRIREME_TASK` is what a launcher tells a task; "
        "nobody sets it by hand. `NO_COLOR` turns colours off. `OMP_NUM_THREADS`, where it is set, "
        "overrides one BLAS thread a task."
    )
    yield ""


# The layout ------------------------------------------------------------------------------------

FOLDERS = {
    "examples": "programs to read and to start from",
    "recipes": "programs with other libraries, each beside the plain one",
    "benchmarks": "speed, each figure beside that of a peer or a limit",
    "docs": "design, protocol, operations, decisions",
    "tests": "folders as in the package; integration/ starts real processes",
}
"""The folders that follow the package."""


def layout() -> str:
    """Returns the packages and other folders of the project, with the first sentence of each."""
    packages = sorted((ROOT / "trireme").glob("*/__init__.py"))
    rows = [(f"  {path.parent.name}/", first_sentence(path)) for path in packages]
    return drawn(
        [("trireme/", ""), *rows, *((f"{name}/", comment) for name, comment in FOLDERS.items())]
    )


def examples() -> str:
    """Returns the examples, with the first sentence of each."""
    lines = ["| program | what it is |", "| --- | --- |"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        lines.append(f"| [{path.name}]({path.name}) | {first_sentence(path)} |")
    return "\n".join(lines)


def drawn(rows: list[tuple[str, str]]) -> str:
    """Returns names and what they are, in two columns."""
    width = max(len(name) for name, comment in rows if comment) + 2
    return "\n".join(["```", *(f"{name:<{width}}{text}".rstrip() for name, text in rows), "```"])


def first_sentence(path: Path) -> str:
    """Returns the first sentence of a module's docstring, without its full stop."""
    return first_sentence_of(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")


def first_sentence_of(docstring: str) -> str:
    """Returns the first sentence of a docstring, without its full stop."""
    return re.split(r"\.\s|\.$", docstring.partition("\n\n")[0].replace("\n", " "))[0]


# The messages ----------------------------------------------------------------------------------

CONVERSATIONS = (
    ("The handshake", (handshake,)),
    ("Tasks and the coordinator", (cluster_messages,)),
    (
        "Workers and parameter servers",
        (ps_messages, snapshot_messages, lending_messages, decisions, replication_messages),
    ),
)
VALUE_MODULES = (cluster_view, cluster_messages, ps_rule, ps_messages, snapshot_messages, decisions)
CHOICES = ("Outcome", "Phase", "TaskState", "Refusal")
"""Names that the cluster's messages give to a choice of words."""


def messages() -> str:
    """Returns a section for each conversation with its messages, and one for their values."""
    parts: list[str] = []
    for title, modules in CONVERSATIONS:
        parts += [f"## {title}", "", "| kind | message | fields | |", "| --- | --- | --- | --- |"]
        structs = [kind for module in modules for kind in structs_of(module)]
        found = [kind for kind in structs if issubclass(kind, Message) and kind.kind]
        for message in sorted(found, key=lambda message: message.kind):
            parts.append(f"| {message.kind} {struct_row(message)}")
        parts.append("")
    parts += ["## Values inside messages", "", *choices(), ""]
    parts += ["| value | fields | |", "| --- | --- | --- |"]
    for module in VALUE_MODULES:
        parts += [struct_row(each) for each in structs_of(module) if not issubclass(each, Message)]
    return "\n".join(parts)


def choices() -> Iterator[str]:
    """Yields the table of the types that are a choice of words."""
    yield "| type | one of |"
    yield "| --- | --- |"
    for name in CHOICES:
        words = get_args(getattr(cluster_messages, name))
        yield f"| `{name}` | {', '.join(f'`{word}`' for word in words)} |"


def structs_of(module: ModuleType) -> list[type[msgspec.Struct]]:
    """Returns the structs that a module defines, in its order."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == module.__name__
    ]


def struct_row(struct: type[msgspec.Struct]) -> str:
    """Returns a row of a table: the struct's name, its fields in their order, and what it is."""
    config = struct.__struct_config__
    shape = "" if config.array_like else "a map, by the fields' names; "
    if config.tag is not None:
        shape = f"an array whose first item is `{config.tag}`; "
    fields = ", ".join(
        f"{field.name}{'' if field.required else '?'}" for field in msgspec.structs.fields(struct)
    )
    says = first_sentence_of(inspect.getdoc(struct) or "")
    return f"| `{struct.__name__}` | {f'`{fields}`' if fields else ''} | {shape}{says} |"


REGIONS: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("README.md", "layout", layout),
    ("examples/README.md", "examples", examples),
    ("docs/protocol.md", "messages", messages),
    ("docs/reference/session.md", "session", reference_text.text),
)
"""Page, region, and what writes it."""


# Links -----------------------------------------------------------------------------------------


def pages() -> list[Path]:
    """Returns every page of the project."""
    return sorted(
        [
            *ROOT.glob("*.md"),
            *ROOT.glob("examples/*.md"),
            *(ROOT / "benchmarks").rglob("*.md"),
            *(ROOT / "docs").rglob("*.md"),
        ]
    )


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
