"""A package that adds a row optimizer, by which a table is trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.installed import environ

PROGRAM = """
import trireme.ps
from trireme.tables.table_spec import Plugged
with trireme.ps.connect() as connection:
    connection.create_table("words", 3, optimizer=Plugged("SignedRows", {"lr": 0.5}))
    connection.push("words", [7], [[2.0, -0.1, 0.0]])
    connection.clock()
    print(connection.pull("words", [7]).tolist())
"""


@pytest.mark.thorough
def test_a_table_is_trained_by_it(directory: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=directory.parent,
        env=environ(directory),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "[[-0.5, 0.5, 0.0]]" in ended.stdout, ended.stderr
