from __future__ import annotations

import pytest

from trireme.errors import ConfigurationError
from trireme.session.options import make_options


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("run_dri", "run_dir"),
        ("max_step", "max_steps"),
        ("metric", "metrics"),
        ("clipnorm", "clip_norm"),
    ],
)
def test_a_misspelt_keyword_is_refused_with_what_was_meant(name: str, meant: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"no option '{name}' \(did you mean {meant}\?\)"):
        make_options({name: 1})  # type: ignore[misc]


def test_what_there_is_names_all_keywords() -> None:
    with pytest.raises(
        ConfigurationError, match=r"it has metrics, run_dir, max_steps, .*clip_norm"
    ):
        make_options({"xyz": 1})  # type: ignore[typeddict-unknown-key]


def test_distribute_names_itself_and_its_own_keywords() -> None:
    with pytest.raises(ConfigurationError, match=r"^distribute has no option 'metrics'") as refused:
        make_options({"metrics": {}}, caller="distribute", without=("hooks",))  # type: ignore[typeddict-unknown-key]
    assert "hooks" not in str(refused.value)
    assert "did you mean metrics" not in str(refused.value)
