"""`trireme size RUN`: how many bytes a run directory takes on disk, by what is in it."""

from collections.abc import Sequence
from pathlib import Path

from trireme.cli.command import Command, Parser
from trireme.errors import ConfigurationError


def parser() -> Parser:
    parser = Parser("size", "RUN", "Prints the size of each entry of the run directory RUN.")
    parser.add_argument("run", metavar="RUN", help="a run directory")
    return parser


def main(arguments: Sequence[str]) -> int:
    run = Path(parser().read(arguments).run)
    if not run.is_dir():
        raise ConfigurationError(f"{run} is no run directory")
    for entry in sorted(run.iterdir()):
        files = [path for path in [entry, *entry.rglob("*")] if path.is_file()]
        print(f"{sum(path.stat().st_size for path in files):>12,}  {entry.name}")
    return 0


SIZE = Command("print how many bytes a run takes on disk", parser, "trireme_size:main")
