"""Runs the core's tests without plug-ins: `make test-without`, or with PLUGIN=graph without one.

    python -m tests.without [PLUGIN ... | all] [--whole] [--keep FOLDER] [-- ARGUMENTS OF PYTEST]

Without a name all tests run without any plug-in, and then those that have not passed yet with each
plug-in alone, and those that it needs, see `passed.py`. With names all tests run without each of
these, where `all` is all plug-ins at once. `--whole` names them all: that takes half a day.

For each plug-in of `[tool.plugins]` in `pyproject.toml` it copies the tree, deletes the plug-in's
files, its tests, its entry points, and the plug-ins that need it, and runs pytest there, in an
environment that has nothing else of Trireme. Tests of a plug-in are its folder in `tests/` and all
files that import it, directly or by an example, a benchmark or another test. A test of the core
that has cases of the plug-in skips them, see `tests/without/skips.py`. `--keep FOLDER` makes tree
and environment in a folder and keeps them: the next run with this option uses them as they are.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path
from sysconfig import get_path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).resolve().parents[2]
WHOLE = ("tests/docs", "tests/test_docs.py")
"""Tests of pages, which are about all parts together."""

PROGRAMS = ("tests", "examples", "benchmarks", "recipes")
"""The folders of tests, and of the programs that tests import."""

LINT = ("--deselect", "tests/test_conventions.py::test_imports_point_only_downwards")
"""The contracts of import-linter name all parts."""


def main(arguments: Sequence[str]) -> int:
    """Runs the tests without each plug-in that is named, or without each; returns the status."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    parser = ArgumentParser("python -m tests.without")
    parser.add_argument("names", nargs="*", metavar="PLUGIN")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    given, options = parser.parse_args(arguments[:cut]), arguments[cut + 1 :]
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["plugins"]
    names: list[str] = given.names or ["all", *plugins]
    alone = not given.names and not given.whole
    unknown = sorted(set(names) - {"all", *plugins})
    if unknown:
        sys.exit(f"there is no plug-in {unknown[0]}: there are {', '.join(plugins)}")
    if given.keep and len(names) != 1:
        sys.exit("--keep is for one plug-in, or for all at once")
    failed = []
    with TemporaryDirectory(prefix="trireme-passed-") as recorded:
        if alone:
            os.environ["TRIREME_WITHOUT_PASSED"] = os.path.join(recorded, "tests")
            options = ["-p", "tests.without.passed", *options]
        for name in names:
            gone = list(plugins) if name == "all" else [name]
            if alone and name != "all":
                gone = sorted(plugins.keys() - _with_needs(name, plugins))
            with TemporaryDirectory(prefix="trireme-without-") as temporary:
                if not _passes(gone, plugins, (given.keep or Path(temporary)).resolve(), options):
                    failed.append(name)
        for file in Path(recorded).iterdir():
            known = Counter(json.loads(file.read_text(encoding="utf-8")).values())
            more = known.total() - known["passed"]
            print(f"{known['passed']} tests passed; {more} failed, or were skipped each time")
    for name in names:
        which = "only with" if alone and name != "all" else "without"
        print(f"{which} {name}: {'FAILED' if name in failed else 'passed'}")
    return 1 if failed else 0


def _with_needs(name: str, plugins: dict[str, dict[str, list[str]]]) -> set[str]:
    """Returns a plug-in and all that it needs."""
    needs = plugins[name].get("needs", ())
    return {name}.union(*(_with_needs(each, plugins) for each in needs))


def _passes(
    names: Sequence[str],
    plugins: dict[str, dict[str, list[str]]],
    folder: Path,
    options: Sequence[str],
) -> bool:
    gone = [each for each in plugins if set(names) & _with_needs(each, plugins)]
    tree, python = folder / "tree", folder / "environment" / "bin" / "python"
    files = [file for each in gone for file in plugins[each]["files"]]
    modules = list(map(_module, files))
    if not tree.exists():
        tests = [file for each in gone for file in plugins[each].get("tests", ())]
        _copy(tree)
        (folder / "shared").symlink_to(ROOT.parent / "shared")  # real data
        for file in [*files, *tests, *WHOLE]:
            _delete(tree / file)
        points = _without_entry_points(tree / "pyproject.toml", modules)
        for file in _importers(tree, [*modules, *map(_module, tests)]):
            _delete(tree / file)
        _make_environment(folder / "environment", tree, points)
    print(f"without {', '.join(gone)}:", flush=True)
    words = {
        each: [each, *map(_module, plugins[each]["files"]), *plugins[each].get("words", ())]
        for each in gone
    }
    status = subprocess.call(
        [python, "-m", "pytest", "-p", "tests.without.skips", *LINT, *options],
        cwd=tree,
        env={**os.environ, "TRIREME_WITHOUT": json.dumps(words)},
    )
    return status in (0, pytest.ExitCode.NO_TESTS_COLLECTED)  # all have passed already


def _copy(tree: Path) -> None:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def _module(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def _delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _without_entry_points(project: Path, modules: Sequence[str]) -> dict[str, dict[str, str]]:
    """Deletes the entry points of modules; returns the others."""
    gone = re.compile(rf'^\S+ = "({"|".join(map(re.escape, modules))})[.:].*\n', re.MULTILINE)
    project.write_text(text := gone.sub("", project.read_text()))
    points: dict[str, dict[str, str]] = tomllib.loads(text)["project"]["entry-points"]
    return points


def _importers(tree: Path, modules: Sequence[str]) -> Iterator[str]:
    """Yields the tests and their helpers that import modules, or others that do."""
    files = [path for name in PROGRAMS for path in (tree / name).rglob("*.py")]
    imports = {path.relative_to(tree): set(_imported(tree, path)) for path in files}
    gone = set(modules)
    while found := [
        path
        for path, named in imports.items()
        if any(each == one or each.startswith(f"{one}.") for each in named for one in gone)
    ]:
        for path in found:
            del imports[path]
            gone.add(_name(path))
        yield from (path.as_posix() for path in found if path.parts[0] == "tests")


def _name(path: Path) -> str:
    """Returns the name of a module, which is of a folder where it is its `__init__.py`.

    `examples` is itself on Python's path.
    """
    text = path.as_posix().removeprefix("examples/").removesuffix("/__init__.py")
    return _module(text)


def _imported(tree: Path, path: Path) -> Iterator[str]:
    """Yields the modules that a file imports when it is imported itself."""
    own = _module(path.relative_to(tree).as_posix().removeprefix("examples/")).split(".")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = own[: -node.level] if node.level else []
            name = ".".join([*base, *filter(None, [node.module])])
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def _make_environment(folder: Path, tree: Path, points: dict[str, dict[str, str]]) -> None:
    """Makes an environment with the packages of this one and the copied tree."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    own = distribution("trireme-train")
    for path in Path(get_path("purelib")).iterdir():
        if "trireme_train" not in path.name and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    (packages / "tree.pth").write_text(f"{tree}\n")
    info = packages / f"trireme_train-{own.version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(own.read_text("METADATA") or "")
    sections = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
        for group, named in {"console_scripts": {"trireme": "trireme.cli:main"}, **points}.items()
    )
    (info / "entry_points.txt").write_text("\n".join(sections))
    here, there = sys.prefix.encode(), os.fspath(folder).encode()
    for script in Path(sys.prefix, "bin").iterdir():
        copy = folder / "bin" / script.name
        if script.is_dir() or copy.exists():
            continue
        text = script.read_bytes()
        if text.startswith(b"#!" + here):
            copy.write_bytes(text.replace(here, there, 1))
            copy.chmod(0o755)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
