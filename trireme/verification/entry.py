"""The command `verify`, and what records the runs that it compares, as entry points."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from trireme.cli.command import Command, Parser, add_option
from trireme.job_config import Option, Positive, declared
from trireme.launch.engines import all_options
from trireme.session.worker.observer import ObserverType


# fmt: off
class Options(Struct, frozen=True):
    """The options of the command besides those of the job."""

    steps: Annotated[Positive, Option("N", "how many global steps are compared (default 20)")] = 20
    strategies: Annotated[Literal["all"] | None, Option("all",
        "compare under every strategy that the program allows")] = None
    stop_at: Annotated[Positive | None, Option("K",
        "compare a job that is stopped at step K and resumed with one that is not")] = None
    tolerance: Annotated[Annotated[float, Meta(gt=0, lt=1)] | None, Option("R",
        "how far gradients may be apart, relative to their norm (default: by dtype and batch size)",
        expects="a number above 0 and below 1")] = None
    json: Annotated[str | None, Option("FILE",
        "write the verdicts to FILE, or to the output where it is -")] = None
    html: Annotated[str | None, Option("FILE",
        "write a page with the curves of the differences to FILE")] = None


# fmt: on
def _verify() -> Parser:
    parser = Parser(
        "verify",
        "[OPTIONS] [OPTIONS OF RUN] SCRIPT|-m MODULE [ARGS...]",
        "Runs SCRIPT as the job that the options of `trireme run` describe, and as one process "
        "that has the same examples, and says whether they are the same: if not, at which step and "
        "in which tensor first, and why. Exit status 0 if they are, or differ by their nature, 1 "
        "if not, 3 if a run fails.",
    )
    for option in (*declared(Options), *all_options()):
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
