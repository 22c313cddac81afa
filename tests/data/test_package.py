"""What `trireme.data` offers, and that it costs nothing until it is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import trireme.data


def test_every_module_that_is_offered_is_there() -> None:
    folder = Path(trireme.data.__file__).parent
    assert set(trireme.data.__all__) <= {path.stem for path in folder.glob("*.py")}
    assert set(trireme.data.__all__) <= set(dir(trireme.data))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = trireme.data.nothing


@pytest.mark.thorough
def test_modules_are_imported_when_they_are_asked_for() -> None:
    program = """
import sys
import trireme.data
import trireme.data.ledger
assert "torch" not in sys.modules, "the ledger needs no torch"
assert trireme.data.digits.load
from trireme.data import batch, digits
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
