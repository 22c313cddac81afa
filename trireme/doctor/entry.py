"""The command `doctor`, as its entry point declares it."""

from __future__ import annotations

from trireme.cli.command import Command, Parser


def _doctor() -> Parser:
    parser = Parser(
        "doctor",
        "[OPTIONS] [WHERE...]",
        "Checks this host and what it reaches: versions, addresses, ports, shared memory, limits, "
        "launchers. Prints a line for each check, with what to do about a warning or "
        "a problem. WHERE is a task as host:port, or the run directory of a running job: each task "
        "there has to be reachable. Exit status 1 if there is a problem, else 0.",
    )
    parser.add("WHERE", "host:port, or a run directory", nargs="*")
    parser.add("--run-dir DIR", "check the disk and the lock of a run directory")
    text = "check that a task can listen at port N; may be repeated"
    parser.add("--port N", text, action="append", default=[])
    parser.add("--json", "print JSON", action="store_true")
    return parser


DOCTOR = Command(
    "check this host and what it reaches, and say what to do",
    _doctor,
    "trireme.doctor.command:main",
)
