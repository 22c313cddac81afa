"""The table of a run: by module, how many mutants were tried, caught, and are left."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tests.mutants.survivors import Survivor
from tests.mutants.trial import Result

Known = Mapping[tuple[str, str, str, str], Survivor]


def share(results: Sequence[Result], known: Known) -> float:
    """Returns which part of the mutants was caught, of those that are not equivalent."""
    equivalent = sum(_equivalent(result, known) for result in results)
    real = len(results) - equivalent
    return sum(result.caught for result in results) / real if real else 1.0


def table(results: Sequence[Result], known: Known, core: Collection[str]) -> str:
    """Returns a line for each module, the modules of the core first, and sums."""
    paths = sorted({result.mutant.path for result in results})
    rows = [("", "tried", "caught", "equivalent", "survived", "share")]
    for title, chosen in (
        ("the core", [path for path in paths if path in core]),
        ("the others", [path for path in paths if path not in core]),
    ):
        for path in chosen:
            rows.append(_row(path, [r for r in results if r.mutant.path == path], known))
        rows.append(_row(title, [r for r in results if r.mutant.path in chosen], known))
        rows.append(("",) * 6)
    rows.append(_row("all", results, known))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        " ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def entry(result: Result) -> str:
    """Returns a survivor as it would stand in `survivors.toml`, but for the reason."""
    mutant = result.mutant
    values = {
        "file": mutant.path,
        "function": mutant.function,
        "before": mutant.before,
        "after": mutant.after,
    }
    lines = [f"# line {mutant.line}; {result.by}", "[[mutant]]"]
    lines += [f"{name} = {_quoted(value)}" for name, value in values.items()]
    return "\n".join([*lines, "equivalent = false", 'reason = ""'])


def _quoted(value: str) -> str:
    return f"'{value}'" if "'" not in value else f"'''{value}'''"


def _row(title: str, results: Sequence[Result], known: Known) -> tuple[str, ...]:
    if not results:
        return (title, *"0000", "")
    caught = sum(result.caught for result in results)
    equivalent = sum(_equivalent(result, known) for result in results)
    survived = len(results) - caught - equivalent
    counts = (len(results), caught, equivalent, survived)
    return (title, *map(str, counts), f"{100 * share(results, known):.1f}%")


def _equivalent(result: Result, known: Known) -> bool:
    survivor = known.get(result.mutant.key)
    return not result.caught and survivor is not None and survivor.equivalent
