"""The pipe in which a task tells its launcher why it ends, and the coordinator who takes part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from trireme.launch.exit_reason import ExitReason
from trireme.launch.task_messages import (
    LauncherPipe,
    Listening,
    LostTask,
    MembershipReport,
    decode_message,
    membership_reports,
)

LOST = MembershipReport(joined=True, lost=(LostTask("worker:1", 7, "it sent nothing for 10.0 s"),))


@pytest.fixture
def ends() -> Iterator[tuple[LauncherPipe, IO[bytes]]]:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as messages:
        yield LauncherPipe(writer), messages


def test_each_message_is_read_as_it_was_sent(ends: tuple[LauncherPipe, IO[bytes]]) -> None:
    pipe, messages = ends
    reason = ExitReason(kind="exception", summary="ValueError: two\\nlines", loss="step 3", at=2.0)
    for message in (Listening("tcp://127.0.0.1:9"), LOST, reason):
        pipe.send(message)
        assert decode_message(messages.readline()) == message


def test_a_report_is_repeated_although_nothing_changes(
    ends: tuple[LauncherPipe, IO[bytes]],
) -> None:
    pipe, messages = ends
    with membership_reports(pipe, lambda: LOST):
        for _ in range(2):
            assert decode_message(messages.readline()) == LOST
    assert decode_message(messages.readline()) == LOST  # the last word, at the end


def test_what_is_new_is_told(ends: tuple[LauncherPipe, IO[bytes]]) -> None:
    pipe, messages = ends
    told = [MembershipReport()]
    with membership_reports(pipe, lambda: told[0]):
        assert decode_message(messages.readline()) == MembershipReport()
        told[0] = LOST
        while (report := decode_message(messages.readline())) != LOST:
            assert report == MembershipReport()


def test_a_launcher_that_is_gone_ends_nothing(ends: tuple[LauncherPipe, IO[bytes]]) -> None:
    pipe, messages = ends
    messages.close()
    with membership_reports(pipe, lambda: LOST):
        pipe.send(LOST)


def test_the_children_of_a_task_do_not_inherit_the_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    pipe = LauncherPipe(writer)
    assert not os.get_inheritable(writer)
    del pipe
    os.close(reader)
