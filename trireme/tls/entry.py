"""What the plug-in adds: the command `certs`, and certificates for launchers and tasks."""

from __future__ import annotations

from pathlib import Path

from trireme.certificates import Authority, Encryption
from trireme.cli.command import Command, Parser


def _make_authority() -> Authority:
    from trireme.tls.authority import JobAuthority  # slow to load

    return JobAuthority.make()


def _read(path: Path, task: str) -> str:
    from trireme.tls.directory import read_certificate

    return read_certificate(path, task)


TLS = Encryption(_make_authority, _read)


def _parser() -> Parser:
    parser = Parser(
        "certs",
        "init|issue|show DIR [--task TASK ...] [--days N]",
        "Makes the certificates with which the tasks of a job on several hosts prove to each other "
        "who they are, by TLS. init makes the job's own authority and its secret in DIR; issue "
        "makes a key and a certificate for each task; show lists them. No file is overwritten.",
    )
    parser.add("ACTION", "init, issue or show", choices=("init", "issue", "show"))
    parser.add("DIR", "the directory of the certificates", type=Path)
    parser.add(
        "--task TASK",
        "issue: for this task, such as worker:0; may be repeated. ps:0 may be the coordinator",
        action="append",
        default=[],
    )
    parser.add(
        "--days N",
        "how long it is valid (default: the authority 365, others as long as the authority)",
    )
    return parser


CERTS = Command(
    "make certificates for the tasks of a job on several hosts", _parser, "trireme.tls.command:main"
)
