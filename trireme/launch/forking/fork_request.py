"""What a launcher and the template of its tasks say to each other, each a line of JSON."""

from __future__ import annotations

import msgspec

OUTPUT, ERROR = "stdout", "stderr"
"""The names of the descriptors that become a task's standard output and error."""

LIMIT_BYTES = 1 << 22
"""The most bytes of a line. A command line has at most two million."""


class ForkRequest(msgspec.Struct, frozen=True, tag="fork"):
    """Asks for a task.

    Attributes:
        arguments: the task's command line, from its interpreter on.
        environ: the variables in which it differs from the template.
        descriptors: what each of the descriptors is for that come with the request: `OUTPUT`,
            `ERROR`, or the field of the task's configuration that names the descriptor.
    """

    arguments: tuple[str, ...]
    environ: dict[str, str]
    descriptors: tuple[str, ...]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The template has imported everything."""


class Forked(msgspec.Struct, frozen=True, tag="forked"):
    """A task runs, as a child of the launcher.

    Attributes:
        pid: its process id.
    """

    pid: int


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The template cannot fork tasks.

    Attributes:
        reason: why, in words that go on after "because".
    """

    reason: str


Answer = Ready | Forked | Refused
