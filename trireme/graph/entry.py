"""The command and the backend `graph`, as their entry points declare them."""

from __future__ import annotations

from trireme.cli.command import Command, Parser, add_option
from trireme.job_config import OPTIONS
from trireme.strategies import BackendType

PLACED = BackendType("trireme.graph.placed.assembly:Placed")

GRAPH_OPTIONS = tuple(
    option
    for option in OPTIONS
    if option.field in ("workers", "mesh", "microbatches", "memory_limit")
)
"""The options of a job that decide how its graph is placed."""


def _graph() -> Parser:
    parser = Parser(
        "graph",
        "[OPTIONS] SCRIPT|-m MODULE [ARGS...]",
        "Draws the model of SCRIPT as a dataflow graph: as captured and optimised, placed on "
        "workers and cut, with the costs of its operators, which it measures, and the predicted "
        "duration of a step. Prints it as text. Runs SCRIPT in one process, up to its first step; "
        "trains nothing. The environment and the file set options as for trireme run.",
    )
    for option in GRAPH_OPTIONS:
        add_option(parser, option)
    parser.add_module()
    parser.add_argument("--config", metavar="FILE", help="read options from FILE")
    return parser


GRAPH = Command(
    "draw the model of a program as a graph, placed on workers",
    _graph,
    "trireme.graph.command:main",
)
