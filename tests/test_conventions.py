"""What the design forbids: imports upwards, code as data, environments read in passing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
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
PICKLES = PACKAGE / "launch" / "function.py"
"""The one file that pickles: functions and results, in descriptors that children inherit."""


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


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


@pytest.mark.parametrize("path", FILES, ids=name)
def test_no_code_comes_in_as_data(path: Path) -> None:
    for node in nodes(path):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in FORBIDDEN_CALLS, f"line {node.lineno}"
        if isinstance(node, ast.Attribute):
            assert node.attr not in PICKLING, f"line {node.lineno}"
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imported = [node.module]
        assert path == PICKLES or FORBIDDEN_MODULES.isdisjoint(imported), f"line {node.lineno}"


def test_the_file_that_pickles_opens_nothing_and_is_used_by_those_who_start_tasks_alone() -> None:
    """Neither a file with a name nor a connection is in reach of it."""
    for node in nodes(PICKLES):
        if isinstance(node, ast.Call):
            called = node.func
            word = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            assert word not in {"open", "connect", "socket", "read_bytes", "write_bytes"}
    taken = "from trireme.launch.function import"
    users = [name(path) for path in FILES if taken in path.read_text(encoding="utf-8")]
    assert users == ["trireme/cli/task.py", "trireme/jobs/job.py", "trireme/jobs/run.py"]


@pytest.mark.parametrize("path", FILES, ids=name)
def test_only_launch_and_command_line_read_the_environment(path: Path) -> None:
    if path.relative_to(PACKAGE).parts[0] in ("launch", "cli") or path.name == "command.py":
        return
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            read = (node.value.id, node.attr)
            assert read not in {("os", "environ"), ("os", "getenv")}, f"line {node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_every_module_has_a_docstring_and_packages_alone_list_names(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "no docstring"
    imports = any(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body)
    package = path.name == "__init__.py" and imports
    if path != PACKAGE / "errors.py":  # which the package exports as a whole
        assert ("__all__" in assigned(tree)) == package


@pytest.mark.parametrize("path", FILES, ids=name)
def test_what_begins_with_an_underscore_stays_in_its_module(path: Path) -> None:
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trireme"):
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            assert not [each for each in private if not each.endswith("__")], f"line {node.lineno}"


def assigned(tree: ast.Module) -> set[str]:
    names = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_nobody_asks_whether_a_stream_is_of_shared_memory() -> None:
    own = PACKAGE / "wire" / "transports" / "shm.py"
    users = [path for path in FILES if "ShmStream" in path.read_text(encoding="utf-8")]
    assert users == [own]
