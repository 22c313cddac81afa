from __future__ import annotations

from pathlib import Path

import pytest

from trireme.errors import ConfigurationError
from trireme.location import RemotePath, local_directory, location


def test_paths_stay_paths_and_urls_become_remote() -> None:
    assert location("runs/a") == Path("runs/a")
    assert location(Path("/x")) == Path("/x")
    assert location("S3://bucket/a/run/") == RemotePath("s3://bucket/a/run")
    assert location("runs/10:30") == Path("runs/10:30")


def test_a_remote_path_is_named_as_a_path() -> None:
    path = RemotePath("s3://bucket/run") / "checkpoints"
    assert (str(path), path.name, path.parent.name) == (
        "s3://bucket/run/checkpoints",
        "checkpoints",
        "run",
    )


def test_the_scratch_directory_stays_below_runs() -> None:
    assert local_directory("s3://bucket/../../etc/a b") == Path("runs/s3/bucket/etc/a%20b")
    assert local_directory("s3://b/a+b") != local_directory("s3://b/a_b")
    assert local_directory("/x") == Path("/x")


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("ftp://host/run", "not known"),
        ("s3://bucket", "name a bucket and a directory"),
        ("s3:///run", "name a bucket and a directory"),
        ("s3://bucket//run", "name a bucket and a directory"),
        ("file:///run", "not known"),
        (Path("s3://bucket/run"), "lost one of its slashes"),
    ],
)
def test_what_cannot_be_a_run_directory_is_refused(place: str | Path, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        location(place)
