"""Which tests go with a plug-in: all that import it, however long the way."""

from __future__ import annotations

from pathlib import Path

from tests.without.__main__ import _importers

FILES = {
    "examples/topics/far.py": "from trireme.tables.table import Table",
    "examples/topics/near.py": "from .far import Table",
    "tests/helper.py": "from topics.near import Table",
    "tests/test_by_helper.py": "import tests.helper",
    "tests/test_itself.py": "from trireme import tables",
    "tests/test_later.py": "def test() -> None:\n    from trireme import tables",
    "tests/test_other.py": "from trireme.tablet import Tablet",
}


def test_what_imports_a_plug_in_by_an_example_or_a_test_goes_with_it(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = set(_importers(tmp_path, ["trireme.tables"]))
    assert found == {"tests/helper.py", "tests/test_by_helper.py", "tests/test_itself.py"}
