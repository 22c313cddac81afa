from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.environments.launchers import first_node


@pytest.mark.parametrize(
    ("text", "host", "alone"),
    [
        ("login", "login", True),
        ("node-1[07]", "node-107", True),
        ("node[01-03,7]", "node01", False),
        ("a,b[9-11],c", "a", False),
        ("rack[1-2]-node[1-2]", "rack1-node1", False),
        ("n[1,3].example.org", "n1.example.org", False),
        ("n[1-999999999]", "n1", False),
    ],
)
def test_the_first_host_that_slurm_names(text: str, host: str, alone: bool) -> None:
    assert first_node(text) == (host, alone)


@pytest.mark.parametrize(
    "text", ["", ",", "a,", ",a", "a,,b", "n[", "n[]", "n]", "n[a]", "n[1-2-3]", "a b"]
)
def test_no_host_is_in_what_slurm_does_not_write(text: str) -> None:
    assert first_node(text) == ("", False)


@given(st.text(alphabet="an[]-,019 ", max_size=12))
def test_any_text_gives_a_host_or_none(text: str) -> None:
    assert set(first_node(text)[0]) <= set("an-019")
