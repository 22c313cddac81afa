from __future__ import annotations

import os
from pathlib import Path

import pytest

from trireme.job_config import JobConfig
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.program_directory import (
    forget_named,
    link_named,
    move_into,
    name_run_dir,
    unlink_name,
)
from trireme.launch.run_directory import RunDirectory, claim, is_running


@pytest.fixture
def started(tmp_path: Path) -> RunDirectory:
    """A launcher's directory as it is when a worker names the program's."""
    return start(tmp_path)


def start(tmp_path: Path) -> RunDirectory:
    unlink_name(tmp_path / "runs" / "train")
    directory = claim(tmp_path / "runs" / "train")
    forget_named(directory.path)
    directory.write_secret("secret")
    (directory.path / "job.json").write_text("{}")
    (directory.path / "records").mkdir(exist_ok=True)
    directory.log("worker:0").write_text("a line\n")
    (directory.path / "records" / "ps-0.jsonl").write_text("a record\n")
    return directory


def worker(directory: RunDirectory, **fields: object) -> TaskConfig:
    records = directory.path.resolve() / "records"
    return TaskConfig(**({"job": "j", "records": str(records)} | fields))  # type: ignore[arg-type]


def run(directory: RunDirectory, named: Path) -> None:
    """Names the program's directory, and ends the job."""
    name_run_dir(worker(directory), named)
    assert link_named(directory.path) == named
    move_into(directory.path, named)
    directory.release()


def test_a_job_is_found_by_either_name_and_has_one_directory_at_the_end(
    started: RunDirectory, tmp_path: Path
) -> None:
    mine, name = tmp_path / "elsewhere" / "mine", tmp_path / "runs" / "train"
    assert link_named(name) is None  # the program has not begun
    name_run_dir(worker(started), mine)
    assert link_named(name) == mine
    started.log("worker:0").write_text("a line\nanother\n")
    for path in (mine, name):
        assert is_running(path)
        assert (path / "job.json").read_text() == "{}"
        assert (path / "records" / "ps-0.jsonl").read_text() == "a record\n"
    move_into(name, mine)
    assert name.resolve() == mine
    for path in (mine, name):
        assert is_running(path)
        assert (path / "logs" / "worker-0.log").read_text() == "a line\nanother\n"
        assert sorted(os.listdir(path)) == ["job.json", "job.lock", "job.secret", "logs", "records"]
        assert not any(entry.is_symlink() for entry in path.iterdir())
    started.release()
    assert not is_running(name)
    assert not (mine / "job.secret").exists()


def test_the_next_job_of_the_script_is_added_or_has_a_directory_of_its_own(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run(start(tmp_path), one)
    run(start(tmp_path), one)
    assert (one / "logs" / "worker-0.log").read_text() == 2 * "a line\n"
    assert (one / "records" / "ps-0.jsonl").read_text() == 2 * "a record\n"
    run(start(tmp_path), two)
    assert (tmp_path / "runs" / "train").resolve() == two
    assert (one / "logs" / "worker-0.log").read_text() == 2 * "a line\n"


def test_what_a_killed_launcher_left_is_found_and_moved_by_the_next(
    started: RunDirectory, tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    name_run_dir(worker(started), mine)
    assert link_named(started.path) == mine
    started.lock.close()  # as the kernel does
    assert not is_running(mine)
    assert (mine / "job.json").read_text() == "{}"
    run(start(tmp_path), mine)
    assert not any(entry.is_symlink() for entry in mine.iterdir())


def test_a_link_to_a_running_job_and_a_users_link_stay(
    started: RunDirectory, tmp_path: Path
) -> None:
    name_run_dir(worker(started), tmp_path / "mine")
    assert link_named(started.path)
    move_into(started.path, tmp_path / "mine")
    unlink_name(tmp_path / "runs" / "train")
    assert is_running(tmp_path / "runs" / "train")
    started.release()
    (tmp_path / "own").mkdir()
    (tmp_path / "runs" / "own").symlink_to(tmp_path / "own")
    unlink_name(tmp_path / "runs" / "own")
    assert (tmp_path / "runs" / "own").is_symlink()


def test_what_is_not_linked(started: RunDirectory, tmp_path: Path) -> None:
    def stays(task: TaskConfig, run_dir: Path | None) -> bool:
        name_run_dir(task, run_dir)
        return link_named(started.path) is None

    mine = tmp_path / "mine"
    assert stays(worker(started), None)  # a program without one
    assert stays(worker(started), started.path)  # it is the same
    assert stays(worker(started, index=1, workers=2), mine)
    assert stays(worker(started, config=JobConfig().replaced("a test", run_dir="x")), mine)
    assert stays(TaskConfig(job="j"), mine)  # on Ray
    assert not mine.exists()
    other = claim(mine)
    assert stays(worker(started), mine)  # another job runs there
    other.release()
    started.release()


def test_a_directory_with_other_files_stays_and_the_links_too(
    started: RunDirectory, tmp_path: Path
) -> None:
    (started.path / "checkpoints").mkdir()  # of an earlier program
    run(started, tmp_path / "mine")
    assert (started.path / "logs" / "worker-0.log").read_text() == "a line\n"
    assert (tmp_path / "mine" / "job.json").read_text() == "{}"
