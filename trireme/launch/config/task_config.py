"""What one process has to know of its job: the job's configuration, and which task it is.

A launcher passes it in the environment variable `TRIREME_TASK`, as a `TaskConfig` in JSON.
"""

from __future__ import annotations

import uuid
from typing import Literal

import msgspec

from trireme.certificates import Certificates
from trireme.draw_request import DrawRequest
from trireme.errors import ConfigurationError
from trireme.job_config import JobConfig

TASK_VARIABLE = "TRIREME_TASK"

Role = Literal["coordinator", "ps", "worker"]


class TaskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one process has to know of its job.

    Attributes:
        job: the job's id; both sides of a connection must have the same.
        role: the task's role.
        index: its index among the tasks of this role, from 0.
        workers: how many workers the job has.
        servers: how many parameter servers it has; 0 for a worker that holds its own shard.
        config: the job's options, the same in each of its tasks.
        coordinator: the coordinator's address with its scheme; empty where there is none.
        listen: the address, with its scheme, at which a server or a coordinator listens; empty for
            a worker.
        host: the name of the task's host, or of a part of it that may be lost by itself; "" for the
            name that the system has. Copies of a parameter are on different hosts.
        journal: the file in which a coordinator keeps what it knows; "" for none.
        resumes: whether a coordinator goes on with what the journal holds, and it must hold
            something; else it begins anew.
        secret: the job's secret in hexadecimal digits; empty where no task connects to another.
        certificates: the task's key, its certificate and the authority's certificate in PEM, where
            the job uses TLS; else empty.
        secret_fd: an inherited descriptor that holds the secret and the certificates, in place of
            them; see `secret.py`.
        launcher_fd: an inherited descriptor for messages to the launcher, if there is one; see
            `launcher_pipe.py`.
        call_fd: an inherited descriptor that holds the function which a worker calls, in place of
            a program that it runs; see `function.py`.
        result_fd: an inherited descriptor for what that function returns.
        display: how progress is shown: `plain` lines; `events`, which are lines except those for
            steps, as the launcher shows steps; `none`; or `auto`, what suits the terminal.
        dry_run: whether to print what would be done, and end before training.
        draw: what to draw of the model's graph, in place of the description of a dry run.
        connect_timeout: seconds within which the coordinator must be reached; short where it is
            known to listen already.
        threads: BLAS threads of this process; None leaves it to PyTorch.
        restarts_left: how often the launcher will start this task again when it fails. While
            there are some, a failure ends this incarnation and not the job.
        processes: how many processes are in this process's group, which holds one model: all of a
            job without servers, or those of one worker.
        rank: this process's rank in the group.
        local_rank: its rank among the processes of the group on this host.
        one_host: whether all processes of the group are known to be on this host.
        process_group: the address at which the processes of the group meet, as `host:port`.
        process_group_fd: a listening socket at that address, in rank 0.
        process_group_prefix: the prefix of the group's keys in the store, where another launcher
            serves the store; empty where rank 0 does.
        records: the directory for the task's records; None: workers record in the session's run
            directory, other tasks do not.
    """

    job: str
    role: Role = "worker"
    index: int = 0
    workers: int = 1
    servers: int = 0
    config: JobConfig = JobConfig()
    coordinator: str = ""
    listen: str = ""
    host: str = ""
    journal: str = ""
    resumes: bool = False
    secret: str = ""
    certificates: str = ""
    secret_fd: int | None = None
    launcher_fd: int | None = None
    call_fd: int | None = None
    result_fd: int | None = None
    display: Literal["auto", "plain", "events", "none"] = "auto"
    dry_run: bool = False
    draw: DrawRequest | None = None
    connect_timeout: float = 300.0
    threads: int | None = None
    restarts_left: int = 0
    processes: int = 1
    rank: int = 0
    local_rank: int = 0
    one_host: bool = False
    process_group: str = ""
    process_group_fd: int | None = None
    process_group_prefix: str = ""
    records: str | None = None

    def __repr__(self) -> str:
        """Shows everything but the secret and the key."""
        values = msgspec.structs.asdict(self)
        values |= {name: "..." for name in ("secret", "certificates") if values[name]}
        return f"TaskConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def name(self) -> str:
        """The task's name, such as `worker:1`, or `worker:1/2` within a worker of several."""
        within = f"/{self.rank}" if self.servers and self.processes > 1 and self.rank else ""
        return f"{self.role}:{self.index}{within}"

    @property
    def descriptors(self) -> dict[str, int]:
        """The inherited descriptors, by the names of their fields."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: fd for name, fd in fields.items() if name.endswith("_fd") and fd is not None}

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
        within = self.index * self.processes + self.rank if self.servers else self.index
        return 1 + self.servers + within

    @property
    def group(self) -> int | None:
        """The number of this process's group in the job; None for a process alone."""
        if self.role != "worker" or self.processes == 1:
            return None
        return self.index if self.servers else 0

    @property
    def scrape_port(self) -> int | None:
        """The port that serves this task's metrics; 0 for any port, None for none."""
        first = self.config.metrics_port
        return first + self.number if first else first

    @property
    def tasks(self) -> int:
        """The number of processes of the job's workers and servers."""
        return self.workers * (self.processes if self.servers else 1) + self.servers


def fresh_job() -> str:
    """Returns a new job id that no other job has."""
    return uuid.uuid4().hex


def encode_task(config: TaskConfig) -> str:
    """Returns the value of `TRIREME_TASK` that `decode_task` reads as `config`."""
    return msgspec.json.encode(config).decode()


def decode_task(text: str) -> TaskConfig:
    """Returns the task that a value of `TRIREME_TASK` describes.

    Raises:
        ConfigurationError: it is not what `encode_task` writes.
    """
    try:
        return msgspec.json.decode(text, type=TaskConfig)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigurationError(
            f"the environment variable {TASK_VARIABLE} does not describe a task: {error}. "
            "`trireme run` and `trireme task` set it themselves: unset it"
        ) from error
