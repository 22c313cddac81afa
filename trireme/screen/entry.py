"""The commands `status` and `top`, as their entry points declare them."""

from __future__ import annotations

from trireme.cli.command import Command, Parser


def _status() -> Parser:
    parser = Parser(
        "status", "[--json] RUN", "Shows the status of the job in the run directory RUN."
    )
    parser.add("RUN", "a run directory")
    parser.add("--json", "print JSON", action="store_true")
    return parser


def _top() -> Parser:
    parser = Parser(
        "top",
        "RUN",
        "Shows the running job in the run directory RUN: its tasks, their steps and phases, and "
        "which tasks wait for which; of a job that has ended how it was at its end. Without a "
        "terminal it prints a line each second. Ctrl-C ends it.",
    )
    parser.add("RUN", "a run directory")
    return parser


TOP = Command("watch a running job", _top, "trireme.screen.command:main")
STATUS = Command("show the status of a job", _status, "trireme.screen.status:main")
