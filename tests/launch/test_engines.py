"""Options that engines have, and the engine of this host alone has not."""

from __future__ import annotations

import msgspec
import pytest

from trireme.errors import UsageError
from trireme.launch.config.sources import read_config
from trireme.launch.engines import ENGINES, EngineType, all_options, check_engine


def test_this_host_is_an_engine_without_options() -> None:
    assert "local" in ENGINES
    assert "local" not in {option.engine for option in all_options()}
    check_engine(read_config({"on": "local", "workers": "2"}, {}, None))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allow_plaintext": "yes"}, "all tasks of this one are on this host: leave it out"),
        ({"certs": "here"}, "for tasks on several hosts and with --tls; leave it out"),
        (
            {"on": "locl"},
            r"on is locl \(command line\): there is no engine locl \(did you mean local",
        ),
    ],
)
def test_what_contradicts_an_engine_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_engine(read_config(given, {}, None))


def test_an_option_of_an_engine_without_a_default_is_refused_where_the_engine_is_made() -> None:
    class Options(msgspec.Struct, kw_only=True):
        command: str

    with pytest.raises(TypeError, match=r"Options.command has no default"):
        EngineType("through a command", "none:run", Options)
