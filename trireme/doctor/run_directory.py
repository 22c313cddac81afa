"""Checks of a run directory: its disk, and who uses it. Pure functions of facts."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.doctor.check import GIB, MIB, Check, bytes_as_text

LITTLE_DISK, NO_DISK = GIB, 64 * MIB


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """A run directory.

    Attributes:
        path: the directory.
        free, total: of its file system, in bytes.
        failure: why it cannot be written; empty if it can.
        locks: whether its file system has file locks.
        job: the job whose launcher runs there, in words; empty if none does.
        writer: the process that may write checkpoints there, in words; empty if none may.
        stopped: whether that process is stopped.
        stop: the command that stops it.
    """

    path: str
    free: int
    total: int
    failure: str = ""
    locks: bool = True
    job: str = ""
    writer: str = ""
    stopped: bool = False
    stop: str = ""


def check_directory(facts: DirectoryFacts) -> list[Check]:
    """Checks the space, the permission, the locks, and who uses the directory."""
    return [_check_disk(facts), *_check_writing(facts), _check_users(facts)]


def _check_disk(facts: DirectoryFacts) -> Check:
    text = f"{bytes_as_text(facts.free)} free of {bytes_as_text(facts.total)} at {facts.path}"
    if facts.free >= LITTLE_DISK:
        return Check("disk", "ok", text)
    advice = "make room, keep fewer checkpoints (Checkpoint(keep=...)), or name another --run-dir"
    return Check("disk", "problem" if facts.free < NO_DISK else "warning", text, advice)


def _check_writing(facts: DirectoryFacts) -> list[Check]:
    if facts.failure:
        advice = "change its owner or permissions, or name another directory with --run-dir"
        finding = f"{facts.path} cannot be written: {facts.failure}"
        return [Check("run directory", "problem", finding, advice)]
    if not facts.locks:
        advice = "use a file system with locks (NFS mounts: without nolock)"
        finding = f"the file system of {facts.path} has no file locks: two jobs could write there"
        return [Check("run directory", "warning", finding, advice)]
    return [Check("run directory", "ok", f"{facts.path} can be written and locked")]


def _check_users(facts: DirectoryFacts) -> Check:
    topic = "run lock"
    if facts.writer and facts.stopped:
        finding = f"{facts.writer} holds it and is stopped"
        return Check(
            topic, "problem", finding, f"continue it (kill -CONT), or end it: {facts.stop}"
        )
    if facts.job:
        text = f"{facts.job} runs there"
        return Check(topic, "ok", f"{text}, and {facts.writer} writes" if facts.writer else text)
    if facts.writer:
        finding = f"{facts.writer} writes there"
        return Check(topic, "warning", finding, f"to start another job there, first: {facts.stop}")
    return Check(topic, "ok", "no job uses it")
