"""What one process has to know of its job, and the variable that tells it.

Whoever starts a task hands it `TRIREME_TASK`, with a `TaskConfig` as JSON.
"""

from __future__ import annotations

import uuid
from typing import Literal

import msgspec

from trireme.errors import ConfigurationError

__all__ = ["TASK_VARIABLE", "Role", "TaskConfig", "decode_task", "encode_task", "fresh_job"]

TASK_VARIABLE = "TRIREME_TASK"

Role = Literal["aggregator", "coordinator", "ps", "worker"]


class TaskConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one process has to know of its job.

    Attributes:
        job: the job's id; both sides of a connection must have the same.
        role: what this process does.
        index: which of its role it is, from 0.
        workers: how many workers the job has.
        servers: how many parameter servers it has; 0 for a worker that holds its own shard.
        coordinator: the coordinator's address with its scheme; empty where there is none.
        secret: the job's secret in hexadecimal digits; empty where nobody connects.
        secret_fd: an inherited descriptor that holds the secret, in place of it; see `secret.py`.
        run_dir: where the job keeps its checkpoints and records; None leaves it to the script.
        strategy: the name that the user gave; None leaves it to the script.
        aggregate: how many updates make a round; None for the strategy's own.
        staleness: how far a worker may be ahead, in pushes; None for the strategy's own.
        every: how many steps a worker makes by itself between two exchanges; None for the
            strategy's own.
        prefetch: whether workers compute while a push is under way; asynchronous modes only.
        transport: `auto` lends memory to servers of the same host, `tcp` does not.
        host_aggregator: whether workers hand their updates to the aggregator of their host.
        compress: the codec for pushed gradients, by name.
        overlap: whether pushes leave while backward runs; `auto` where that pays.
        display: how progress is shown: `plain` lines, `events` (lines, but none for steps, which
            the launcher shows), nothing, or what suits the terminal.
        dry_run: print what would be done, and end before training.
        join_timeout: seconds until every task must have come.
        progress_timeout: seconds without a step after which a worker that lives is lost; 0: never.
        connect_timeout: seconds until the coordinator must have been reached; short where it is
            known to listen already.
        threads: BLAS threads of this process; None leaves it to PyTorch.
        allow_plaintext: whether a server may listen beyond this host without TLS.
        restarts_left: how often the launcher will start this worker again should it fail; while
            there are some, a failure ends this incarnation and not the job.
        processes: how many processes hold one model together, this one among them: all of a job
            without servers, or those of one worker.
        rank: which of them this is.
        local_rank: which of those on this host.
        one_host: whether all of those processes are known to be on this host.
        mesh: the degrees of parallelism that the launch gave, such as `dp=2,tp=2`.
        schedule: of a pipeline; None for the script's.
        microbatches: of a pipeline; None for the script's.
        gang: where those processes find each other, as `host:port`.
        gang_fd: a listening socket for that, in rank 0.
        gang_prefix: of their keys there, where another launcher serves that store; empty where
            rank 0 does.
        records: where each task records how it goes; None: workers in the session's run
            directory, others nowhere.
        metrics_port: where the first task of the job can be scraped; each adds its place to it.
            0 leaves the ports to the system; None: nowhere.
        metrics_host: the address that those ports are on.
        profile: which of their own steps workers trace, as `10:15`; None for none.
        origins: where each value came from, by option name, for whoever prints them.
    """

    job: str
    role: Role = "worker"
    index: int = 0
    workers: int = 1
    servers: int = 0
    coordinator: str = ""
    secret: str = ""
    secret_fd: int | None = None
    run_dir: str | None = None
    strategy: str | None = None
    aggregate: int | None = None
    staleness: int | None = None
    every: int | None = None
    prefetch: bool = False
    transport: Literal["auto", "tcp"] = "auto"
    host_aggregator: bool = False
    compress: str = "none"
    overlap: Literal["auto", "on", "off"] = "auto"
    display: Literal["auto", "plain", "events", "none"] = "auto"
    dry_run: bool = False
    join_timeout: float = 300.0
    progress_timeout: float = 600.0
    connect_timeout: float = 300.0
    threads: int | None = None
    allow_plaintext: bool = False
    restarts_left: int = 0
    processes: int = 1
    rank: int = 0
    local_rank: int = 0
    one_host: bool = False
    mesh: str = ""
    schedule: str | None = None
    microbatches: int | None = None
    gang: str = ""
    gang_fd: int | None = None
    gang_prefix: str = ""
    records: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    profile: str | None = None
    origins: dict[str, str] = {}

    def __repr__(self) -> str:
        """Shows everything but the secret."""
        values = msgspec.structs.asdict(self) | {"secret": "..." if self.secret else ""}
        return f"TaskConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    @property
    def name(self) -> str:
        """The task's name, such as `worker:1`, or `worker:1/2` within a worker of several."""
        within = f"/{self.rank}" if self.servers and self.processes > 1 and self.rank else ""
        return f"{self.role}:{self.index}{within}"

    @property
    def place(self) -> int:
        """The task's place in the job: the coordinator's is 0, then come servers, then workers."""
        if self.role in ("coordinator", "aggregator"):
            return 0
        if self.role == "ps":
            return 1 + self.index
        together = self.processes if self.servers else 1
        return 1 + self.servers + self.index * together + (self.rank if self.servers else 0)

    @property
    def scrape_port(self) -> int | None:
        """Where this task's metrics are to be had: 0 for any port, None for nowhere."""
        if not self.metrics_port:
            return self.metrics_port
        return self.metrics_port + self.place

    @property
    def tasks(self) -> int:
        """How many processes workers and servers of the job are."""
        return self.workers * (self.processes if self.servers else 1) + self.servers


def fresh_job() -> str:
    """Returns the id of a job that nobody else has."""
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
    except msgspec.MsgspecError as error:
        raise ConfigurationError(
            f"the environment variable {TASK_VARIABLE} does not describe a task: {error}. "
            "`trireme run` and `trireme task` set it themselves: unset it"
        ) from error
