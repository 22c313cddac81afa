"""The commands of this package: their parsers, with every option and help text."""

from __future__ import annotations

from trireme.cli.command import Command, Parser, add_option
from trireme.launch.engines import all_options


def _run() -> Parser:
    parser = Parser(
        "run",
        "[OPTIONS] SCRIPT|-m MODULE [ARGS...]",
        "Starts SCRIPT as the workers of a job, with its parameter servers and its coordinator, on "
        "this host or where --on says, and returns when all tasks have ended. At the first Ctrl-C "
        "the workers save and end; at the second, all tasks end at once. Each option may also be "
        "set by an environment variable such as TRIREME_WORKERS, or in trireme.toml or "
        "pyproject.toml ([tool.trireme]).",
    )
    for option in all_options():
        add_option(parser, option)
    parser.add("--config FILE", "read options from FILE instead of trireme.toml or pyproject.toml")
    parser.add_module()
    parser.add(
        "--dry-run",
        "print every option with its origin and the layout of the model; do not train",
        action="store_true",
    )
    return parser


RUN = Command(
    "start a job, on this host or on Ray: workers, parameter servers, coordinator",
    _run,
    "trireme.cli.run:main",
)
