"""Writes the text of docs/reference/session.md from docstrings, for readers without the site."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import trireme
from trireme.loops.distributed_optimizer import DistributedOptimizer

MEMBERS: dict[str, tuple[type, str]] = {
    "Of a session": (trireme.Session, ""),
    "Of what `step` returns": (trireme.StepResult, ""),
    "Of what `trireme.distribute` returns, beside what optimizers have": (
        DistributedOptimizer,
        "board global_step is_chief job log model parameters pipeline recorder save should_stop "
        "summary worker write_values",
    ),
}
"""A heading, the class, and those of its members that are as a session's."""
INSIDE = "recorder worker job board pipeline decide"
"""Members that a program has no need of."""


def text() -> str:
    """Returns the options of a session, and the members of what a program has in its hands."""
    parts = [
        "| option of `Session` | default | |",
        "| --- | --- | --- |",
        *(f"| `{name}` | {default} | {said} |" for name, default, said in options()),
    ]
    for heading, (owner, others) in MEMBERS.items():
        parts += ["", f"**{heading}**", ""]
        parts += [f"- {line}" for line in members(owner, f"{INSIDE} {others}".split())]
    return "\n".join(parts)


def options() -> Iterator[tuple[str, str, str]]:
    """Yields each argument of `Session` with its default and a sentence about it."""
    document = inspect.getdoc(trireme.Session) or ""
    arguments = document.partition("Args:\n")[2].partition("\n\n")[0]
    for one in re.split(r"\n    (?=\S)", arguments.removeprefix("    ")):
        head, _, said = " ".join(one.split()).partition(": ")
        name, _, default = head.partition(" (default ")
        shown = f"`{default.removesuffix(')')}`" if default else ""
        whole = re.split(r"(?<=\.) ", said)[0]
        yield name, shown, whole.replace("|", "\\|")


def members(owner: type, leave_out: list[str]) -> Iterator[str]:
    """Yields a line for each public member: its name, and the first sentence about it."""
    own = {name for base in owner.__mro__ if _ours(base) for name in vars(base)}
    for name in sorted(own | set(getattr(owner, "__dataclass_fields__", ()))):
        member = inspect.getattr_static(owner, name, None)
        if name.startswith("_") or name in leave_out or member is None:
            continue
        said = sentence(" ".join((inspect.getdoc(member) or "").split()))
        if said != "." and not inspect.isclass(member):
            yield f"`{name}{'()' if inspect.isfunction(member) else ''}`: {said}"


def sentence(said: str) -> str:
    """Returns the first sentence of a text, or what comes before its first colon or semicolon."""
    return re.split(r"(?<=\.) |[;:] |[:;]$", said)[0].removesuffix(".") + "."


def _ours(base: type) -> bool:
    return base.__module__.startswith("trireme.")
