"""Finds programs that a process which has imported PyTorch already must not run.

Some environment variables are read when PyTorch is imported, such as `OMP_NUM_THREADS` or
`TORCH_LOGS`. A program may set them in its first lines.
"""

from __future__ import annotations

import ast

_READERS = ("torch", "trireme")
_WORDS = frozenset({"environ", "environb", "putenv", "unsetenv"})


def sets_environment_early(source: str) -> bool:
    """Returns whether a program may change its environment before it imports PyTorch.

    Modules that it imports are not looked at.
    """
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return False
    for statement in statements:
        if _imports_reader(statement):
            return False
        if any(_word(node) in _WORDS for node in ast.walk(statement)):
            return True
    return False


def _imports_reader(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import(names=names):
            imported = [each.name for each in names]
        case ast.ImportFrom(module=str(module)):
            imported = [module]
        case _:
            return False
    return any(name.partition(".")[0] in _READERS for name in imported)


def _word(node: ast.AST) -> str:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case ast.alias(name=name):
            return name
    return ""
