"""Compiled functions: without numba there is one clear error, and without a cache they work too."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.thorough
def test_without_numba_the_error_says_what_to_install() -> None:
    program = """
import sys
sys.modules["numba"] = None
import trireme.data, trireme.models
from trireme.errors import ConfigurationError
try:
    import trireme.tables.table
except ConfigurationError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "numba is not installed" in ended.stdout, ended.stderr
    assert "pip install 'trireme-train[tables]'" in ended.stdout


def test_a_function_whose_code_cannot_be_kept_works_too() -> None:
    """A function without a file has no place beside it."""
    pytest.importorskip("numba")
    program = """
from trireme.tables.compiled import compiled
print(compiled(lambda number: number + 1)(41))
"""
    ended = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True)
    assert ended.stdout == "42\n", ended.stderr
