from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.pairs import Interleaved, Sample
from benchmarks.results import Goal, Kind, Result

MACHINE = {"processor": "an abacus", "versions": {"torch": "2", "numpy": "3"}}
KINDS: dict[str, Kind] = {"ours": "trireme", "theirs": "peer", "limit": "limit"}


def samples(*values: float) -> list[Sample]:
    return [Sample(value, work=10, cpu_seconds=0.5) for value in values]


def example() -> Result:
    result = Result(
        "example",
        "An example",
        "steps/s",
        True,
        references=("limit",),
        goals=[
            Goal("near the limit", "4 KB", "ours", "limit", at_least=0.9),
            Goal("ahead of theirs", "4 KB", "ours", "theirs", at_least=1.0),
            Goal("of what is not there", "4 KB", "ours", "nobody", at_least=1.0),
        ],
        notes=["something to know"],
    )
    measured = Interleaved(
        {"ours": samples(8, 9, 8), "theirs": samples(2, 2, 2), "limit": samples(10, 10, 10)}, {}
    )
    result.add(measured, KINDS, condition="4 KB", x=4096)
    return result


def test_goals_are_judged_by_paired_ratios() -> None:
    verdicts = {v.goal.text: (v.word, v.ratio) for v in example().verdicts()}
    assert verdicts == {
        "near the limit": ("missed", 0.8),
        "ahead of theirs": ("met", 4.0),
        "of what is not there": ("not measured", None),
    }


def test_a_goal_may_be_over_another_condition() -> None:
    result = example()
    result.add(Interleaved({"ours": samples(16, 18, 16)}), KINDS, condition="8 KB", x=8192)
    goal = Goal("", "8 KB", "ours", "ours", at_most=1.5, reference_condition="4 KB")
    result.goals = [goal]
    assert result.verdicts()[0].ratio == 2.0
    assert result.verdicts()[0].word == "missed"


def test_a_goal_may_be_of_means_or_of_the_least_ratio() -> None:
    result = example()
    result.entries.clear()
    measured = Interleaved({"ours": samples(2, 6, 10), "limit": samples(4, 8, 10)})
    result.add(measured, KINDS, condition="4 KB")
    result.goals = [
        Goal("", "4 KB", "ours", "limit", at_least=0.6, by="pairs"),
        Goal("", "4 KB", "ours", "limit", at_least=0.6, by="means"),
        Goal("", "4 KB", "ours", "limit", at_least=0.6, by="least"),
    ]
    found = [(verdict.ratio, verdict.word) for verdict in result.verdicts()]
    assert found == [(0.75, "met"), (18 / 22, "met"), (0.5, "missed")]


def test_ratios_are_shown_by_start_where_there_were_several() -> None:
    result = example()
    assert "by start" not in report.markdown(result, MACHINE, None)
    result.entries.clear()
    measured = Interleaved()
    measured.extend(Interleaved({"ours": samples(8, 8), "limit": samples(10, 10)}), 0)
    measured.extend(Interleaved({"ours": samples(9, 9, 9), "limit": samples(10, 10, 10)}), 1)
    result.add(measured, KINDS, condition="4 KB")
    verdict = result.verdicts()[0]
    assert (verdict.ratio, verdict.by_start) == (0.9, (0.8, 0.9))
    assert "0.8, 0.9" in report.markdown(result, MACHINE, None)
    assert json.loads(report.to_json(result, MACHINE))["goals"][0]["by_start"] == [0.8, 0.9]


def test_a_failure_of_ours_is_a_failure_and_a_peers_is_something_not_measured() -> None:
    result = example()
    result.add(Interleaved({}, {"ours": "broke", "theirs": "broke too"}), KINDS)
    assert result.failed == ["ours failed: broke"]
    assert result.skipped == ["theirs failed: broke too"]


def test_json_has_every_figure_and_no_nan() -> None:
    result = example()
    result.add(Interleaved({"limit": [Sample(1.0)]}), KINDS)  # neither x nor processor time
    data = json.loads(report.to_json(result, MACHINE), parse_constant=pytest.fail)
    assert data["entries"][0]["values"] == [8, 9, 8]
    assert data["entries"][0]["ratios"] == {"limit": 0.8}
    assert data["entries"][0]["cpu_seconds_per_work"] == 0.05
    assert data["entries"][-1]["cpu_seconds"] is None
    assert data["machine"] == MACHINE
    assert [goal["verdict"] for goal in data["goals"]] == ["missed", "met", "not measured"]


def test_the_page_keeps_what_was_lost_and_what_was_left_out() -> None:
    result = example()
    result.skipped.append("Ray: no environment")
    page = report.markdown(result, MACHINE, "example.png")
    assert "| missed" in page
    assert "- Ray: no environment" in page
    assert "![An example](example.png)" in page
    assert "torch 2, numpy 3" in page


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    table = report.text_table(["what", "how much"], [["4 KB", "1.5"], ["8 KB", "12.5"]])
    assert table.splitlines()[1] == "| ---- | -------: |"
    assert table.splitlines()[2] == "| 4 KB |      1.5 |"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1234.5678, "1,235"),
        (12.345678, "12.35"),
        (0.0012345678, "0.001235"),
        (0.0, "0"),
        (float("nan"), ""),
    ],
)
def test_figures_have_about_four_digits(value: float, shown: str) -> None:
    assert report.figure(value) == shown


def test_files_are_written_whether_or_not_there_is_a_plot(tmp_path: Path) -> None:
    written = report.write(example(), MACHINE, tmp_path / "results")
    assert [path.suffix for path in written][:2] == [".json", ".md"]
    assert all(path.stat().st_size > 0 for path in written)
