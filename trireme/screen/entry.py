"""The command `top`, as its entry point declares it."""

from __future__ import annotations

from trireme.cli.command import Command, Parser


def _parser() -> Parser:
    parser = Parser(
        "top",
        "RUN",
        "Shows the running job in the run directory RUN: its tasks, their steps and phases, and "
        "which tasks wait for which; of a job that has ended how it was at its end. Without a "
        "terminal it prints a line each second. Ctrl-C ends it.",
    )
    parser.add("RUN", "a run directory")
    return parser


TOP = Command("watch a running job", _parser, "trireme.screen.command:main")
