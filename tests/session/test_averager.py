"""Where a worker's periods end, and which examples a delta is of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trireme.ps.messages import Span
from trireme.ps.rule import Rule
from trireme.session.averager import _joined, period_length


@given(st.integers(1, 20), st.integers(0, 100), st.integers(1, 100))
def test_synchronous_periods_lie_on_one_grid_and_end_at_the_end(
    every: int, begin: int, more: int
) -> None:
    rule, step, end = Rule(0, 0, every=every), begin, begin + more
    ends = []
    while step < end:
        step += period_length(rule, step, end)
        ends.append(step)
    assert ends[-1] == end
    assert ends[:-1] == [s for s in range(begin + 1, end) if s % every == 0]


@given(st.integers(1, 20), st.integers(0, 100))
def test_one_by_one_a_period_is_whole_wherever_it_begins(every: int, begin: int) -> None:
    rule = Rule(1, 3, every=every)
    assert period_length(rule, begin, None) == every
    assert period_length(rule, begin, begin + 2) == min(every, 2)
    assert period_length(rule, begin, begin) == 1, "who was let begin makes a step"


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30)), unique=True, max_size=40))
def test_a_delta_names_its_examples_in_few_spans(batches: list[tuple[str, int]]) -> None:
    spans = _joined([Span(name, 4 * n, 4 * n + 4) for name, n in batches])
    covered = [(s.dataset, p) for s in spans for p in range(s.start, s.stop)]
    assert sorted(covered) == sorted((d, p) for d, n in batches for p in range(4 * n, 4 * n + 4))
    ends = {(span.dataset, span.stop) for span in spans}
    assert not ends & {(span.dataset, span.start) for span in spans}
