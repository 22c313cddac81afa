"""Mutants of a program of a few lines are caught, survive, hang, and leave nothing behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="needs the extra `mutants`")

from tests.mutants.operators import Mutant, mutants_of
from tests.mutants.reach import Reach, measure
from tests.mutants.report import entry, share, table
from tests.mutants.survivors import Survivor, read_survivors
from tests.mutants.tree import Tree
from tests.mutants.trial import Result, try_all

PATH = "trireme/ps/small.py"
PROGRAM = """def least(one, other):
    if one < other:
        return one
    return other


def never():
    return 1


def down(count):
    while count > 0:
        count -= 1
    return count
"""
TESTS = """from trireme.ps.small import down, least


def test_least():
    assert (least(1, 2), least(2, 1)) == (1, 2 - 1)


def test_down():
    assert down(3) == 0
"""

pytestmark = [pytest.mark.processes]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    source, root = (tmp_path_factory.mktemp(name) for name in ("source", "copy"))
    files = {PATH: PROGRAM, "tests/ps/test_small.py": TESTS, ".gitignore": "no\n"}
    files |= {"trireme/__init__.py": "", "trireme/ps/__init__.py": ""}
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text, encoding="utf-8")
    (source / "no").write_text("ignored", encoding="utf-8")
    subprocess.run(["git", "init", "-q", source], check=True)
    return Tree.copied(source, root)


@pytest.fixture(scope="module")
def reach(tree: Tree) -> Reach:
    return measure(tree, ["tests/ps"], 1, tree.root / "build" / "reach.json")


def mutant(before: str, after: str) -> Mutant:
    made = {(m.before, m.after): m for m in mutants_of(PATH, PROGRAM)}
    return made[before, after]


def test_a_tree_has_what_git_does_not_ignore(tree: Tree) -> None:
    assert (tree.root / PATH).read_text(encoding="utf-8") == PROGRAM
    assert not (tree.root / "no").exists()


def test_it_is_measured_which_tests_run_a_line(tree: Tree, reach: Reach) -> None:
    least, down = (f"tests/ps/test_small.py::test_{name}" for name in ("least", "down"))
    assert set(reach.seconds) == {least, down}
    assert reach.tests(PATH, [2], in_function=True) == [least]
    assert reach.tests(PATH, [8], in_function=True) == []
    assert set(reach.tests(PATH, [1], in_function=False)) == {least, down}
    kept = (tree.root / "build" / "reach.json").read_text(encoding="utf-8")
    again = measure(tree, ["tests/ps"], 1, tree.root / "build" / "reach.json")
    assert again == reach, "what was kept is used"
    assert (tree.root / "build" / "reach.json").read_text(encoding="utf-8") == kept


def test_what_a_test_notices_is_caught_and_what_none_does_survives(
    tree: Tree, reach: Reach
) -> None:
    chosen = [
        mutant("if one < other:", "if (one < other) or True:"),
        mutant("if one < other:", "if one <= other:"),
        mutant("return 1", "return 2"),
    ]
    results = list(try_all(chosen, [tree], reach, 10.0))
    assert [result.caught for result in results] == [True, False, False]
    assert results[0].by == "tests/ps/test_small.py::test_least"
    assert results[1].by == "not by 1 tests"
    assert results[2].by == "no test runs it"
    assert (tree.root / PATH).read_text(encoding="utf-8") == PROGRAM


def test_what_hangs_is_caught(tree: Tree, reach: Reach, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.mutants.trial.START", 2.0)
    (result,) = try_all([mutant("count -= 1", "count += 1")], [tree], reach, 10.0)
    assert result.caught


def test_the_table_leaves_out_what_is_equivalent() -> None:
    results = [
        Result(mutant("if one < other:", "if one <= other:"), False, "not by 1 tests", 1.0),
        Result(mutant("return 1", "return 2"), False, "no test runs it", 0.0),
        Result(mutant("count -= 1", "count += 1"), True, "x", 1.0),
    ]
    known = {results[0].mutant.key: Survivor(True, "the smaller of two equals is either")}
    assert share(results, known) == 0.5
    core = table(results, known, {PATH}).splitlines()
    assert core[0].split() == ["tried", "caught", "equivalent", "survived", "share"]
    assert core[1].split() == [PATH, "3", "1", "1", "1", "50.0%"]
    assert core[-1].split() == ["all", "3", "1", "1", "1", "50.0%"]


def test_a_survivor_is_shown_as_it_is_read(tmp_path: Path) -> None:
    result = Result(mutant("return 1", "return 2"), False, "no test runs it", 0.0)
    file = tmp_path / "survivors.toml"
    file.write_text(entry(result), encoding="utf-8")
    with pytest.raises(ValueError, match="no reason"):
        read_survivors(file)
    text = entry(result).replace('reason = ""', 'reason = "nobody calls it"')
    file.write_text(text, encoding="utf-8")
    assert read_survivors(file) == {result.mutant.key: Survivor(False, "nobody calls it")}
    file.write_text(f"{text}\n{text}", encoding="utf-8")
    with pytest.raises(ValueError, match="twice"):
        read_survivors(file)


def test_every_known_survivor_is_of_a_line_that_is_there() -> None:
    root = Path(__file__).resolve().parents[2]
    for path, function, before, _ in read_survivors():
        lines = (root / path).read_text(encoding="utf-8").splitlines()
        text = " ".join(line.strip() for line in lines)
        assert before in text, f"{path}, {function}: {before}"
