"""What every benchmark is given: where things are, and how long it may take."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import ROOT
from benchmarks.peers import Peers


@dataclass(frozen=True)
class Context:
    """One benchmark's circumstances.

    Attributes:
        seconds: how long its rounds may take, setting up not counted.
        starts: how often contenders that train are started anew; the seconds are of each.
        quick: whether only to show that everything runs.
        peers: the environments of the peers.
        data: the folder with the real data; None where there is none.
        scratch: a directory that is removed afterwards.
        say: prints a line.
        against: the checkout of an older commit to compare with; None for none.
    """

    seconds: float
    starts: int
    quick: bool
    peers: Peers
    data: Path | None
    scratch: Path
    say: Callable[[str], None]
    against: Path | None = None

    def real(self, name: str) -> Path | None:
        """Returns a folder of the real data, if it is there."""
        if self.data is None or not (self.data / name).is_dir():
            return None
        return self.data / name


def real_data() -> Path | None:
    """Returns the folder that `TRIREME_DATA` names, else ../shared/data beside the project."""
    named = os.environ.get("TRIREME_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    return folder if folder.is_dir() else None
