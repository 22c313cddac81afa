from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.errors import ConfigurationError
from trireme.launch.environment.process_launchers import expand_nodelist


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ["login"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("a,b[9-11],c", ["a", "b9", "b10", "b11", "c"]),
        ("rack[1-2]-node[1-2]", ["rack1-node1", "rack1-node2", "rack2-node1", "rack2-node2"]),
        ("n[1-2].example.org", ["n1.example.org", "n2.example.org"]),
    ],
)
def test_expands_what_slurm_writes(text: str, hosts: list[str]) -> None:
    assert expand_nodelist(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,", ",a", "a,,b", "n[", "n[]", "n]", "n[a]", "n[2-1]", "n[1-2-3]", "a b"]
)
def test_refuses_what_slurm_does_not_write(text: str) -> None:
    with pytest.raises(ConfigurationError, match="no list of hosts"):
        expand_nodelist(text)


def test_refuses_a_list_that_nobody_means() -> None:
    with pytest.raises(ConfigurationError, match="no list of hosts"):
        expand_nodelist("n[1-999999999]")


@given(st.text(alphabet="an[]-,019 ", max_size=12))
def test_any_text_gives_hosts_or_one_error(text: str) -> None:
    try:
        hosts = expand_nodelist(text)
    except ConfigurationError:
        return
    assert hosts
    assert all(set(host) <= set("an-019") for host in hosts)
