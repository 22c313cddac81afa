"""The keys that come up most often are known, whatever comes besides."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trireme.dashboards.summaries import KeyCounts

batches = st.lists(st.sets(st.integers(-20, 20)), max_size=30)


@given(batches, st.integers(1, 60), st.integers(0, 50))
def test_counts_are_exact_while_all_keys_are_kept(
    batches: list[set[int]], pending: int, most: int
) -> None:
    counts, exact = KeyCounts(pending=pending), Counter[int]()
    for batch in batches:
        counts.add(np.array(sorted(batch), np.int64))
        exact.update(batch)
    wanted = sorted(exact, key=lambda key: (-exact[key], key))[:most]
    assert counts.frequent(most).tolist() == wanted


def test_frequent_keys_are_kept_among_many_others() -> None:
    counts, generator = KeyCounts(kept=100, pending=1_000), np.random.default_rng(0)
    frequent = np.arange(50)
    for _ in range(200):
        others = generator.choice(1 << 40, 200, replace=False) + 50
        counts.add(np.concatenate([frequent, others]))
    assert counts.frequent(50).tolist() == frequent.tolist()
