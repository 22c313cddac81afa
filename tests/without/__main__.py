"""Runs the core's tests without a plug-in: `make test-without`, or with PLUGIN=graph for one.

    python -m tests.without [PLUGIN ... | all] [-- ARGUMENTS OF PYTEST]

`all` runs them once without any plug-in; without a name they run once for each. For each plug-in
of `[tool.plugins]` in `pyproject.toml` it copies the tree, deletes the plug-in's files, its tests,
its entry points, and the plug-ins that need it, and runs pytest there, in an environment that has
nothing else of Trireme. Tests of a plug-in are its folder in `tests/` and all files that import it.
A test of the core that has cases of the plug-in skips them, see `tests/without/skips.py`.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Sequence
from importlib.metadata import distribution
from pathlib import Path
from sysconfig import get_path

ROOT = Path(__file__).resolve().parents[2]
WHOLE = (
    *("tests/docs", "tests/release.py", "tests/test_docs.py", "tests/test_documentation_site.py"),
    *("tests/test_distribution.py", "tests/test_release.py", "tests/test_translations.py"),
    *("tests/browser", "tests/recipes", "tests/benchmarks", "tests/mutants"),
)
"""Tests of pages, of the wheel and of other libraries, which are about all parts together."""


LINT = ("--deselect", "tests/test_conventions.py::test_imports_point_only_downwards")
"""The contracts of import-linter name all parts."""


def main(arguments: Sequence[str]) -> int:
    """Runs the tests without each plug-in that is named, or without each; returns the status."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    names, options = arguments[:cut], arguments[cut + 1 :]
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["plugins"]
    if list(names) == ["all"]:
        return 0 if _passes(list(plugins), plugins, options) else 1
    unknown = sorted(set(names) - plugins.keys())
    if unknown:
        sys.exit(f"there is no plug-in {unknown[0]}: there are {', '.join(plugins)}")
    failed = [name for name in names or plugins if not _passes([name], plugins, options)]
    for name in names or plugins:
        print(f"without {name}: {'FAILED' if name in failed else 'passed'}")
    return 1 if failed else 0


def _passes(
    names: Sequence[str], plugins: dict[str, dict[str, list[str]]], options: Sequence[str]
) -> bool:
    gone = [
        each
        for each, about in plugins.items()
        if each in names or set(names) & set(about.get("needs", ()))
    ]
    with tempfile.TemporaryDirectory(prefix="trireme-without-") as temporary:
        tree = Path(temporary, "tree")
        _copy(tree)
        files = [file for each in gone for file in plugins[each]["files"]]
        tests = [file for each in gone for file in plugins[each].get("tests", ())]
        for file in [*files, *tests, *WHOLE]:
            _delete(tree / file)
        modules = [_module(file) for file in files]
        points = _without_entry_points(tree / "pyproject.toml", modules)
        for file in _importers(tree, [*modules, *map(_module, tests)]):
            _delete(tree / file)
        python = _environment(Path(temporary, "environment"), tree, points)
        print(f"without {', '.join(gone)}:", flush=True)
        words = [*gone, *(word for each in gone for word in plugins[each].get("words", ()))]
        return not subprocess.call(
            [python, "-m", "pytest", "-p", "tests.without.skips", *LINT, *options],
            cwd=tree,
            env={**os.environ, "TRIREME_WITHOUT": " ".join([*modules, *words])},
        )


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
    imports = {
        path.relative_to(tree).as_posix(): set(_imported(path))
        for path in (tree / "tests").rglob("*.py")
    }
    gone = set(modules)
    while found := [
        path
        for path, named in imports.items()
        if any(each == one or each.startswith(f"{one}.") for each in named for one in gone)
    ]:
        for path in found:
            del imports[path]
            gone.add(_module(path))
        yield from found


def _imported(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports when it is imported itself."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _environment(folder: Path, tree: Path, points: dict[str, dict[str, str]]) -> Path:
    """Makes an environment with the packages of this one and the copied tree; returns its Python.

    A path in a `.pth` file is searched last, and its own `.pth` files are not read: what is
    installed there of Trireme is hidden.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "tree.pth").write_text(f"{tree}\n{get_path('purelib')}\n")
    own = distribution("trireme-train")
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
    return folder / "bin" / "python"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
