"""Files without a name, and the descriptors that children inherit."""

from __future__ import annotations

import os
import subprocess
import sys

from trireme.launch.nameless_file import nameless_file, not_standard


def test_it_holds_what_was_written() -> None:
    with nameless_file("test") as file:
        file.write(b"content")
        assert os.pread(file.fileno(), 100, 0) == b"content"


def test_a_descriptor_is_moved_only_from_the_standard_streams() -> None:
    with nameless_file("test") as file:
        assert not_standard(file.fileno()) == file.fileno()


def test_it_is_no_standard_stream_of_a_program_that_has_closed_one() -> None:
    program = (
        "import os, sys\n"
        "from trireme.launch.nameless_file import nameless_file, not_standard\n"
        "os.close(0); os.close(1)\n"
        "file = nameless_file('test')\n"
        "ends = [not_standard(end) for end in os.pipe()]\n"
        "free = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)]\n"
        "sys.stderr.write(repr((min(file.fileno(), *ends) > 2, free)))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True
    )
    assert ended.stderr == "(True, [0, 1])"
