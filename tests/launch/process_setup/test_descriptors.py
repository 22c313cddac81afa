"""The limit of descriptors, raised in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

RAISES = """
import resource
from trireme.launch.process_setup.resources import allow_many_descriptors

resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(allow_many_descriptors(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("soft", "hard", "expected"), [(64, 512, 512), (256, 256, 256)])
def test_the_soft_limit_becomes_the_hard_one(soft: int, hard: int, expected: int) -> None:
    program = RAISES.format(soft=soft, hard=hard)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout.split() == [str(expected), str(expected)], ended.stderr
