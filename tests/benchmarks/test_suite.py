from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.bench_codecs import pays_below
from benchmarks.bench_push_pull import _size
from benchmarks.bench_topics import Learner, _in_turns
from benchmarks.context import Context
from benchmarks.emulated import Device
from benchmarks.peers import PEERS, Peers
from benchmarks.suite import BENCHMARKS, Benchmark, chosen


def test_benchmarks_are_chosen_by_letter_or_name() -> None:
    assert [b.letter for b in chosen(["replica", "c"])] == ["a", "c"]
    assert chosen([]) == [b for b in BENCHMARKS if not b.named_only]
    assert [b.name for b in chosen(["q"])] == ["architectures"]
    with pytest.raises(ValueError, match="no benchmark 'z'"):
        chosen(["z"])


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda b: b.name)
def test_every_benchmark_is_there(benchmark: Benchmark) -> None:
    assert importlib.util.find_spec(benchmark.module) is not None


def test_the_budgets_leave_time_to_set_up_within_fifteen_minutes() -> None:
    assert sum(b.seconds for b in chosen([])) <= 700


def test_missing_peers_are_named_with_how_to_get_them(tmp_path: Path) -> None:
    lines = Peers(tmp_path).missing()
    assert len(lines) == len(PEERS)
    assert all("make bench-peers" in line for line in lines)


def test_an_environment_that_was_not_finished_does_not_count(tmp_path: Path) -> None:
    binary = tmp_path / "ray" / "bin"
    binary.mkdir(parents=True)
    (binary / "python").touch()
    assert Peers(tmp_path).python("ray") is None
    (tmp_path / "ray" / "installed").touch()
    assert Peers(tmp_path).python("ray") == binary / "python"


def test_a_codec_pays_where_the_wire_takes_longer_than_it() -> None:
    # 3 MB saved, 3 ms taken: at 1 GB/s both are even.
    assert pays_below(3e6, 3e-3) == 1e9


def test_emulated_times_have_the_mean_that_was_asked_for() -> None:
    times = Device(0.02, jitter=0.3, seed=1).times(20_000)
    assert sum(times) / len(times) == pytest.approx(0.02, rel=0.02)
    assert min(times) > 0
    assert Device(0.02).times(3) == [0.02] * 3


@pytest.mark.parametrize(
    ("nbytes", "shown"), [(4 << 10, "4 KB"), (318_080, "318 KB"), (32 << 20, "32 MB")]
)
def test_sizes_are_shown_as_people_say_them(nbytes: int, shown: str) -> None:
    assert _size(nbytes) == shown


def test_a_program_that_fails_is_left_out_of_all_figures(tmp_path: Path) -> None:
    said: list[str] = []
    context = Context(1.0, 1, False, Peers(tmp_path), None, tmp_path, said.append)
    good, bad = (Learner(name, "peer", (), (1, 1), (1, 1)) for name in ("good", "bad"))
    turns: list[tuple[str, int]] = []

    def measure(learner: Learner, seed: int) -> tuple[float, float]:
        turns.append((learner.name, seed))
        if learner is bad and seed == 1:
            raise RuntimeError("no memory")
        return 1.0 + seed, 2.0

    first, second = _in_turns(context, {good: 2, bad: 3}, measure, figures=2)
    assert turns == [("good", 0), ("bad", 0), ("good", 1), ("bad", 1)]
    assert (first.values("good"), second.values("good")) == ([1.0, 2.0], [2.0, 2.0])
    assert first.failed == second.failed == {"bad": "RuntimeError: no memory"}
    assert list(first.samples) == list(second.samples) == ["good"]
    assert said == ["bad failed: no memory"]
