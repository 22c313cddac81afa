"""The options of `trireme run`, each with its value and where that came from.

Command line over environment over file over default. One table says what there is; the parser,
the environment variables, the file's keys and the help all follow from it.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trireme.cluster.mesh import SCHEDULES, Mesh
from trireme.errors import ConfigurationError, UsageError

__all__ = [
    "ENGINE_OPTIONS",
    "GANG_OPTIONS",
    "NOT_BUILT_STRATEGIES",
    "OPTIONS",
    "STRATEGIES",
    "Option",
    "Setting",
    "Settings",
    "check_engine",
    "check_mesh",
    "check_together",
    "read_file",
    "resolve",
    "suggestion",
]

ENGINES = ("local", "ray")

OTHER_VARIABLES = (
    "TRIREME_TASK",
    "TRIREME_SECRET",
    "TRIREME_ALLOW_PLAINTEXT",
    "TRIREME_LAUNCH",
)
"""What is read from the environment besides options."""

_PREFIX = "TRIREME_"
_ALIKE = 0.75  # `WORKRS` is 0.92 like `WORKERS`; `DATA`, which is not ours, is 0.5 like `TASK`
SERVED = ("async", "ssp", "sync", "averaging", "diloco")
"""The strategies that need parameter servers."""
GANG_OPTIONS = ("mesh", "schedule", "microbatches")
"""The options about processes that hold one model together."""

STRATEGIES = (*SERVED, "allreduce", "fsdp", "tensor", "pipeline")
CODECS = ("none", "fp16", "bf16", "int8", "topk")
"""What `--compress` may be, besides `topk:SHARE`. A test holds it against `trireme.wire.codec`."""

NOT_BUILT_STRATEGIES = ("graph",)

Value = int | float | str | None


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text)
        if number < least:
            raise ValueError
        return number

    return parse


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


def _patience(text: str) -> float:
    return 0.0 if text == "0" else _seconds(text)


def _workers(text: str) -> int | str:
    return text if text == "auto" else _whole(1)(text)


def _transport(text: str) -> str:
    if text not in ("auto", "tcp"):
        raise ValueError(text)
    return text


def _overlap(text: str) -> str:
    if text not in ("auto", "on", "off"):
        raise ValueError(text)
    return text


def _engine(text: str) -> str:
    if text == "slurm":
        raise UsageError("--on slurm is not built yet: local and ray are")
    if text not in ENGINES:
        raise ValueError(text)
    return text


def _gpus(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf") or (number > 1 and number != int(number)):
        raise ValueError
    return number


def _switch(text: str) -> bool:
    return {"yes": True, "no": False, "true": True, "false": False, "1": True, "0": False}[text]


def _steps(text: str) -> str:
    first, _, end = text.partition(":")
    if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise ValueError(text)
    return text


def _port(text: str) -> int:
    number = int(text)
    if not 0 <= number < 1 << 16:
        raise ValueError(text)
    return number


def _codec(text: str) -> str:
    if text not in CODECS and not text.startswith("topk:"):
        raise UsageError(
            f"there is no codec {text!r}{suggestion(text, CODECS)}; there are: "
            f"{', '.join(CODECS)}, topk:SHARE"
        )
    return text


def _mesh(text: str) -> str:
    try:
        return str(Mesh.parse(text))
    except ConfigurationError as error:
        raise UsageError(str(error)) from error


def _one_of(words: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    return parse


def _strategy(text: str) -> str:
    if text in STRATEGIES:
        return text
    built = ", ".join(STRATEGIES)
    if text in NOT_BUILT_STRATEGIES:
        raise UsageError(f"the strategy {text} is not built yet; those that are: {built}")
    raise UsageError(
        f"there is no strategy {text!r}{suggestion(text, STRATEGIES)}; there are: {built}"
    )


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a job.

    Attributes:
        name: as on the command line, without the dashes.
        parse: makes a value of text; raises ValueError if it cannot.
        expects: what `parse` takes, in words.
        default: the value when nobody gives one.
        metavar: what stands for the value in the help; empty where being named is enough.
        help: one line.
    """

    name: str
    parse: Callable[[str], Value]
    expects: str
    default: Value
    metavar: str
    help: str

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"{_PREFIX}{self.name.replace('-', '_').upper()}"

    def read(self, text: str, origin: str) -> Setting:
        """Returns the setting that `text` gives.

        Raises:
            UsageError: it is not what the option expects; names the origin.
        """
        try:
            return Setting(self.parse(text), origin)
        except (ValueError, KeyError) as error:
            raise UsageError(
                f"{self.name} is {text!r} ({origin}): it must be {self.expects}"
            ) from error
        except UsageError as error:
            raise UsageError(f"{error} ({origin})") from error


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it came from."""

    value: Value
    origin: str


OPTIONS = (
    Option("workers", _workers, "a whole number from 1, or auto", 1, "N",
           "how many workers; auto: one for each GPU, or one where there is none (default 1)"),
    Option("ps", _whole(0), "a whole number from 0", 0, "M",
           "how many parameter servers (default 0: a lone worker keeps the parameters)"),
    Option("strategy", _strategy, f"one of {', '.join(STRATEGIES)}", None, "NAME",
           f"{', '.join(STRATEGIES)} (default async with servers, allreduce without)"),
    Option("aggregate", _whole(1), "a whole number from 1", None, "R",
           "sync, diloco: how many workers' updates make a round (default all; fewer: backups)"),
    Option("staleness", _whole(1), "a whole number from 1", None, "K",
           "ssp, averaging: how many updates a worker may be ahead of the slowest"),
    Option("prefetch", _switch, "yes or no", False, "",
           "async, ssp: compute while the push before is under way (1 more update of staleness)"),
    Option("every", _whole(1), "a whole number from 1", None, "H",
           "averaging, diloco: steps that a worker makes by itself between two exchanges"),
    Option("mesh", _mesh, "axis=degree with commas between, such as dp=2,tp=2", "", "AXES",
           "processes inside each worker: pp pipeline stages, tp tensor-parallel, dp, fsdp"),
    Option("schedule", _one_of(SCHEDULES), f"one of {', '.join(SCHEDULES)}", None, "NAME",
           f"of a pipeline: {', '.join(SCHEDULES)} (default the script's, 1f1b)"),
    Option("microbatches", _whole(1), "a whole number from 1", None, "N",
           "of a pipeline: into how many pieces each batch is cut (default twice the stages)"),
    Option("transport", _transport, "auto or tcp", "auto", "NAME",
           "auto: shared memory between tasks of one host, else tcp; tcp: always (default auto)"),
    Option("compress", _codec, f"one of {', '.join(CODECS)}, topk:SHARE", "none", "CODEC",
           "packs pushed gradients: fp16, bf16, int8, topk or topk:SHARE (default none)"),
    Option("host-aggregator", _switch, "yes or no", False, "",
           "sync, one server: sum the gradients of each host's workers before they leave it"),
    Option("overlap", _overlap, "auto, on or off", "auto", "WHEN",
           "pushes leave while backward runs, over tcp; auto: where it pays (default auto)"),
    Option("profile", _steps, "FIRST:END, such as 10:15", None, "STEPS",
           "trace these of each worker's steps, such as 10:15, into RUN/traces"),
    Option("metrics-port", _port, "a port, or 0", None, "PORT",
           "serve metrics for Prometheus: the coordinator here, servers and workers above; 0: any"),
    Option("metrics-host", str, "an address of this host", "127.0.0.1", "ADDRESS",
           "where those ports are open (default 127.0.0.1: to this host only)"),
    Option("run-dir", str, "a directory", None, "DIR",
           "where the job keeps its checkpoints, records and logs"),
    Option("max-restarts", _whole(0), "a whole number from 0", 0, "N",
           "how often each worker is started again when it fails, and the whole job when a server "
           "or the coordinator dies (default 0)"),
    Option("join-timeout", _seconds, "a number of seconds above 0", 300.0, "SECONDS",
           "how long the tasks of a job wait for each other to come (default 300)"),
    Option("progress-timeout", _patience, "a number of seconds from 0", 600.0, "SECONDS",
           "go on without a worker that lives and makes no step for so long; 0: never (default "
           "600)"),
    Option("on", _engine, f"one of {', '.join(ENGINES)}", "local", "ENGINE",
           "where tasks run: local: this host; ray: the nodes of a Ray cluster (default local)"),
    Option("ray-address", str, "host:port or auto", "auto", "ADDRESS",
           "ray: the cluster's head, host:port; auto: the cluster of this host (default auto)"),
    Option("ray-cpus-per-worker", _whole(1), "a whole number from 1", 1, "C",
           "ray: cores kept for each worker, which takes as many threads (default 1)"),
    Option("ray-gpus-per-worker", _gpus, "a whole number from 0, or a share of one GPU", 0.0, "G",
           "ray: GPUs kept for each worker, which sees no others (default 0)"),
    Option("ray-pack-workers", _switch, "yes or no", False, "",
           "ray: workers on as few nodes as possible, and not on as many"),
)  # fmt: skip

ENGINE_OPTIONS = tuple(
    option.name for option in OPTIONS if option.name == "on" or option.name.startswith("ray-")
)
"""What only whoever starts all tasks has to know."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Every option of a job with its value and origin."""

    by_name: Mapping[str, Setting] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.by_name[name].value

    def replaced(self, name: str, value: Value, origin: str) -> Settings:
        """Returns the same settings but for one."""
        return Settings({**self.by_name, name: Setting(value, origin)})

    @property
    def values(self) -> dict[str, Value]:
        """The values by option name."""
        return {name: setting.value for name, setting in self.by_name.items()}

    @property
    def origins(self) -> dict[str, str]:
        """Where each value came from, by option name."""
        return {name: setting.origin for name, setting in self.by_name.items()}

    def lines(self) -> list[str]:
        """Returns one line an option: name, value, origin."""
        width = max(map(len, self.by_name))
        shown = {
            name: "-" if setting.value is None else str(setting.value)
            for name, setting in self.by_name.items()
        }
        value_width = max(map(len, shown.values()))
        return [
            f"{name:<{width}}  {shown[name]:<{value_width}}  {setting.origin}"
            for name, setting in self.by_name.items()
        ]


def resolve(
    command_line: Mapping[str, str],
    environ: Mapping[str, str],
    file: tuple[str, Mapping[str, str]] | None,
    options: Iterable[Option] = OPTIONS,
) -> Settings:
    """Returns every option's value: from the command line, else environment, file, default.

    Args:
        command_line: the text given for each option that was given, by its name.
        environ: the environment.
        file: the name of the configuration file and what it says, if there is one.
        options: which options to look for.

    Raises:
        UsageError: a value is not what its option expects, or a variable of the environment has
            nearly the name of an option's.
    """
    _check_variables(environ)
    origin, said = file if file is not None else ("", {})
    settings = {}
    for option in options:
        if option.name in command_line:
            setting = option.read(command_line[option.name], "command line")
        elif environ.get(option.variable, "") != "":
            setting = option.read(environ[option.variable], f"environment {option.variable}")
        elif option.name in said:
            setting = option.read(said[option.name], f"file {origin}")
        else:
            setting = Setting(option.default, "default")
        settings[option.name] = setting
    return Settings(settings)


def _check_variables(environ: Mapping[str, str]) -> None:
    """Refuses a variable that is no option's, and that somebody has meant for one.

    Raises:
        UsageError: there is one; names that which was meant.
    """
    known = [option.variable for option in OPTIONS]
    for name in environ:
        if not name.startswith(_PREFIX) or name in known:
            continue
        # What the names begin with is alike, and would make any two of them look alike.
        words = [each.removeprefix(_PREFIX) for each in (*known, *OTHER_VARIABLES)]
        close = difflib.get_close_matches(name.removeprefix(_PREFIX), words, n=1, cutoff=_ALIKE)
        if close and name not in OTHER_VARIABLES:
            raise UsageError(
                f"the environment sets {name}, which is no option (did you mean "
                f"{_PREFIX}{close[0]}?): correct it, or unset it"
            )


def check_together(settings: Settings, workers: int, servers: int) -> None:
    """Checks that the strategy, its numbers and the size of the job make sense together.

    Raises:
        UsageError: they do not; says what to do.
    """
    strategy = settings["strategy"]
    aggregate, staleness = settings["aggregate"], settings["staleness"]
    _check_servers(settings, workers, servers)
    if settings["every"] is not None and strategy not in ("averaging", "diloco"):
        raise UsageError(
            f"every is {settings['every']} ({settings.origins['every']}) and only averaging and "
            "diloco train between exchanges: add --strategy averaging"
        )
    if aggregate is not None and strategy not in ("sync", "diloco"):
        raise UsageError(
            f"aggregate is {aggregate} ({settings.origins['aggregate']}) and only the strategies "
            "sync and diloco gather so many updates: add --strategy sync"
        )
    if aggregate is not None and aggregate > workers:
        raise UsageError(
            f"aggregate is {aggregate} ({settings.origins['aggregate']}) and there are only "
            f"{workers} workers: a step could never be complete"
        )
    if staleness is not None and strategy not in ("ssp", "averaging"):
        raise UsageError(
            f"staleness is {staleness} ({settings.origins['staleness']}) and only the strategies "
            "ssp and averaging bound it: add --strategy ssp"
        )
    if settings["host-aggregator"]:
        _check_aggregator(settings, servers)
    if settings["prefetch"] and strategy not in ("async", "ssp", None):
        raise UsageError(
            f"prefetch is on ({settings.origins['prefetch']}), and only where each gradient is "
            "applied by itself may one be older than the newest values: use --strategy async or ssp"
        )


def _check_servers(settings: Settings, workers: int, servers: int) -> None:
    strategy = settings["strategy"]
    if strategy in SERVED and not servers and workers != 1:
        raise UsageError(
            f"the strategy {strategy} ({settings.origins['strategy']}) with several workers needs "
            "a parameter server: add --ps 1, or use --strategy allreduce"
        )
    if strategy is not None and strategy not in SERVED and servers:
        raise UsageError(
            f"the strategy {strategy} ({settings.origins['strategy']}) has no parameter servers: "
            "leave out --ps, or choose one that has, with --mesh for what is inside a worker"
        )


def check_mesh(settings: Settings) -> None:
    """Checks that what was said about processes that hold one model together makes sense.

    Raises:
        UsageError: it does not; says what to do.
    """
    try:
        mesh = Mesh.parse(settings["mesh"])
    except ConfigurationError as error:
        raise UsageError(str(error)) from error
    strategy, servers = settings["strategy"], settings["ps"]
    if servers:
        try:
            mesh.check_inside()
        except ConfigurationError as error:
            raise UsageError(str(error)) from error
        if mesh.size > 1 and settings["prefetch"]:
            raise UsageError("prefetch is for workers of one process: leave out --prefetch")
    elif settings["compress"] != "none" and (mesh.size > 1 or settings["workers"] != 1):
        raise UsageError(
            f"compress is {settings['compress']} ({settings.origins['compress']}): codecs are for "
            "what goes to parameter servers; add --ps 1"
        )
    pipelined = mesh.pp > 1 or strategy in ("pipeline", None)
    for name in ("schedule", "microbatches"):
        if settings[name] is not None and not pipelined:
            raise UsageError(
                f"{name} is {settings[name]} ({settings.origins[name]}), and there is no pipeline: "
                "add --mesh pp=2 or --strategy pipeline"
            )


def _check_aggregator(settings: Settings, servers: int) -> None:
    """Checks that updates can be summed; the strategy may still be the program's own choice."""
    origins = settings.origins
    asked = f"host-aggregator is on ({origins['host-aggregator']})"
    if settings["strategy"] not in (None, "sync"):
        raise UsageError(
            f"{asked}, and only synchronous updates can be summed before they are applied: use "
            "--strategy sync, or leave --host-aggregator out"
        )
    if settings["aggregate"] is not None:
        raise UsageError(
            f"{asked}, and with aggregate {settings['aggregate']} ({origins['aggregate']}) the "
            "server picks single updates: leave one of the two out"
        )
    if servers != 1:
        raise UsageError(
            f"{asked}, and several parameter servers, or none, take no sums yet: use --ps 1, or "
            "leave --host-aggregator out"
        )
    if settings["compress"] != "none":
        raise UsageError(
            f"{asked}, and packed gradients (compress is {settings['compress']}, "
            f"{origins['compress']}) cannot be added up: leave one of the two out"
        )
    if settings["transport"] == "tcp":
        raise UsageError(
            f"{asked}, and workers reach it over shared memory, which transport tcp "
            f"({origins['transport']}) does without: leave one of the two out"
        )


def check_engine(settings: Settings) -> None:
    """Checks that what was said about the place where tasks run makes sense together.

    Raises:
        UsageError: it does not; says what to do.
    """
    if settings["on"] == "ray":
        if settings["workers"] == "auto":
            raise UsageError(
                "workers is auto, and how many a Ray cluster is to have only you can say: give "
                "--workers N"
            )
        if settings["host-aggregator"]:
            raise UsageError(
                "nobody says which workers of a Ray cluster share a host before they run: leave "
                "--host-aggregator out"
            )
        return
    for name in ENGINE_OPTIONS:
        if name != "on" and settings.origins[name] == "command line":
            raise UsageError(f"--{name} is for jobs on a Ray cluster: add --on ray")


def read_file(named: Path | None, directory: Path) -> tuple[str, dict[str, str]] | None:
    """Reads the configuration file: the one that was named, else the directory's own.

    That is `trireme.toml`, or else the table `[tool.trireme]` of `pyproject.toml`.

    Returns:
        The file's name and the text of each option in it; None where there is no file.

    Raises:
        ConfigurationError: the named file is not there, a file is not TOML, or it has an option
            that does not exist.
    """
    if named is not None:
        return str(named), _options(named, _load(named))
    own, project = directory / "trireme.toml", directory / "pyproject.toml"
    if own.is_file():
        return own.name, _options(own, _load(own))
    if project.is_file():
        tool = _load(project).get("tool", {})
        table = tool.get("trireme") if isinstance(tool, dict) else None
        if isinstance(table, dict):
            return project.name, _options(project, table)
    return None


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"the configuration {path} cannot be read: {error}") from error


def _options(path: Path, table: Mapping[str, Any]) -> dict[str, str]:
    known = [option.name for option in OPTIONS]
    said = {}
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in known:
            raise ConfigurationError(
                f"{path} sets {key}, which is no option{suggestion(name, known)}"
            )
        said[name] = str(value)
    return said


def suggestion(word: str, known: Iterable[str]) -> str:
    """Returns ` (did you mean X?)` where one of the known words is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""
