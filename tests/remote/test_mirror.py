from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.remote.bucket import Bucket
from trireme.remote.mirror import Mirror


def mirror(bucket: Bucket, directory: Path, **options: object) -> Mirror:
    return Mirror(
        bucket.store(), directory, ("job.json", "logs", "job.secret"), seconds=3600, **options
    )


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def test_what_is_named_and_no_secret_is_uploaded_at_the_end(tmp_path: Path) -> None:
    bucket = Bucket()
    write(tmp_path / "logs" / "before.log", "of an earlier job")
    import os

    os.utime(tmp_path / "logs" / "before.log", (1, 1))
    with closing(mirror(bucket, tmp_path)):
        for name in ("job.json", "job.secret", "logs/a.log", "other/b"):
            write(tmp_path / name, "x")
        (tmp_path / "logs" / "link.log").symlink_to(tmp_path / "job.secret")
    assert bucket.keys == ["job.json", "logs/a.log"]
    assert bucket.store().read("logs/a.log") == b"x"


def test_a_process_that_may_not_write_uploads_nothing(tmp_path: Path) -> None:
    bucket = Bucket()
    with closing(mirror(bucket, tmp_path, allowed=lambda: False)):
        write(tmp_path / "job.json", "x")
    assert bucket.keys == []


def test_a_failed_upload_is_told_and_does_no_harm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(number: int) -> None:
        raise TimeoutError("no answer")

    names = ("job.json",)
    with closing(Mirror(Bucket().store(before=fail), tmp_path, names, seconds=3600)):
        write(tmp_path / "job.json", "x")
    assert "no answer" in caplog.text
