"""What a worker says that cannot save what it has of a job that has lost a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from trireme.session import rescue
from trireme.session.rescue import Rescue
from trireme.session.storage import Storage


class Held:
    """A run directory whose lock another task holds, and does not let go of."""

    scheduled = True

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def settle(self, *, at_the_end: bool = False) -> None:
        pass

    def take(self, view: int) -> bool:
        return False


def test_what_is_lost_is_said_where_a_hung_chief_holds_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescue, "_CHIEF_SECONDS", 0.0)
    values: Any = None  # nothing asks for them
    left = Rescue("ps:0", 210, 3, chief=False, lacks=(), values=values)
    said = left.save(cast(Storage, Held(tmp_path)))
    assert said.startswith("steps 1 to 210 are lost, unless the task that holds the lock")
