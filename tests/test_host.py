"""What cannot fit in a host, or a container, is refused by its size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from trireme.errors import OutOfMemory
from trireme.host import check_fits, host_memory, process_birth

GIB = 1 << 30


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="ascii")
    return path


def test_without_limits_it_is_all_of_the_hosts_memory(tmp_path: Path) -> None:
    total = psutil.virtual_memory().total + psutil.swap_memory().total
    assert host_memory(tmp_path / "nothing", tmp_path) == total
    groups = written(tmp_path / "cgroup", "0::/pod/task\n")
    written(tmp_path / "pod/task/memory.max", "max\n")
    assert host_memory(groups, tmp_path) == total


def test_the_least_limit_of_the_groups_around_a_process_counts(tmp_path: Path) -> None:
    groups = written(tmp_path / "cgroup", "0::/pod/task\n")
    written(tmp_path / "pod/memory.max", f"{2 << 20}\n")
    written(tmp_path / "pod/task/memory.max", f"{3 << 20}\n")
    assert host_memory(groups, tmp_path) == 2 << 20


def test_a_group_has_any_name(tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    groups.write_bytes(b"0::/my task \xe4\n")
    group = tmp_path / os.fsdecode(b"my task \xe4")
    written(group / "memory.max", f"{4 << 20}\n")
    assert host_memory(groups, tmp_path) == 4 << 20


def test_a_refusal_names_both_sizes_and_what_to_do() -> None:
    check_fits(8 * GIB, "the model", "use a smaller one", 8 * GIB)
    with pytest.raises(OutOfMemory, match=r"the model takes 70,368\.7 GB.* 8\.6 GB at most: use a"):
        check_fits(1 << 46, "the model", "use a smaller one", 8 * GIB)


def test_a_process_has_one_and_another_has_another() -> None:
    own = process_birth(os.getpid())
    assert own
    assert own == process_birth(os.getpid())
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert process_birth(other.pid) not in ("", own)
        other.kill()
    assert process_birth(other.pid) == ""
