"""The peers' own environments: `make bench-peers` builds them, a benchmark looks for them.

    python -m benchmarks.peers [--directory DIR] [NAME...]      builds them

PyTorch's own (RPC, DDP over gloo) need none: they come with PyTorch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import ROOT

DIRECTORY = ROOT / ".peers"
"""Where the environments are unless another directory is named."""


@dataclass(frozen=True)
class Peer:
    """One peer.

    Attributes:
        name: of its environment.
        requirements: what to install there.
        show: Python that prints its version.
        takes: about how much space.
    """

    name: str
    requirements: tuple[str, ...]
    show: str
    takes: str


PEERS = {
    "tensorflow": Peer(
        "tensorflow",
        ("tensorflow-cpu==2.21.0",),
        "import importlib.metadata as m; print(m.version('tensorflow-cpu'))",
        "1.2 GB",
    ),
    "spark": Peer(
        "spark",
        ("pyspark==4.3.0", "numpy"),
        "import importlib.metadata as m; print(m.version('pyspark'))",
        "0.6 GB, and needs Java 17",
    ),
    "ray": Peer(
        "ray",
        ("ray==2.60.0", "torch==2.13.0", "numpy"),
        "import importlib.metadata as m; print(m.version('ray'))",
        "1.2 GB",
    ),
    "gensim": Peer(
        "gensim",
        ("gensim==4.4.0",),
        "import importlib.metadata as m; print(m.version('gensim'))",
        "0.4 GB",
    ),
    "tomotopy": Peer(
        "tomotopy",
        ("tomotopy==0.14.0",),
        "import importlib.metadata as m; print(m.version('tomotopy'))",
        "0.1 GB",
    ),
    "vowpalwabbit": Peer(
        "vowpalwabbit",
        ("vowpalwabbit==9.11.9",),
        "import importlib.metadata as m; print(m.version('vowpalwabbit'))",
        "0.1 GB",
    ),
}
"""Every peer with an environment of its own."""


class Peers:
    """The environments that are there.

    Args:
        directory: which holds one of each name.
    """

    def __init__(self, directory: Path = DIRECTORY) -> None:
        self.directory = directory

    def python(self, name: str) -> Path | None:
        """Returns the interpreter of a peer's environment; None where it is missing."""
        path = self.directory / name / "bin" / "python"
        done = self.directory / name / "installed"
        return path if path.exists() and done.exists() else None

    def version(self, name: str) -> str | None:
        """Returns a peer's version; None where it is missing."""
        python = self.python(name)
        if python is None:
            return None
        shown = subprocess.run([python, "-c", PEERS[name].show], capture_output=True, text=True)
        return shown.stdout.strip() or None

    def missing(self) -> list[str]:
        """Returns a line for each peer that is missing: which, and how to get it."""
        return [
            f"{name} is not installed and is left out: `make bench-peers` builds its environment "
            f"in {self.directory / name} ({peer.takes})"
            for name, peer in PEERS.items()
            if self.python(name) is None
        ]

    def build(self, name: str) -> None:
        """Makes a peer's environment.

        Raises:
            subprocess.CalledProcessError: pip or venv failed.
        """
        home = self.directory / name
        if self.python(name) is not None:
            print(f"{name}: there already, {home}", flush=True)
            return
        print(f"{name}: building {home}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *PEERS[name].requirements], check=True)
        (home / "installed").write_text("\n".join(PEERS[name].requirements) + "\n")


def main() -> int:
    """Builds the environments that are named, or all of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    given = parser.parse_args()
    unknown = sorted(set(given.names) - set(PEERS))
    if unknown:
        parser.error(f"there is no peer {unknown[0]!r}: there are {', '.join(PEERS)}")
    failed = []
    for name in given.names or PEERS:
        try:
            Peers(given.directory).build(name)
        except subprocess.CalledProcessError as error:
            failed.append(name)
            print(f"{name}: {error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
