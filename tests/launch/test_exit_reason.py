"""The pipe in which a task tells its launcher why it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from trireme.errors import CorruptedValues
from trireme.launch.exit_reason import ExitReason, LauncherPipe, decode_reason, describe

REASON = ExitReason(kind="exception", summary="ValueError: two\\nlines", loss="step 3", at=2.0)


@pytest.fixture
def ends() -> Iterator[tuple[LauncherPipe, IO[bytes]]]:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as messages:
        yield LauncherPipe(writer), messages


def test_a_reason_is_read_as_it_was_sent(ends: tuple[LauncherPipe, IO[bytes]]) -> None:
    pipe, messages = ends
    pipe.send(REASON)
    assert decode_reason(messages.readline()) == REASON


def test_other_lines_are_no_reason() -> None:
    assert decode_reason(b'{"type": "listening"}\n') is None
    assert decode_reason(b"\xff\n") is None


def test_a_launcher_that_is_gone_ends_nothing(ends: tuple[LauncherPipe, IO[bytes]]) -> None:
    pipe, messages = ends
    messages.close()
    pipe.send(REASON)


def test_the_children_of_a_task_do_not_inherit_the_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    pipe = LauncherPipe(writer)
    assert not os.get_inheritable(writer)
    del pipe
    os.close(reader)


def test_corrupted_values_end_the_job_unless_others_have_them() -> None:
    error = CorruptedValues("bit 3 of it")
    assert describe(error).kind == "corrupted" and not describe(error).worth_a_restart
    error.others_go_on = True
    assert describe(error).kind == "error" and describe(error).worth_a_restart


def test_what_cannot_be_sent_of_a_text_is_escaped_or_left_out(
    ends: tuple[LauncherPipe, IO[bytes]],
) -> None:
    pipe, messages = ends
    pipe.send(describe(ValueError("x\ud800\x1b[2J" + "y" * 3_000_000), "train.py:3"))
    reason = decode_reason(messages.readline())
    assert reason is not None
    assert reason.summary.startswith("ValueError: x\\ud800\\x1b[2Jyyy")
    assert reason.summary.endswith("yyy (train.py:3)") and len(reason.summary) < 5000
