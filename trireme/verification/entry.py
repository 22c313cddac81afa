"""The command `verify`, and what records the runs that it compares, as entry points."""

from __future__ import annotations

from trireme.cli.command import Command, Parser, add_option
from trireme.launch.engines import all_options
from trireme.session.worker.observer import ObserverType


def _verify() -> Parser:
    parser = Parser(
        "verify",
        "[OPTIONS] [OPTIONS OF RUN] SCRIPT|-m MODULE [ARGS...]",
        "Runs SCRIPT as the job that the options of `trireme run` describe, and as one process "
        "that has the same examples, and says whether they are the same: if not, at which step and "
        "in which tensor first, by how much, and why. Exit status 0 if they are, 1 if not, 3 if a "
        "run fails.",
    )
    parser.add("--steps N", "how many global steps are compared (default 20)", default="20")
    parser.add("--strategies all", "compare under every strategy that the program allows")
    parser.add(
        "--stop-at K", "compare a job that is stopped at step K and resumed with one that is not"
    )
    parser.add(
        "--tolerance R",
        "how far gradients may be apart, relative to their norm (default: by dtype and batch size)",
    )
    parser.add("--json FILE", "write the verdicts to FILE, or to the output where it is -")
    parser.add("--html FILE", "write a page with the curves of the differences to FILE")
    for option in all_options():
        add_option(parser, option)
    parser.add("--config FILE", "read options from FILE instead of trireme.toml or pyproject.toml")
    parser.add_module()
    return parser


VERIFY = Command(
    "say whether a job is the same as one process, and if not, why",
    _verify,
    "trireme.verification.command:main",
)

RECORDER = ObserverType("trireme.verification.recorder:open_recorder")
