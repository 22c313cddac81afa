"""What `trireme` exports is what it says, and costs nothing before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import trireme
from trireme import errors


@pytest.mark.parametrize("name", trireme.__all__)
def test_a_public_name_is_there(name: str) -> None:
    assert getattr(trireme, name) is not None


def test_every_public_name_says_so() -> None:
    lazy = {name for names in trireme._HOME.values() for name in names}
    assert set(trireme.__all__) == lazy | set(errors.__all__)
    assert len(trireme.__all__) == len(set(trireme.__all__))
    assert set(trireme.__all__) <= set(dir(trireme))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Sesion'"):
        _ = trireme.Sesion  # type: ignore[attr-defined]


def test_a_name_of_a_part_that_is_not_installed_names_its_extra() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "trireme.jobs", None)
        for module in [name for name in sys.modules if name.startswith("trireme.jobs.")]:
            patch.delitem(sys.modules, module)
        patch.delitem(vars(trireme), "run", raising=False)
        with pytest.raises(
            errors.ConfigurationError,
            match=r"trireme\.run is in a plug-in .* pip install 'trireme-train\[notebook\]'",
        ):
            _ = trireme.run


def test_the_verdicts_of_a_step_are_public() -> None:
    assert isinstance(trireme.Applied(3), trireme.Applied)
    assert isinstance(trireme.Stale(3), trireme.Stale)


@pytest.mark.thorough
def test_subpackages_are_reached_without_an_import_of_their_own() -> None:
    code = "import trireme; print(trireme.data.__name__, trireme.models.__name__)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout == "trireme.data trireme.models\n"


def test_importing_it_loads_no_pytorch() -> None:
    code = "import sys, trireme; print('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout == "False\n"
