"""What one process has to know of its job: the job's configuration, and which task it is.

A launcher passes it in the environment variable `TRIREME_TASK`, as a `TaskConfig` in JSON.
"""

from __future__ import annotations

import uuid
from typing import Any, Literal

import msgspec

from trireme.certificates import Certificates
from trireme.errors import ConfigurationError
from trireme.job_config import JobConfig

TASK_VARIABLE = "TRIREME_TASK"

TASK_WORD = "--task"  # the word after `trireme` with which a launcher starts a task

BY_HAND = "by-hand"
"""The id of every job started by hand, as there is no launcher to choose one for all of its tasks.
Address and secret keep such jobs apart."""

Role = Literal["coordinator", "ps", "worker"]

DRAWN = 73
"""The exit status of a program that was ended when its graph was drawn, by which `trireme graph`
tells it from one that has ended by itself."""


class GroupMember(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the processes that hold one model: all of a job without servers, or of one worker."""

    size: int = 1
    rank: int = 0
    local_rank: int = 0  # among the processes of the group on this host
    one_host: bool = False  # all of them are known to be on this host
    address: str = ""  # where they meet, as `host:port`
    prefix: str = ""  # of the group's keys, where another launcher serves the store, not rank 0


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a process runs whose numbers are compared with those of another run.

    A lone process may stand for all workers of a job: each of its batches is then the batches of
    that many replicas, joined. Or each of several, without servers and groups, stands for one of
    them, whose loop divides the data itself.
    """

    record: str  # the directory for what is compared
    most_steps: int  # the global step at which training ends, also where the program goes on
    joined: int = 1  # how many replicas' batches make one batch here
    replicas: int = 0  # what the program is told, where it is not 0
    settings: dict[str, str | int | float] = {}  # those of the plug-in that compares


class TaskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one process has to know of its job.

    `descriptors` are inherited, by what they are for: `secret` holds the secret and the
    certificates, in place of them (`secret.py`); `launcher` takes messages to the launcher
    (`exit_reason.py`); `process_group` listens at the address of the group, in rank 0; others are
    for the program.
    """

    job: str  # its id: both sides of a connection must have the same
    role: Role = "worker"
    index: int = 0  # among the tasks of this role
    workers: int = 1
    servers: int = 0  # none: the workers hold the parameters
    group: GroupMember = GroupMember()
    config: JobConfig = JobConfig()
    coordinator: str = ""  # its address with the scheme; empty where there is none
    listen: str = ""  # where a server or a coordinator listens, with the scheme
    host: str = ""
    """The name of the task's host, or of a part of it that may be lost by itself; "" for the name
    that the system has. Copies of a parameter are on different hosts."""
    secret: str = ""  # in hexadecimal digits; empty where no task connects to another
    certificates: str = ""  # the task's key and certificate and the authority's, in PEM, for TLS
    descriptors: dict[str, int] = {}
    display: Literal["plain", "none"] = "plain"  # progress as lines, or not at all
    dry_run: bool = False  # print what would be done, and end before training
    draw: int | None = None  # the processes on which to draw the model's graph; None trains
    connect_timeout: float = 300.0  # of the coordinator, in seconds
    threads: int | None = None  # of BLAS; None leaves it to PyTorch
    restarts_left: int = 0
    """How often the launcher will start this task again when it fails. While there are some, a
    failure ends this incarnation and not the job."""
    trial: Trial | None = None  # None trains as always
    records: str | None = None
    """The directory for the task's records. None: workers record in the session's run directory,
    other tasks do not."""

    def __repr__(self) -> str:
        values = msgspec.structs.asdict(self)
        values |= {name: "..." for name in ("secret", "certificates") if values[name]}
        return f"TaskConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def name(self) -> str:
        within = f"/{self.group.rank}" if self.servers and self.group.rank else ""
        return f"{self.role}:{self.index}{within}"

    def inheriting(self, **descriptors: int) -> TaskConfig:
        """Returns the task with further inherited descriptors, by what they are for."""
        return msgspec.structs.replace(self, descriptors=self.descriptors | descriptors)

    def in_group(self, **values: Any) -> TaskConfig:
        group = msgspec.structs.replace(self.group, **values)
        return msgspec.structs.replace(self, group=group)

    @property
    def own_certificates(self) -> Certificates | None:
        """What the task proves itself with under TLS; None where the job does not use it."""
        return Certificates(self.certificates) if self.certificates else None

    @property
    def hosts_coordinator(self) -> bool:
        """Whether the job's coordinator is served at the address of this task."""
        return self.role == "coordinator" or (bool(self.listen) and self.listen == self.coordinator)

    @property
    def number(self) -> int:
        """The task's number in the job: the coordinator is 0, then come servers, then workers."""
        if self.role == "coordinator":
            return 0
        if self.role == "ps":
            return 1 + self.index
        within = self.index * self.processes_per_worker
        return 1 + self.servers + within + (self.group.rank if self.servers else 0)

    @property
    def group_number(self) -> int | None:
        """The number of this process's group in the job; None for a process alone."""
        if self.role != "worker" or self.group.size == 1:
            return None
        return self.index if self.servers else 0

    @property
    def processes_per_worker(self) -> int:
        """How many processes, each of which is a task, each worker of the job has."""
        return self.group.size if self.servers else 1

    @property
    def scrape_port(self) -> int | None:
        """The port that serves this task's metrics; 0 for any port, None for none."""
        first = self.config.output.metrics_port
        return first + self.number if first else first

    @property
    def tasks(self) -> int:
        """The number of processes of the job's workers and servers."""
        return self.workers * self.processes_per_worker + self.servers


def fresh_job() -> str:
    """Returns a new job id that no other job has."""
    return uuid.uuid4().hex


def encode_task(config: TaskConfig) -> str:
    """Returns the value of `TRIREME_TASK` that `decode_task` reads as `config`."""
    return msgspec.json.encode(config).decode()


def decode_task(text: str) -> TaskConfig:
    """Returns the task that a value of `TRIREME_TASK` describes."""
    try:
        return msgspec.json.decode(text, type=TaskConfig)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigurationError(
            f"the environment variable {TASK_VARIABLE} does not describe a task: {error}. "
            "`trireme run` and `trireme task` set it themselves: unset it"
        ) from error
