"""What one process has to know of its job: the job's configuration, and which task it is.

A launcher passes it in the environment variable `TRIREME_TASK`, as a `TaskConfig` in JSON.
"""

from __future__ import annotations

import uuid
from typing import Any, Literal

import msgspec

from trireme.certificates import Certificates
from trireme.draw_request import DrawRequest
from trireme.errors import ConfigurationError
from trireme.job_config import JobConfig

TASK_VARIABLE = "TRIREME_TASK"

Role = Literal["coordinator", "ps", "worker"]


class GroupMember(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the processes that hold one model: all of a job without servers, or of one worker.

    Attributes:
        size: how many processes are in the group.
        rank: this process's rank.
        local_rank: its rank among those of the group on this host.
        one_host: whether all of them are known to be on this host.
        address: where they meet, as `host:port`; rank 0 may inherit a socket that listens there.
        prefix: the prefix of the group's keys in the store, where another launcher serves the
            store; empty where rank 0 does.
    """

    size: int = 1
    rank: int = 0
    local_rank: int = 0
    one_host: bool = False
    address: str = ""
    prefix: str = ""


class TaskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one process has to know of its job.

    Attributes:
        job: the job's id; both sides of a connection must have the same.
        role: the task's role.
        index: its index among the tasks of this role, from 0.
        workers: how many workers the job has.
        servers: how many parameter servers it has; 0 for a worker that holds its own shard.
        group: the group of processes that this one holds a model with.
        config: the job's options, the same in each of its tasks.
        coordinator: the coordinator's address with its scheme; empty where there is none.
        listen: the address, with its scheme, at which a server or a coordinator listens; empty for
            a worker.
        host: the name of the task's host, or of a part of it that may be lost by itself; "" for the
            name that the system has. Copies of a parameter are on different hosts.
        secret: the job's secret in hexadecimal digits; empty where no task connects to another.
        certificates: the task's key, its certificate and the authority's certificate in PEM, where
            the job uses TLS; else empty.
        descriptors: the inherited descriptors by what they are for. `secret` holds the secret and
            the certificates, in place of them (see `secret.py`); `launcher` takes messages to the
            launcher (`launcher_pipe.py`); `call` holds the function that a worker calls in place
            of a program, and `result` takes what that returns (`function.py`); `process_group`
            listens at the address of the group.
        display: how progress is shown: `plain` lines; `events`, which are lines except those for
            steps, as the launcher shows steps; `none`; or `auto`, what suits the terminal.
        dry_run: whether to print what would be done, and end before training.
        draw: what to draw of the model's graph, in place of the description of a dry run.
        connect_timeout: seconds within which the coordinator must be reached; short where it is
            known to listen already.
        threads: BLAS threads of this process; None leaves it to PyTorch.
        restarts_left: how often the launcher will start this task again when it fails. While
            there are some, a failure ends this incarnation and not the job.
        records: the directory for the task's records; None: workers record in the session's run
            directory, other tasks do not.
    """

    job: str
    role: Role = "worker"
    index: int = 0
    workers: int = 1
    servers: int = 0
    group: GroupMember = GroupMember()
    config: JobConfig = JobConfig()
    coordinator: str = ""
    listen: str = ""
    host: str = ""
    secret: str = ""
    certificates: str = ""
    descriptors: dict[str, int] = {}
    display: Literal["auto", "plain", "events", "none"] = "auto"
    dry_run: bool = False
    draw: DrawRequest | None = None
    connect_timeout: float = 300.0
    threads: int | None = None
    restarts_left: int = 0
    records: str | None = None

    def __repr__(self) -> str:
        """Shows everything but the secret and the key."""
        values = msgspec.structs.asdict(self)
        values |= {name: "..." for name in ("secret", "certificates") if values[name]}
        return f"TaskConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def name(self) -> str:
        """The task's name, such as `worker:1`, or `worker:1/2` within a worker of several."""
        within = f"/{self.group.rank}" if self.servers and self.group.rank else ""
        return f"{self.role}:{self.index}{within}"

    def inheriting(self, **descriptors: int) -> TaskConfig:
        """Returns the task with further inherited descriptors, by what they are for."""
        return msgspec.structs.replace(self, descriptors=self.descriptors | descriptors)

    def in_group(self, **values: Any) -> TaskConfig:
        """Returns the task with some values of its group replaced."""
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
