"""`trireme report RUN`: a run on one page of HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trireme.dashboards.entry import REPORT
from trireme.dashboards.report import CheckpointRow, ReportData, page
from trireme.dashboards.totals import read_curves
from trireme.errors import CheckpointError, ConfigurationError
from trireme.launch.run_directory import RECORD, read_record
from trireme.location import RemotePath, local_directory, location
from trireme.printable import printable, size
from trireme.records.records import Start, read_starts


def main(arguments: Sequence[str]) -> int:
    """Writes the page and returns 0."""
    given = REPORT.parser().read(arguments)
    home = local_directory(given.run)
    output = Path(given.output) if given.output is not None else home / "report.html"
    text = printable(page(_material(home, location(given.run))), keep="\n")
    try:
        if home != Path(given.run):
            output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"the report cannot be written to {output}: {error}. Name another file with --output"
        ) from error
    print(f"{output}: {len(text.encode()) / 1000:.0f} kB")
    return 0


def _material(path: Path, run: Path | RemotePath) -> ReportData:
    from trireme.session.checkpoint import list_checkpoints

    record = read_record(path) if (path / RECORD).exists() else None
    starts = read_starts(path, None if record is None else record.job)
    home = _home(path, starts)
    curves = read_curves(home / "tensorboard")
    checkpoints = list(map(_row, list_checkpoints(home if run == path else run)))
    if record is None and not (starts or curves or checkpoints):
        raise ConfigurationError(
            f"nothing was run in {run}: it has no {RECORD}, no records of tasks, no curves and no "
            "checkpoints. Give the directory that `trireme run` named, or the program's run_dir"
        )
    return ReportData(path.resolve().name, record, starts, curves, checkpoints)


def _row(path: Path | RemotePath) -> CheckpointRow:
    from trireme.session.checkpoint import describe

    try:
        known, _ = describe(path)
    except CheckpointError as error:
        return CheckpointRow(path.name, damage=str(error))
    return CheckpointRow(path.name, known.saved_at, size(known.nbytes))


def _home(path: Path, starts: Sequence[Start]) -> Path:
    """Returns the directory of curves and checkpoints: the program may have its own run_dir."""
    if (path / "tensorboard").is_dir() or (path / "checkpoints").is_dir():
        return path
    directories = [start.begin.run_dir for start in starts if start.begin.run_dir]
    return Path(directories[0]) if directories else path
