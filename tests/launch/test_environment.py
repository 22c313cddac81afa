from __future__ import annotations

from contextlib import nullcontext

import pytest

from trireme.errors import ConfigurationError, UsageError
from trireme.job_config import JobConfig
from trireme.launch import environment
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.launch.environment import detect


def test_alone_it_is_a_job_of_its_own() -> None:
    first, second = detect({}), detect({})
    assert (first.name, first.workers, first.servers, first.coordinator) == ("worker:0", 1, 0, "")
    assert first.job != second.job


def test_alone_it_says_which_variables_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    environ = {"TRIREME_WORKERS": "2", "TRIREME_RUN_DIR": "x", "TRIREME_PS": ""}
    assert detect(environ).workers == 1
    (warning,) = caplog.messages
    assert warning.startswith(
        "TRIREME_WORKERS, TRIREME_RUN_DIR: options of a launch, which a program"
    )
    with pytest.raises(UsageError, match="TRIREME_WORKRS, which is no option"):
        detect({"TRIREME_WORKRS": "2"})


def test_reads_what_a_launcher_wrote() -> None:
    config = TaskConfig(
        job="j",
        role="ps",
        index=3,
        workers=2,
        servers=4,
        secret="ab",
        config=JobConfig().replaced("command line", ps=4),
    )
    assert detect({TASK_VARIABLE: encode_task(config)}) == config


@pytest.mark.parametrize("value", ["", "{}", "[]", '{"job": "j", "wurkers": 2}', '{"job": 1}'])
def test_refuses_what_no_launcher_wrote(value: str) -> None:
    with pytest.raises(ConfigurationError, match=TASK_VARIABLE):
        detect({TASK_VARIABLE: value})


def test_does_not_show_the_secret() -> None:
    text = repr(TaskConfig(job="j", secret="abcdef"))
    assert "abcdef" not in text
    assert "job='j'" in text


@pytest.mark.parametrize(
    ("task", "refused"),
    [
        (TaskConfig(job="j-left-1", workers=2), True),
        (TaskConfig(job="j-left-2", servers=1, coordinator="tcp://127.0.0.1:9"), True),
        (TaskConfig(job="j-left-3"), False),
    ],
    ids=["workers", "servers", "alone"],
)
def test_a_process_takes_part_in_a_job_of_several_tasks_once(
    task: TaskConfig, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TASK_VARIABLE, encode_task(task))
    monkeypatch.setattr(environment, "_LEFT", {})
    mine = environment.current_task()
    environment.check_not_left(mine)
    environment.leave_task(mine)
    said = r"worker:0 has left its job, .*trireme\.run\(function"
    with pytest.raises(ConfigurationError, match=said) if refused else nullcontext():
        environment.check_not_left(environment.current_task())


def test_a_program_without_a_launcher_takes_part_in_jobs_as_often_as_it_likes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(TASK_VARIABLE, raising=False)
    own = TaskConfig(job="by-hand", servers=1)  # as connect(servers=...) makes it
    environment.leave_task(own)
    environment.check_not_left(own)
