from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import html5lib
import msgspec
import pytest
import torch

from trireme.cli import main
from trireme.dashboards.charts import line_chart, stacked_bars, thinned
from trireme.dashboards.report import CheckpointRow, ReportData, page
from trireme.dashboards.totals import read_curves, slowest, worker_totals
from trireme.launch.run_directory import JobRecord
from trireme.records.numbers import number
from trireme.records.records import Begin, Record, Start
from trireme.session.session import Session

RECORD = JobRecord(
    job="abc",
    state="failed",
    status=1,
    host="here",
    launcher=1,
    pids={},
    coordinator="",
    secret_file="",
    command=("train.py", "--name", '<b>&"bold"</b>'),
    options={"workers": 2, "ps": 1, "strategy": None},
    origins={"workers": "command line", "ps": "environment TRIREME_PS", "strategy": "default"},
    started=1000.0,
    ended=1075.0,
    failure=("the job failed after 75 s. First worker:1 failed: <oops>",),
)


def start(name: str, compute: float, wait: float) -> Start:
    begin = Begin(task=name, job="abc", time=1000.0, host="here", pid=1, about={"torch": "2.13"})
    records = [
        Record(
            time=1000.0 + second,
            status={
                "step": 100 * second,
                "global_step": 200 * second,
                "applied": 90 * second,
                "stale": 10 * second,
                "examples_per_second": 500.0 * second,
                "memory_bytes": 2**20 * second,
            },
            seconds={"data": 0.0, "compute": compute * second, "push": 0.1, "wait": wait * second},
        )
        for second in range(1, 4)
    ]
    return Start(begin, records)


STARTS = [start("worker:0", 0.2, 0.6), start("worker:1", 0.7, 0.1)]

CURVES = {
    "loss": {
        "train": [(float(step), 1000.0 / (1 + step)) for step in range(3000)],
        "test": [(3000.0, 0.5)],
    },
    "accuracy": {"test": [(1000.0, 0.5), (3000.0, 0.875)]},
    "learning_rate": {"train": [(0.0, 0.1), (3000.0, 0.1)]},
    "speed/push_seconds": {"train": [(0.0, 1.0)]},
}

CHECKPOINTS = (
    CheckpointRow("step-000001000", "2026-01-01", "5.0 MiB"),
    CheckpointRow("step-000002000", "", "", "a byte is not what was written"),
)


def parsed(text: str) -> ElementTree.Element:
    """Reads a page as browsers do, but bears no mistake."""
    tree = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(text)
    assert isinstance(tree, ElementTree.Element)
    return tree


def self_contained(text: str) -> bool:
    return not re.search(r"https?:|//|\bsrc=|\bhref=|@import|url\(|<script", text)


def test_a_page_is_valid_small_and_needs_nothing_else() -> None:
    text = page(ReportData("a <run>", RECORD, STARTS, CURVES, CHECKPOINTS))
    tree = parsed(text)
    assert len(text.encode()) < 200_000
    assert self_contained(text)
    titles = ["".join(each.itertext()) for each in tree.iter("h2")]
    assert titles == [
        "Why it failed",
        "Curves",
        "Where the time went",
        "Workers",
        "Configuration",
        "Checkpoints",
        "Environment",
    ]
    shown = " ".join("".join(each.itertext()) for each in tree.iter("body"))
    for words in (
        "a <run>",
        'train.py --name <b>&"bold"</b>',
        "First worker:1 failed: <oops>",
        "worker:1 (slowest)",
        "environment TRIREME_PS",
        "a byte is not what was written",
        "0.875",
        "5.0 MiB",
        "1 min 15 s",
    ):
        assert words in shown
    assert tree.find(".//b") is None or tree.find(".//b").text != '&"bold"'  # type: ignore[union-attr]


def test_checkpoints_that_are_not_saved_are_on_the_page() -> None:
    def ended(**more: str) -> str:
        status = {"global_step": 9, "checkpoints_failed": 2, **more}
        begin = Begin(task="worker:0", job="abc", time=1000.0, host="here", pid=1)
        return page(ReportData("run", starts=[Start(begin, [Record(time=1.0, status=status)])]))

    assert "worker:0 could not write 2 checkpoints: later ones were saved" in ended()
    assert "could not write 2 checkpoints: no space at step 9" in ended(
        unsaved="no space at step 9"
    )
    assert "not saved" not in page(ReportData("run", starts=STARTS))


def test_servers_and_events_are_on_the_page() -> None:
    begin = Begin(task="ps:1", job="abc", time=1000.0, host="here", pid=1)
    status = {
        **{"primary_of": "0, 1", "share": 1.0, "log_entries": 4321, "log_bytes": 3.0 * 2**20},
        **{"takeovers": 1, "took_over": "shard 0 from ps:0", "took_over_seconds": 0.5},
    }
    server = Start(begin, [Record(time=1090.5, status=status)])
    record = msgspec.structs.replace(RECORD, events=((90.0, "WARNING: ps:0 was killed"),))
    tree = parsed(page(ReportData("run", record, starts=[server, *STARTS])))
    shown = " ".join("".join(each.itertext()) for each in tree.iter("body"))
    for words in ("0, 1 100%", "4,321", "3.0 MiB", "1 min 30 s", "WARNING: ps:0 was killed"):
        assert words in shown
    assert "Events" not in page(ReportData("run", starts=STARTS))


def test_a_page_of_nothing_is_valid_too() -> None:
    assert self_contained(page(ReportData("empty")))
    assert [each.text for each in parsed(page(ReportData("empty"))).iter("h1")] == ["empty"]


def test_workers_are_accounted_for_and_the_slowest_is_who_waits_least() -> None:
    first, second = worker_totals(STARTS)
    assert (first.steps, first.applied, first.stale) == (300, 270, 30)
    assert first.milliseconds["wait"] == pytest.approx(6.0)
    assert first.pace == 1250.0  # the first record is of a moment only
    late = slowest([first, second])
    assert late is second
    assert slowest([first]) is None


def test_thinned_curves_keep_their_extremes() -> None:
    points = [(float(step), 0.0) for step in range(1000)]
    points[333], points[777] = (333.0, 9.0), (777.0, -9.0)
    kept = thinned(points, 50)
    assert len(kept) <= 52
    assert (333.0, 9.0) in kept
    assert (777.0, -9.0) in kept
    assert list(kept) == sorted(kept)


@pytest.mark.parametrize(
    "values", [[0.0], [3.0, 3.0], [-2.0, -2.0], [1e-8, 2e-8], [-5.0, 1e6], [1e-6, 1e6], [0.1, 7.0]]
)
def test_a_chart_draws_all_points_inside_its_frame(values: list[float]) -> None:
    points = [(float(step), value) for step, value in enumerate(values)]
    svg = ElementTree.fromstring(line_chart({"a": points}, "step", "x").partition("<ul")[0])
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    paths = [each.attrib["d"] for each in svg.iter("path") if "line" in each.attrib["class"]]
    assert len(paths) == 1
    pairs = [point.split() for point in paths[0][1:].split("L")]
    assert len(pairs) == len(values)
    assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in pairs)
    assert len(list(svg.iter("text"))) >= 3


def test_bars_have_their_counts() -> None:
    assert 'width:50.00%" title="a 1 ms"' in stacked_bars(
        {"w": {"a": 1.0, "b": 1.0}}, "ms", {"a": 0, "b": 1}
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (12345.0, "12,345"), (0.123456, "0.123"), (1234.5, "1,234")]
)
def test_numbers_are_for_people(value: float, text: str) -> None:
    assert number(value) == text


def test_the_command_writes_the_page_of_a_run_of_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = torch.randn(64, 4)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :2].argmax(1))
    session = Session(
        torch.nn.Linear(4, 2),
        torch.nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        run_dir=tmp_path / "run",
        max_steps=30,
        log_every=5,
    )
    with session:
        for batch in session.loader(data, 8):
            session.step(batch)
        session.evaluate(data, name="test")
    curves = read_curves(tmp_path / "run" / "tensorboard")
    assert [step for step, _ in curves["loss"]["train"]] == [5, 10, 15, 20, 25, 30]
    assert set(curves["loss"]) == {"train", "test"}
    assert main(["report", str(tmp_path / "run")]) == 0
    written = tmp_path / "run" / "report.html"
    assert str(written) in capsys.readouterr().out
    tree = parsed(written.read_text())
    shown = " ".join("".join(each.itertext()) for each in tree.iter("body"))
    for words in ("worker:0", "step-000000030", "test loss", "apply", "forward+backward"):
        assert words in shown
    assert self_contained(written.read_text())


def test_a_directory_in_which_nothing_ran_has_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "nothing was run in" in capsys.readouterr().err
