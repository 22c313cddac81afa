"""The command `checkpoint`, as its entry point declares it."""

from __future__ import annotations

from trireme.cli.command import Command, Parser


def _parser() -> Parser:
    parser = Parser(
        "checkpoint",
        "ls|show|verify|export RUN [--step N] [--output FILE] [--tables [--state]]",
        "Lists the checkpoints in the run directory RUN, shows the content of one, verifies every "
        "byte of one, or exports its model as one safetensors file, or its sparse tables as "
        "Parquet files. Without --step it takes the newest checkpoint.",
    )
    parser.add("ACTION", "ls, show, verify or export", choices=("ls", "show", "verify", "export"))
    parser.add("RUN", "a run directory")
    parser.add("--step N", "the checkpoint of global step N")
    parser.add(
        "--output FILE",
        "export: the file to write (default model.safetensors); with --tables the directory "
        "(default tables)",
    )
    parser.add(
        "--tables",
        "export: each sparse table as TABLE.parquet, with the columns key and row; needs "
        "trireme-train[parquet]",
        action="store_true",
    )
    parser.add(
        "--state",
        "with --tables: also the columns state (of the optimizer), last_step and touches",
        action="store_true",
    )
    return parser


CHECKPOINT = Command(
    "list, show, verify or export checkpoints", _parser, "trireme.checkpoints.command:main"
)
