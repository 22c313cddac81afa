"""What the design forbids: imports upwards, code as data, environments read in passing."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trireme"
FILES = sorted(PACKAGE.rglob("*.py"))

FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
PICKLING = {
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}
"""The functions of torch.distributed that send pickles."""
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "marshal", "shelve", "dill"}
PICKLES = PACKAGE / "jobs" / "function.py"
"""The one file that pickles: functions and results, in descriptors that children inherit."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass
class Read:
    """What the tests want to know of a file: trees of all files would fill memory.

    Attributes:
        imported: the line of an import, its module, and the names that come from it.
        called, attributes: the line, and the name as it is written, as far as it is names alone.
    """

    path: Path
    docstring: str | None = None
    top_level_imports: bool = False
    assigned: set[str] = field(default_factory=set)
    imported: list[tuple[int, str, list[str]]] = field(default_factory=list)
    called: list[tuple[int, str]] = field(default_factory=list)
    attributes: list[tuple[int, str]] = field(default_factory=list)

    def at(self, line: int) -> str:
        return f"{name(self.path)}:{line}"


def read(path: Path) -> Read:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = any(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body)
    found = Read(path, ast.get_docstring(tree), imports, assigned(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.imported += [(node.lineno, alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            found.imported.append((node.lineno, node.module or "", names))
        elif isinstance(node, ast.Attribute):
            found.attributes.append((node.lineno, dotted(node)))
        elif isinstance(node, ast.Call):
            found.called.append((node.lineno, dotted(node.func)))
    return found


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@cache
def package() -> tuple[Read, ...]:
    return tuple(read(path) for path in FILES)


def test_imports_point_only_downwards() -> None:
    check = Path(sys.executable).with_name("lint-imports")
    ended = subprocess.run([check], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_no_module_belongs_to_a_circle_of_imports() -> None:
    """Imports for type checkers, within functions and of the package itself count."""
    graph = grimp.build_graph("trireme", exclude_type_checking_imports=False, cache_dir=None)
    imports = {each: graph.find_modules_directly_imported_by(each) for each in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_no_code_comes_in_as_data() -> None:
    found = []
    for file in package():
        found += [file.at(line) for line, called in file.called if called in FORBIDDEN_CALLS]
        found += [
            file.at(line)
            for line, attribute in file.attributes
            if attribute.rpartition(".")[2] in PICKLING
        ]
        if file.path != PICKLES:
            modules = ((line, module) for line, module, _ in file.imported)
            found += [file.at(line) for line, module in modules if module in FORBIDDEN_MODULES]
    assert found == []


@pytest.mark.skipif(not PICKLES.exists(), reason="`trireme.run` is left out here")
def test_the_file_that_pickles_opens_nothing_and_is_used_by_those_who_start_tasks_alone() -> None:
    """Neither a file with a name nor a connection is in reach of it."""
    called = {word.rpartition(".")[2] for _, word in read(PICKLES).called}
    assert "loads" in called
    assert called.isdisjoint({"open", "connect", "socket", "read_bytes", "write_bytes"})
    taken = "from trireme.jobs.function import"
    users = [name(path) for path in FILES if taken in path.read_text(encoding="utf-8")]
    spark = {"trireme/spark/function.py", "trireme/spark/pool.py"}
    jobs = {"trireme/jobs/job.py", "trireme/jobs/run.py"}
    assert set(users) - {"trireme/verification/command.py"} - spark == jobs


def test_only_launch_and_command_line_read_the_environment() -> None:
    found = []
    for file in package():
        first = file.path.relative_to(PACKAGE).parts[0]
        if (
            first not in ("launch", "cli", "fork", "agents", "slurm", "ray", "control")
            and file.path.name != "command.py"
        ):
            reads = [line for line, each in file.attributes if each in ("os.environ", "os.getenv")]
            found += [file.at(line) for line in reads]
    assert found == []


def test_every_module_has_a_docstring_and_packages_alone_list_names() -> None:
    assert [name(file.path) for file in package() if not file.docstring] == []
    wrong = [
        name(file.path)
        for file in package()
        if file.path != PACKAGE / "errors.py"  # which the package exports as a whole
        and ("__all__" in file.assigned)
        != (file.path.name == "__init__.py" and file.top_level_imports)
    ]
    assert wrong == []


def test_what_begins_with_an_underscore_stays_in_its_module() -> None:
    found = []
    for file in package():
        for line, module, names in file.imported:
            private = [each for each in names if each.startswith("_") and not each.endswith("__")]
            if module.startswith("trireme") and private:
                found.append(file.at(line))
    assert found == []


def assigned(tree: ast.Module) -> set[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_nobody_asks_whether_a_stream_is_of_shared_memory() -> None:
    own = PACKAGE / "shm" / "transport.py"  # a plug-in
    users = [path for path in FILES if "ShmStream" in path.read_text(encoding="utf-8")]
    assert users == ([own] if own.exists() else [])
