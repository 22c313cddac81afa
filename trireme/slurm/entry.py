"""The command `slurm`, as its entry point declares it."""

from __future__ import annotations

from trireme.cli.command import Command, Parser, add_option
from trireme.launch.engines import all_options

OWN = ("nodes", "server_nodes", "time", "partition", "grace")
"""The options of the batch script; all others are those of `trireme run`."""


def _parser() -> Parser:
    parser = Parser(
        "slurm",
        "script [OPTIONS] [OPTIONS OF RUN] SCRIPT|-m MODULE [ARGS...]",
        "Prints a batch script that runs SCRIPT as a job on the nodes that Slurm allocates, to "
        "read, to change and to give to sbatch. It saves before its time is over, and goes on when "
        "it is queued again.",
    )
    parser.add("--nodes N", "the nodes of the workers, or of all tasks (default 2)", default="2")
    parser.add(
        "--server-nodes N",
        "further nodes, for the servers alone, as a component of their own (default 0)",
        default="0",
    )
    parser.add("--time T", "how long the job may run, as sbatch takes it (default 1:00:00)",
               default="1:00:00")  # fmt: skip
    parser.add("--partition P", "the partition")
    parser.add("--grace S", "the seconds that a save may take (default 60)", default="60")
    for option in all_options():
        add_option(parser, option)
    parser.add("--config FILE", "read options from FILE instead of trireme.toml or pyproject.toml")
    parser.add_module()
    return parser


SLURM_COMMAND = Command(
    "print a batch script for a job on Slurm", _parser, "trireme.slurm.command:main"
)
"""`trireme slurm script`."""
