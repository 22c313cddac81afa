from __future__ import annotations

import os
import subprocess
import sys

from trireme.process_birth import process_birth


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
