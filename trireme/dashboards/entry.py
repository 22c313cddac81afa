"""The command `report` and the observer that writes curves, as their entry points declare them."""

from __future__ import annotations

from trireme.cli.command import Command, Parser
from trireme.session.worker.observer import ObserverType

CURVES = ObserverType("trireme.dashboards.recording:Curves")


def _report() -> Parser:
    parser = Parser(
        "report",
        "[--output FILE] RUN",
        "Writes a report on the run in the run directory RUN, as one self-contained page of HTML: "
        "curves, the time of each phase, configuration, checkpoints, why the run failed.",
    )
    parser.add("RUN", "a run directory")
    parser.add("--output FILE", "the file to write (default RUN/report.html)")
    return parser


REPORT = Command(
    "write a report on a run as one page of HTML", _report, "trireme.dashboards.command:main"
)
