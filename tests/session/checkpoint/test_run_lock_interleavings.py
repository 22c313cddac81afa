"""A chief saves while two later ones claim its run directory, and save: every order of their steps.

Each runs the real code, in a thread that stops before every step by which it could see the others
or be seen. One step is let go at a time, and each order is played from the start, on a disk; what
was seen already, with the same memories and the same files, is not played on.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trireme.errors import ConfigurationError
from trireme.session.checkpoint import place, run_lock
from trireme.session.checkpoint.manifest import checkpoint_name, in_order
from trireme.session.checkpoint.place import LocalPlace
from trireme.session.checkpoint.run_lock import LocalLock, Writer, writer_here

DEADLINE = 20.0
ENDED = "ended"


@dataclass
class Chief:
    """One claimer, and what it has done so far."""

    view: int
    said: queue.Queue[str] = field(default_factory=queue.Queue)
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    memory: tuple[object, ...] = ()
    at: str = ""
    claimed: bool = False
    outcome: str = ""


class Play:
    """One order of steps, from the start.

    Args:
        run_dir: an empty directory.
        views: of the chiefs.
    """

    def __init__(self, run_dir: Path, views: tuple[int, ...]) -> None:
        self.run_dir = run_dir
        (run_dir / "checkpoints").mkdir(parents=True)
        self.chiefs = [Chief(view) for view in views]
        self.stopping = False
        self._threads = [
            threading.Thread(target=self._run, args=(chief,), name=str(number), daemon=True)
            for number, chief in enumerate(self.chiefs)
        ]

    def begin(self) -> None:
        """Has each chief come to its first step."""
        for thread, chief in zip(self._threads, self.chiefs, strict=True):
            thread.start()
            chief.at = chief.said.get(timeout=DEADLINE)

    def ready(self) -> list[int]:
        """Returns who has a step to do."""
        return [number for number, chief in enumerate(self.chiefs) if chief.at != ENDED]

    def let(self, number: int) -> None:
        """Has a chief do its step."""
        chief = self.chiefs[number]
        chief.go.release()
        chief.at = chief.said.get(timeout=DEADLINE)

    def published(self) -> list[int]:
        """Returns the views whose chiefs have saved, in the order of their checkpoints."""
        paths = in_order((self.run_dir / "checkpoints").iterdir())
        return [int((path / "view").read_text()) for path in paths]  # type: ignore[union-attr, operator]

    def state(self) -> object:
        """Returns all on which the rest depends."""
        chiefs = tuple((chief.at, chief.memory, chief.claimed) for chief in self.chiefs)
        files = sorted(
            (str(path.relative_to(self.run_dir)), _content(path))
            for path in self.run_dir.rglob("*")
            if not path.is_dir()
        )
        return chiefs, tuple((_without_token(name), content) for name, content in files)

    def end(self) -> None:
        """Ends the threads, wherever they are."""
        self.stopping = True
        for chief in self.chiefs:
            chief.go.release(1000)
        for thread in self._threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()

    def step(self, name: str, do: Callable[[], Any]) -> Any:
        """Does something when it is the caller's turn, and notes what came of it."""
        current = threading.current_thread().name
        if not current.isdecimal():
            return do()
        chief = self.chiefs[int(current)]
        if not self.stopping:
            chief.said.put(name)
            assert chief.go.acquire(timeout=DEADLINE)
        try:
            result = do()
        except Exception as error:
            chief.memory += ((name, type(error).__name__),)
            raise
        chief.memory += ((name, _plain(result)),)
        return result

    def _run(self, chief: Chief) -> None:
        writer = writer_here(f"worker:{chief.view}", "job", epoch="one", view=chief.view)
        lock = None
        try:
            lock = LocalLock(self.run_dir).claim(writer, first=False)
            chief.claimed = True

            def fill(directory: Any, *_: object) -> None:
                (directory / "view").write_text(str(chief.view))

            step = 100 - chief.view  # a later chief is behind
            LocalPlace(self.run_dir).write(checkpoint_name(step, lock.number), fill)
            chief.outcome = "published"
        except (ConfigurationError, OSError) as error:
            chief.outcome = type(error).__name__
        if lock is not None:
            lock.release()
        chief.said.put(ENDED)


def _content(path: Path) -> str:
    try:
        text = path.read_text()
    except OSError:
        return ""
    if path.name == "writer.json":
        named = msgspec.json.decode(text, type=Writer)
        return f"{named.task} {named.released}"
    return text


def _without_token(name: str) -> str:
    """A path, without what is drawn at random."""
    parts = name.split("/")
    return "/".join(part.rpartition(".")[0] if part.startswith(".") else part for part in parts)


def _plain(result: object) -> object:
    if isinstance(result, list):
        return tuple(sorted(_without_token(path.name) for path in result))
    if isinstance(result, tuple):
        return tuple(part.task if isinstance(part, Writer) else part for part in result)
    return result if isinstance(result, int | bool) else ""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, Play]:
    """Stops the chiefs of the play under `now` before each step that another could notice."""
    playing: dict[str, Play] = {}

    def stepped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: playing["now"].step(name, lambda: real(*given, **named))

    class Disk:
        """`os`, as `durable` sees it, and as `run_lock` does."""

        def __init__(self, **changed: Callable[..., Any]) -> None:
            self.__dict__.update(changed)

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

    monkeypatch.setattr(LocalLock, "newest", stepped("newest", LocalLock.newest))
    monkeypatch.setattr(run_lock, "os", Disk(rename=stepped("enter", os.rename), fsync=int))
    moves = {"replace": stepped("take away", os.replace), "rename": stepped("publish", os.rename)}
    monkeypatch.setattr(place, "os", Disk(**moves))
    for module in (place, run_lock):
        monkeypatch.setattr(module, "sync_directory", lambda path: None)
    return playing


@pytest.mark.thorough
def test_a_later_chiefs_checkpoint_is_the_newest_in_any_order_of_their_steps(
    tmp_path: Path, steps: dict[str, Play]
) -> None:
    seen: set[object] = set()
    ends: set[tuple[str, ...]] = set()
    todo: list[tuple[int, ...]] = [(0, 0)]  # the first has claimed, and goes on to publish
    while todo:
        order = todo.pop()
        directory = tmp_path / "run"
        play = steps["now"] = Play(directory, (4, 5, 6))
        try:
            play.begin()
            for number in order:
                play.let(number)
            # On with the first that can, and later with each of the others from here.
            while (state := play.state()) not in seen:
                seen.add(state)
                ready = play.ready()
                if not ready:
                    outcomes = tuple(chief.outcome for chief in play.chiefs)
                    assert outcomes[-1] == "published", (order, outcomes)
                    saved = [c.view for c in play.chiefs if c.outcome == "published"]
                    assert play.published() == saved, order
                    ends.add(outcomes)
                    break
                todo.extend((*order, other) for other in ready[1:])
                order = (*order, ready[0])
                play.let(ready[0])
        finally:
            play.end()
            shutil.rmtree(directory)
    assert ("published", "published", "published") in ends
    assert any("ConfigurationError" in outcomes for outcomes in ends)
    assert any("FileNotFoundError" in outcomes for outcomes in ends)
