"""What is changed, what is not, and that a sample is the same again."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="needs the extra `mutants`")

from tests.mutants.operators import mutants_of, sample

PROGRAM = '''"""A module."""

from typing import cast

__all__ = ["limit", "Box"]

MOST = 5
Sizes = dict[str, int]


class Box(Base, frozen=True):
    """A class."""

    size: int = 3
    name: str | None = None


def limit(value: int | None, *, most: int = 3) -> int:
    """A function."""
    assert value is not None, "there is none"
    if value > most and value > MOST:
        raise ValueError("far too much of it", "code")
    note(value, level=1)
    return cast(int, value)
'''


def changes(program: str = PROGRAM) -> list[tuple[str, str]]:
    return [(mutant.before, mutant.after) for mutant in mutants_of("trireme/ps/x.py", program)]


def test_a_check_is_dropped_weakened_and_turned() -> None:
    head = "if value > most and value > MOST:"
    found = {after for before, after in changes() if before == head}
    assert found == {
        "if (value > most and value > MOST) and False:",
        "if (value > most and value > MOST) or True:",
        "if value > most:",
        "if value > MOST:",
        "if value > most or value > MOST:",
        "if value >= most and value > MOST:",
        "if value > most and value >= MOST:",
    }


def test_a_call_is_dropped_and_its_arguments_are_changed() -> None:
    found = {after for before, after in changes() if before == "note(value, level=1)"}
    assert found == {"pass", "note(None, level=1)", "note(value, )", "note(value, level=2)"}


def test_nothing_is_changed_that_does_nothing_or_is_for_people() -> None:
    told = changes()
    for untouched in (
        '"""',
        "__all__",
        "import",
        "assert",
        "class",
        "cast(",
        "far too much",
        "Sizes",
    ):
        changed = [pair for pair in told if untouched in pair[0] and "code" not in pair[0]]
        assert not changed, untouched
    assert [after for before, after in told if "code" in before and "XX" in after] == [
        'raise ValueError("far too much of it", "XXcodeXX")'
    ]
    assert not [after for before, after in told if before.startswith("name: str")]


def test_a_mutant_knows_where_it_is() -> None:
    mutants = mutants_of("trireme/ps/x.py", PROGRAM)
    at = {mutant.after: mutant for mutant in mutants}
    size, default, call = (
        at["size: int = 4"],
        at["def limit(value: int | None, *, most: int = 4) -> int:"],
        at["pass"],
    )
    assert (size.function, size.in_function, [*size.lines]) == ("Box", False, [14])
    assert (default.function, default.in_function) == ("limit", False)
    assert (call.function, call.in_function, [*call.lines]) == ("limit", True, [23])
    assert call.text.replace("    pass\n", "    note(value, level=1)\n") == PROGRAM
    assert len({mutant.order for mutant in mutants}) == len(mutants)


def test_a_sample_is_drawn_by_its_seed_and_not_by_what_is_edited_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(PROGRAM, encoding="utf-8")

    def drawn(seed: int) -> set[tuple[str, ...]]:
        return {mutant.key for mutant in sample(tmp_path, ["x.py"], 10, seed)}

    first = drawn(1)
    assert len(first) == 10
    assert drawn(1) == first != drawn(2)
    file.write_text(PROGRAM + "\n\ndef more() -> None:\n    note(1)\n", encoding="utf-8")
    assert len(drawn(1) & first) >= 7
