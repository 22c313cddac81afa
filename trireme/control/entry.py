"""The commands `scale` and `stop`, as their entry points declare them."""

from __future__ import annotations

from pathlib import Path

from trireme.cli.command import Command, Parser


def _scale() -> Parser:
    parser = Parser(
        "scale",
        "[--ps N] [--workers M] [--timeout SECONDS] RUN\n"
        "                     [--ps N] [--workers M] --coordinator HOST:PORT",
        "Makes the running job in the run directory RUN larger or smaller, and waits until it has "
        "so many tasks, every shard of the parameters has all its copies, and every server its "
        "share. The job's launcher starts new tasks, and tasks that are not needed finish their "
        "update and leave. Of a job that was started by hand it prints which tasks to start.",
    )
    parser.add("RUN", "a run directory", nargs="?")
    parser.add("--ps N", "how many parameter servers the job shall have")
    parser.add("--workers M", "how many workers it shall have")
    parser.add("--timeout SECONDS", "how long to wait (default 120)", default="120")
    parser.add("--coordinator HOST:PORT", "the coordinator of a job started by hand")
    parser.add("--secret-file FILE", "by hand: the file with the job's secret", type=Path)
    parser.add("--certs PATH", "by hand: the certificate of observer:0", type=Path)
    return parser


def _stop() -> Parser:
    parser = Parser(
        "stop",
        "[--timeout SECONDS] RUN",
        "Asks the job in the run directory RUN to save and end, and waits until it has ended.",
    )
    parser.add("RUN", "a run directory")
    parser.add("--timeout SECONDS", "how long to wait (default 90)", default="90")
    return parser


SCALE = Command(
    "change the number of servers and workers of a running job",
    _scale,
    "trireme.control.scale:main",
)
STOP = Command("ask a job to save and end", _stop, "trireme.control.stop:main")
