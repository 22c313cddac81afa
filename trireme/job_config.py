"""The configuration of a job: every option, declared once, in one frozen value.

The options of the command line, the environment variables, the keys of the file, and the help are
derived from the fields of `JobConfig`. `trireme.launch.config.sources` reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta

from trireme.errors import UsageError, suggestion
from trireme.mesh import SCHEDULES, Mesh, Schedule
from trireme.plugins import Plugins

STRATEGIES = Plugins("trireme.strategies", "strategy", object)  # of their classes

CODECS = ("none", "fp16", "bf16", "int8", "topk")
"""The values of `compress` besides `topk:SHARE`, as `trireme.compression.codec` has them."""

COMMAND_LINE, LAUNCH_CALL = "command line", "run()"
"""The origins of values that a command, or a call of `trireme.run`, has given itself."""

_SWITCH = {"yes": "true", "no": "false"}
_MOST = 2**63 - 1  # the largest integer that a message encodes
_LONGEST = 1e9  # seconds, as infinity is not a valid timeout


@dataclass(frozen=True, slots=True)
class Option:
    """The description of an option, in addition to the type and default of its field."""

    metavar: str  # the name of the value in the help; empty for an option without a value
    help: str  # one line
    expects: str = ""  # the valid values in words, if they do not follow from the type
    check: Callable[[Any], object] = lambda value: None
    """Raises ValueError, or `UsageError` with a message of its own, for a value of the right type
    that is invalid."""
    values: Callable[[], Sequence[str]] | None = None
    """Returns the valid values where installed packages decide; `{values}` in the help."""
    classic: str = ""  # the option's name in older programs
    run_only: bool = False  # only `trireme run` has the option, and not a single task
    field: str = ""  # the name of the field; this and what follows come from the declaration
    type: Any = None
    default: Any = None
    group: str = ""  # the field of `JobConfig` that holds it with others of its group
    engine: str = ""  # the engine of whose own options it is one

    @property
    def name(self) -> str:
        """The option's name in the file, and on the command line without the leading dashes."""
        return self.field.replace("_", "-")

    @property
    def names(self) -> frozenset[str]:
        """All its names on the command line."""
        return frozenset({self.name, self.classic} - {""})

    @property
    def variable(self) -> str:
        """The option's environment variable."""
        return f"TRIREME_{self.field.upper()}"

    @property
    def described(self) -> str:
        """The help, with the valid values."""
        return self.help.replace("{values}", ", ".join(self.values())) if self.values else self.help

    def read(self, text: str, origin: str) -> Any:
        """Converts a text to a value of the option, or raises `UsageError`."""
        try:
            words = text if self.metavar else _SWITCH.get(text.lower(), text)
            value = msgspec.convert(words, self.type, strict=False)
            self.check(value)
            if self.values is not None and value not in self.values():
                raise ValueError(value)
        except UsageError as error:
            raise UsageError(f"{error} ({origin})") from error
        except ValueError as error:
            expects = self.expects or _in_words(msgspec.inspect.type_info(self.type))
            if self.values is not None:
                expects = f"one of {', '.join(self.values())}"
            known = expects.removeprefix("one of ")
            close = suggestion(text, known.split(", ")) if known != expects else ""
            raise UsageError(
                f"{self.name} is {text!r} ({origin}): it must be {expects}{close}"
            ) from error
        return value


def _in_words(kind: msgspec.inspect.Type) -> str:
    """Returns a description of the valid values of a type."""
    match kind:
        case msgspec.inspect.Metadata(type=inner):
            return _in_words(inner)
        case msgspec.inspect.UnionType(types=kinds):
            return ", or ".join(filter(None, map(_in_words, kinds)))
        case msgspec.inspect.LiteralType(values=(word,)):
            return str(word)
        case msgspec.inspect.LiteralType(values=words):
            return f"one of {', '.join(map(str, words))}"
        case msgspec.inspect.BoolType():
            return "yes or no"
        case msgspec.inspect.IntType(ge=least, le=most):
            start = "" if least is None else f" from {least}"
            return f"a whole number{start}" + (f" to {most}" if most not in (None, _MOST) else "")
        case msgspec.inspect.FloatType(gt=below, ge=least, le=most):
            start = "" if least is None else f" from {least}"
            start = start if below is None else f" above {below}"
            return f"a number{start}" + (f", {most:.0f} at most" if most is not None else "")
    return ""


def _not_empty(text: str) -> None:
    if not text:
        raise ValueError(text)


def size_in_bytes(text: str) -> int:
    """Returns the number of bytes of a size such as `500MB`, `1.5 GiB` or `64B`."""
    number, unit = text.rstrip("B").strip(), ""
    while number[-1].isalpha():
        number, unit = number[:-1], number[-1] + unit
    power = " kmgt".index(unit[0].lower()) if unit else 0
    return int(min(float(number) * (1024 if unit.endswith("i") else 1000) ** power, 2.0**63))


def _at_least_a_byte(text: str) -> None:
    if size_in_bytes(text) < 1:
        raise ValueError(text)


Whole = Annotated[int, Meta(ge=0, le=_MOST)]
Positive = Annotated[int, Meta(ge=1, le=_MOST)]
Servers = Annotated[int, Meta(ge=0, le=256)]  # each has at least one of the 256 slots
Workers = Annotated[int, Meta(ge=1, le=4096)]  # as many as may connect to one server
Seconds = Annotated[float, Meta(gt=0, le=_LONGEST)]
Patience = Annotated[float, Meta(ge=0, le=_LONGEST)]
Silence = Annotated[float, Meta(ge=0.5, le=_LONGEST)]
Gpus = Annotated[float, Meta(ge=0, le=65536)]
Port = Annotated[int, Meta(ge=0, le=65535)]
Size = Annotated[str, Meta(pattern="^[0-9]+(\\.[0-9]+)? ?([kKMGT]i?)?B$")]
Codec = Annotated[str, Meta(pattern=rf"^({'|'.join(CODECS)}|topk:.+)$")]


class _Options(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A group of options. None leaves the choice to the program, or to the strategy."""


# fmt: off
class Tasks(_Options, frozen=True):
    """How many tasks a job has."""

    workers: Annotated[Workers | Literal["auto"], Option("N",
        "how many workers; auto: one for each GPU, or one where there is none (default 1)",
        run_only=True)] = 1
    ps: Annotated[Servers, Option("M",
        "how many parameter servers (default 0: the workers keep the parameters)",
        run_only=True)] = 0
    replicas: Annotated[Positive, Option("R",
        "how many servers hold each shard of the parameters; with 2 any one may die (default 1)"
        )] = 1


class TrainingOptions(_Options, frozen=True):
    """The strategy and its numbers, and what is pushed."""

    strategy: Annotated[str | None, Option("NAME",
        "{values} (default async with servers, allreduce without)", values=STRATEGIES.names,
        check=STRATEGIES.check)] = None
    aggregate: Annotated[Positive | None, Option("R",
        "sync, diloco: how many workers' updates make a round (default all; fewer: backups)",
        classic="replicas-to-aggregate")] = None
    staleness: Annotated[Positive | None, Option("K",
        "ssp, averaging: how many updates a worker may be ahead of the slowest")] = None
    prefetch: Annotated[bool, Option("",
        "async, ssp: compute while the previous push is under way (1 more update of staleness)"
        )] = False
    every: Annotated[Positive | None, Option("H",
        "averaging, diloco: local steps of a worker between two exchanges")] = None
    compress: Annotated[Codec, Option("CODEC",
        "packs pushed gradients: fp16, bf16, int8, topk or topk:SHARE (default none)",
        expects=f"one of {', '.join(CODECS)}, topk:SHARE")] = "none"


class ModelOptions(_Options, frozen=True):
    """How the processes inside each worker hold the model together."""

    mesh: Annotated[str, Option("AXES",
        "processes inside each worker: pp pipeline stages, graph tasks of a dataflow graph, tp "
        "tensor-parallel, dp or fsdp replicas",
        check=Mesh.parse, run_only=True)] = ""
    schedule: Annotated[Schedule | None, Option("NAME",
        f"of a pipeline: {', '.join(SCHEDULES)} (default the script's choice, 1f1b)",
        run_only=True)] = None
    microbatches: Annotated[Positive | None, Option("N",
        "of a pipeline or graph: the number of micro-batches of each batch (default: of a pipeline "
        "twice the stages, of a graph one)", run_only=True)] = None
    memory_limit: Annotated[Size | None, Option("SIZE",
        "graph: what the model may take in each task, such as 500MB or 2GiB (default no limit)",
        expects="a size, such as 500MB or 2GiB", check=_at_least_a_byte, run_only=True)] = None
    log_placement: Annotated[bool, Option("",
        "graph: print which task computes each operation", run_only=True)] = False

    def given(self, kind: type[Any]) -> dict[str, Any]:
        """Returns the values that were given of the fields which a dataclass has too."""
        its = {field.name for field in fields(kind)}
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name in its}
        return {name: value for name, value in values.items() if value not in (None, False)}


class NetworkOptions(_Options, frozen=True):
    """How tasks connect, and what protects that."""

    transport: Annotated[str, Option("NAME",
        "auto: shared memory between tasks of one host, else tcp; tcp, or one that is installed: "
        "always (default auto)")] = "auto"
    certs: Annotated[str | None, Option("DIR",
        "where the task's certificate for TLS is: see trireme certs (default RUN_DIR/certs)"
        )] = None
    tls: Annotated[bool, Option("",
        "encrypt connections between tasks of one host too; between hosts all are", run_only=True
        )] = False
    allow_plaintext: Annotated[bool, Option("",
        "allow unencrypted traffic between hosts, for networks that you trust"
        )] = False


class Timeouts(_Options, frozen=True):
    """How long things may take, in seconds."""

    join_timeout: Annotated[Seconds, Option("SECONDS",
        "how long the tasks of a job wait for each other to join (default 300)")] = 300.0
    heartbeat_timeout: Annotated[Silence, Option("SECONDS",
        "go on without a task that is silent for so long; less recovers sooner, and takes a slow "
        "machine for a lost one sooner (default 10)")] = 10.0
    progress_timeout: Annotated[Patience, Option("SECONDS",
        "go on without a worker that makes no step for so long; 0: never (default 600)"
        )] = 600.0
    rejoin_timeout: Annotated[Seconds, Option("SECONDS",
        "how long a task that is cut off from its job tries to come back, and a job of which every "
        "worker is cut off waits for them (default 600)")] = 600.0


class OutputOptions(_Options, frozen=True):
    """What is kept and shown of a job, and where."""

    run_dir: Annotated[str | None, Option("DIR",
        "the directory of the job's checkpoints, records and logs, or a URL such as s3://bucket/run",
        expects="the name of a directory", check=_not_empty)] = None
    metrics_port: Annotated[Port | None, Option("PORT",
        "serve Prometheus metrics: the coordinator at PORT, servers and workers above; 0: any port",
        expects="a port, or 0")] = None
    metrics_host: Annotated[str, Option("ADDRESS",
        "the address of the metrics ports (default 127.0.0.1: this host only)")] = "127.0.0.1"


class LaunchOptions(_Options, frozen=True):
    """Where and how tasks are started, and how often again."""

    on: Annotated[str, Option("ENGINE", "where tasks run: the name of an engine (default local)",
        run_only=True)] = "local"
    start: Annotated[Literal["auto", "spawn"], Option("HOW",
        "auto: fork tasks from one process that has imported PyTorch, where that is safe; spawn: "
        "each imports it by itself (default auto)", run_only=True)] = "auto"
    max_restarts: Annotated[Whole, Option("N",
        "how often each worker is started again when it fails, and each server where others hold "
        "copies; else the whole job when a server dies (default 0)", run_only=True)] = 0


# fmt: on


class JobConfig(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The options of a job, in groups: the same value in its launcher and in each of its tasks.

    `origins` holds, by option, the origin of each value that is not a default; `plugin_options`,
    likewise, the values of the options that an engine has of its own, and of those that add hooks
    (see `trireme.launch.engines`, `trireme.launch.hooks`).
    """

    tasks: Tasks = Tasks()
    training: TrainingOptions = TrainingOptions()
    model: ModelOptions = ModelOptions()
    network: NetworkOptions = NetworkOptions()
    timeouts: Timeouts = Timeouts()
    output: OutputOptions = OutputOptions()
    launch: LaunchOptions = LaunchOptions()
    origins: dict[str, str] = {}
    plugin_options: dict[str, str | int | float | bool] = {}

    def origin(self, field: str) -> str:
        """Returns the origin of an option's value, such as `command line`."""
        return self.origins.get(field, "default")

    def replaced(self, origin: str, **values: Any) -> JobConfig:
        """Returns a copy with the values of some options replaced, whose origin is `origin`."""
        return self.with_values(values, dict.fromkeys(values, origin))

    def with_values(self, values: Mapping[str, Any], origins: Mapping[str, str]) -> JobConfig:
        """Returns a copy with some values replaced, those of an engine's options too."""
        groups: dict[str, dict[str, Any]] = {}
        for field, value in values.items():
            groups.setdefault(_GROUPS.get(field, ""), {})[field] = value
        own = self.plugin_options | groups.pop("", {})
        changed = {
            group: msgspec.structs.replace(getattr(self, group), **new)
            for group, new in groups.items()
        }
        return msgspec.structs.replace(
            self, **changed, plugin_options=own, origins={**self.origins, **origins}
        )

    def value(self, option: Option) -> Any:
        """Returns the value of an option, of a plug-in's too."""
        if not option.group:
            return self.plugin_options.get(option.field, option.default)
        return getattr(getattr(self, option.group), option.field)

    @property
    def values(self) -> dict[str, Any]:
        """Every value by the option's name; of plug-ins' options those that were given."""
        own = {field.replace("_", "-"): value for field, value in self.plugin_options.items()}
        return {option.name: self.value(option) for option in OPTIONS} | own

    @property
    def scheme(self) -> str:
        """The scheme of addresses of tasks without certificates."""
        return "tcp" if self.shares_memory else self.network.transport

    @property
    def shares_memory(self) -> bool:
        """Whether tasks of one host talk through shared memory where they can."""
        return self.network.transport == "auto"

    @property
    def inside(self) -> int:
        """The number of processes that hold one model; with servers, those of each worker."""
        return Mesh.parse(self.model.mesh).size

    def check_together(self, servers: int) -> None:
        """Checks that the mesh, the codec and the number of servers are consistent.

        Each strategy checks the values of its own options itself.
        """
        mesh = Mesh.parse(self.model.mesh)
        tasks, compress = self.tasks, self.training.compress
        if tasks.replicas > max(1, servers):
            there_are = f"{servers} {'server' if servers == 1 else 'servers'}"
            less = f" or give at most --replicas {servers}" if servers else ""
            raise UsageError(
                f"replicas is {tasks.replicas} ({self.origin('replicas')}): each copy is on a "
                f"parameter server of its own, and this job has {there_are if servers else 'none'}"
                f"; add --ps {tasks.replicas}{less}"
            )
        processes = mesh.size * (tasks.workers if servers and isinstance(tasks.workers, int) else 1)
        if processes > 4096:
            raise UsageError(f"mesh {mesh} makes {processes:,} processes: a job has at most 4,096")
        if servers:
            if mesh.size > 1 and self.training.prefetch:
                raise UsageError("prefetch is for workers of one process: leave out --prefetch")
        elif compress != "none" and (mesh.size > 1 or tasks.workers != 1):
            raise UsageError(
                f"compress is {compress} ({self.origin('compress')}): codecs pack what "
                "workers push to parameter servers; add --ps 1"
            )
        self._check_model(mesh)

    def _check_model(self, mesh: Mesh) -> None:
        """Checks that the options of pipelines and graphs have one."""
        strategy = self.training.strategy
        graph = mesh.graph > 1 or strategy in ("graph", None)
        pipelined = mesh.pp > 1 or strategy in ("pipeline", None)
        for name, serves, axis, what in (
            ("schedule", pipelined, "pp", "pipeline"),
            ("microbatches", pipelined or graph, "pp", "pipeline"),
            ("memory_limit", graph, "graph", "graph"),
            ("log_placement", graph, "graph", "graph"),
        ):
            value = getattr(self.model, name)
            if value not in (None, False) and not serves:
                raise UsageError(
                    f"{name.replace('_', '-')} is {value} ({self.origin(name)}), and there is no "
                    f"{what}: add --mesh {axis}=2 or --strategy {what}"
                )

    def lines(self, options: Sequence[Option]) -> list[str]:
        """Returns one line for each of some options, with name, value and origin."""
        values = [self.value(option) for option in options]
        texts = ["-" if value is None else str(value) for value in values]
        width = max(len(option.name) for option in options)
        text_width = max(map(len, texts))
        return [
            f"{option.name:<{width}}  {text:<{text_width}}  {self.origin(option.field)}"
            for option, text in zip(options, texts, strict=True)
        ]


def field_of(name: str) -> str:
    """Returns the name of an option's field, of its name or that of its plug-in."""
    return name.replace("-", "_")


def declared(
    kind: type[msgspec.Struct], *, group: str = "", engine: str = ""
) -> tuple[Option, ...]:
    """Returns the options that the fields of a class declare, of a group or an engine."""
    hints = get_type_hints(kind, include_extras=True)
    defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
    prefix = f"{field_of(engine)}_" if engine else ""
    return tuple(
        replace(
            option,
            field=prefix + name,
            type=hint,
            default=defaults[name],
            group=group,
            engine=engine,
            run_only=option.run_only or bool(engine),
        )
        for name, hint in hints.items()
        for option in getattr(hint, "__metadata__", ())
        if isinstance(option, Option)
    )


OPTIONS = tuple(
    option
    for group, kind in get_type_hints(JobConfig).items()
    if isinstance(kind, type) and issubclass(kind, _Options)
    for option in declared(kind, group=group)
)
"""Every option of a job, but for those of plug-ins, in the order of the help."""
TASK_OPTIONS = tuple(option for option in OPTIONS if not option.run_only)
"""The options of a task that is started by hand, but for those of plug-ins."""
_GROUPS = {option.field: option.group for option in OPTIONS}
