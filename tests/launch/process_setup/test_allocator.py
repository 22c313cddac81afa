"""The allocator's settings, each tried in a process of its own: they cannot be taken back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trireme.launch.process_setup.resources import keep_freed_memory

FAULTS = """
import os, resource
import numpy as np
from trireme.launch.process_setup.resources import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def churn(times):
    for _ in range(times):
        np.empty(8 << 20, np.uint8).fill(1)

if {keep}:
    assert keep_freed_memory({{}})
churn(3)
before = faults()
churn(20)
print(faults() - before)
"""

linux = pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")


def faults(*, keep: bool) -> int:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(keep=keep)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout)


@linux
def test_memory_that_is_freed_is_used_again_without_asking_the_system() -> None:
    pages = 20 * (8 << 20) // os.sysconf("SC_PAGESIZE")
    assert faults(keep=True) < pages // 10


@linux
def test_what_the_user_has_set_stays() -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        assert not keep_freed_memory({name: "1"})
