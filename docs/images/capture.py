"""Takes the pictures of the program anew: what a terminal and a browser show of it today.

    python docs/images/capture.py                   all of them
    python docs/images/capture.py top report        some of them

Needs tmux; `report` needs Chromium. Those of TensorBoard are screenshots of
`make browser-test`, in build/browser. `pipeline.png` is a schedule as it was traced.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from render import COLUMNS, write

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
TRIREME = str(Path(sys.executable).with_name("trireme"))
DIGITS = "examples/digits.py"
PATIENCE = 300.0
"""How many seconds a picture is waited for."""


def running(scratch: Path) -> None:
    """The terminal while the demo trains."""
    job = ["run", "--ps", "1", "--workers", "2", "--run-dir", "runs/demo", DIGITS]
    photograph([*job, "--max-steps", "6000"], scratch, r"[2-9]\d{3}/6,?000", "running", "make demo")


def top(scratch: Path) -> None:
    """`trireme top` while the others wait for a worker that is stopped."""
    with job_of(scratch, "--ps", "2", "--workers", "3", "--strategy", "sync") as run:
        stopped = process_of("worker:1", run)
        os.kill(stopped, signal.SIGSTOP)
        try:
            photograph(
                ["top", str(run)], scratch, "has said nothing for [3-9]", "top", "trireme top"
            )
        finally:
            os.kill(stopped, signal.SIGCONT)


def report(scratch: Path) -> None:
    """The report of a run, in a browser."""
    browser = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
    job = ["run", "--ps", "1", "--workers", "2", "--run-dir", "runs/report", DIGITS]
    subprocess.run([TRIREME, *job], cwd=scratch, check=True, timeout=PATIENCE)
    subprocess.run([TRIREME, "report", "runs/report"], cwd=scratch, check=True, timeout=PATIENCE)
    shot = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,1016"]
    page = (scratch / "runs" / "report" / "report.html").as_uri()
    picture = FOLDER / "report.png"
    subprocess.run([*shot, f"--screenshot={picture}", page], check=True, timeout=PATIENCE)


PICTURES: dict[str, Callable[[Path], None]] = {"running": running, "top": top, "report": report}


@contextmanager
def job_of(scratch: Path, *options: str) -> Iterator[Path]:
    """Yields the run directory of a job that trains, and stops it in the end."""
    run = scratch / "runs" / "watched"
    command = [TRIREME, "run", *options, "--run-dir", str(run), DIGITS, "--max-steps", "1000000"]
    with (scratch / "job.log").open("w") as log:
        job = subprocess.Popen(command, cwd=scratch, stdout=log, stderr=log)
    try:
        wait_until(lambda: "step 500" in (scratch / "job.log").read_text("utf-8"), "no step")
        yield run
    finally:
        job.send_signal(signal.SIGINT)
        job.wait(PATIENCE)


def process_of(task: str, run: Path) -> int:
    """Returns the process of a task, as `trireme status` says it."""
    status = subprocess.run(
        [TRIREME, "status", str(run)], capture_output=True, text=True, check=True, timeout=PATIENCE
    )
    found = re.search(rf"^\s*{task}\s+process (\d+)", status.stdout, re.MULTILINE)
    if found is None:
        raise SystemExit(f"trireme status names no process of {task}:\n{status.stdout}")
    return int(found[1])


def photograph(words: list[str], scratch: Path, ready: str, name: str, title: str) -> None:
    """Runs a command in a terminal, and draws it as soon as it shows a pattern."""
    session = f"trireme-picture-{os.getpid()}"
    size = ["-x", str(COLUMNS), "-y", "34"]
    command = f"cd {shlex.quote(str(scratch))} && {shlex.join([TRIREME, *words])}; sleep 60"
    subprocess.run(["tmux", "new-session", "-d", "-s", session, *size, command], check=True)
    capture = ["tmux", "capture-pane", "-t", session, "-e", "-p"]
    shown = ""

    def is_ready() -> bool:
        nonlocal shown
        shown = subprocess.run(capture, capture_output=True, text=True, check=True).stdout
        return re.search(ready, re.sub(r"\x1b\[[\d;]*m", "", shown)) is not None

    try:
        wait_until(is_ready, f"the terminal never showed {ready}")
        write(shown, FOLDER / f"{name}.svg", title)
    finally:
        subprocess.run(["tmux", "kill-session", "-t", session], check=False)


def wait_until(is_so: Callable[[], bool], problem: str) -> None:
    """Waits until something is so.

    Raises:
        SystemExit: it was not within PATIENCE seconds.
    """
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"{problem} within {PATIENCE:.0f} s")
        time.sleep(0.1)


def main() -> None:
    """Takes the pictures that are named, or all."""
    for name in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / "examples").symlink_to(ROOT / "examples")  # named as users name it
            PICTURES[name](Path(scratch))
        print(f"docs/images: {name}")


if __name__ == "__main__":
    main()
