"""Engines and their options, at the example of Ray, as far as metadata say that it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.metadata import forget, write_metadata
from trireme.cli.command import COMMANDS
from trireme.errors import ConfigurationError, UsageError
from trireme.launch.config.sources import read_config, read_file
from trireme.launch.engines import ENGINES, all_options, check_engine, engine_options
from trireme.ray.options import RayOptions


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Has a distribution `ray` installed, as far as metadata say."""
    monkeypatch.syspath_prepend(tmp_path)
    write_metadata(tmp_path, "ray")
    yield
    monkeypatch.undo()
    forget()


@pytest.fixture
def no_ray() -> None:
    if "ray" in ENGINES:
        pytest.skip("Ray is installed")


def test_an_engine_that_is_not_installed_has_no_options(no_ray: None) -> None:
    assert "ray" not in ENGINES.names()
    assert not [option for option in all_options() if option.engine == "ray"]
    assert "ray" not in COMMANDS.load("run").parser().format_help()
    with pytest.raises(
        ConfigurationError,
        match=r"on is ray \(command line\): the engine ray needs ray: pip install 'trireme-train",
    ):
        check_engine(read_config({"on": "ray"}, {}, None))


def test_an_engine_brings_its_options(ray: None, tmp_path: Path) -> None:
    text = COMMANDS.load("run").parser().format_help()
    assert "--on ENGINE" in text and "ray: the nodes of a Ray cluster" in " ".join(text.split())
    assert "--ray-address ADDRESS" in text
    (tmp_path / "trireme.toml").write_text("ray-pack-workers = true\n")
    config = read_config(
        {"on": "ray", "ray_cpus_per_worker": "3"},
        {"TRIREME_RAY_GPUS_PER_WORKER": "0.5"},
        read_file(None, tmp_path),
    )
    check_engine(config)
    assert engine_options(config, RayOptions) == RayOptions(
        cpus_per_worker=3, gpus_per_worker=0.5, pack_workers=True
    )
    shown = {line.split()[0]: line.split()[1:] for line in config.lines(all_options())}
    assert shown["ray-cpus-per-worker"] == ["3", "command", "line"]
    assert shown["ray-address"] == ["auto", "default"]
    assert config.values["ray-gpus-per-worker"] == 0.5
    assert config.origin("ray_pack_workers") == "file trireme.toml"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"allow_plaintext": "yes"}, "leave it out, or add --on ray"),
        ({"ray_address": "a:1"}, "--ray-address is of another engine: add --on ray"),
        ({"on": "ray", "ray_gpus_per_worker": "1.5"}, "it must be a whole number from 0, or a"),
        ({"on": "ray", "tls": "yes", "allow_plaintext": "yes"}, "contradict each other"),
        ({"on": "ray", "workers": "auto"}, "give --workers N"),
        ({"on": "rey"}, r"on is rey \(command line\): there is no engine rey \(did you mean ray"),
    ],
)
def test_what_contradicts_an_engine_is_refused(
    ray: None, given: dict[str, str], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        check_engine(read_config(given, {}, None))
