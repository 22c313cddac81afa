"""A job's secret: how a task gets it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec
import pytest

from tests.launch.programs import run_programs
from trireme.errors import ConfigurationError
from trireme.launch.config.secret import SECRET_VARIABLE, fresh_secret, secret_descriptor
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.launch.environment import detect

LONG = "0123456789abcdef" * 2


def test_fresh_secrets_differ() -> None:
    assert fresh_secret() != fresh_secret()
    assert len(fresh_secret()) == 64


def test_a_task_reads_it_from_what_it_inherits_as_often_as_it_asks() -> None:
    with secret_descriptor(TaskConfig(job="j", secret="abcd")) as task:
        environ = {TASK_VARIABLE: encode_task(task)}
        assert [detect(environ).secret, detect(environ).secret] == ["abcd", "abcd"]


def test_who_is_started_by_a_task_is_not_that_task() -> None:
    with secret_descriptor(TaskConfig(job="another job", secret="abcd")) as task:
        environ = {TASK_VARIABLE: encode_task(msgspec.structs.replace(task, job="j"))}
        with pytest.raises(ConfigurationError, match="is not that task"):
            detect(environ)
    with pytest.raises(ConfigurationError, match="is not that task"):
        detect(environ)


def test_a_worker_has_it_and_what_it_starts_has_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, LONG)
    look = (
        "import subprocess; from trireme.launch.environment import detect; "
        "open(HERE + '/secret', 'w').write(detect().secret); "
        "print(open('/proc/self/environ').read()); "
        "subprocess.run(['env']); "
        "child = subprocess.run(['ls', '-l', '/proc/self/fd'], capture_output=True, text=True); "
        "print(child.stdout)"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    ran = run_programs(tmp_path, {"worker:0": look})
    assert ran.status == 0, ran.err
    assert (tmp_path / "secret").read_text() == "00"  # the job's
    assert LONG not in ran.out
    tasks = [line for line in ran.out.splitlines() if "TRIREME_TASK=" in line]
    assert tasks and all('"secret":""' in line for line in tasks)
    assert "trireme-secret" not in ran.out
