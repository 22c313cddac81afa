"""The bare parameter server, for programs that train no network: arrays and sparse tables.

A program creates its arrays and tables, pulls values, pushes updates, and calls `clock` when an
iteration is over: then all updates since the last `clock` travel as one update of the job, under
the strategy of the launch, with its verdicts, replicas and checkpoints. Source of the interface:
Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server (NIPS
2013), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np
import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.launch.environment import current_task, worker_of_servers
from trireme.ps.messages import Stale
from trireme.ps.results import PushResult
from trireme.session.options import OptionValues, make_options
from trireme.session.settings import Settings
from trireme.session.worker.assembly import assemble
from trireme.session.worker.job import Job
from trireme.session.worker.worker import Worker
from trireme.tables.embedding import check_settings
from trireme.tables.job.pushed_rows import Array, ArrayRows, DType, PushedRows, name_of
from trireme.tables.job.requests import RowKeys, RowRequest
from trireme.tables.table_spec import Add, Initializer, Optimizer, RowWiseAdagrad, TableSpec, Zeros

_OPTIONS = ("strategy", "checkpoint", "resume", "seed")


class Connection:
    """A worker's connection to the parameter servers of its job; `connect` makes it.

    Use it as a context manager: it joins the job at the first pull, push or clock, and leaves it at
    the end of the block, when every worker has. All workers create the same arrays and tables.
    Under plain `python` the values are in this process.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._specs: dict[str, TableSpec] = {}
        self._arrays: dict[str, ArrayRows] = {}
        self._pushed = PushedRows()
        self._job: Job | None = None
        self._dense: nn.Parameter | None = None
        self._closed = self._retired = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Saves and leaves the job, as `Session`'s; an exception fails it."""
        self._closed = True
        if self._job is not None:
            self._job.leave(error)

    # -- what there is ----------------------------------------------------------------------------

    def create(
        self,
        name: str,
        shape: int | tuple[int, ...],
        *,
        dtype: DType = "float32",
        optimizer: Optimizer = Add(),  # noqa: B008  # frozen
        initializer: Initializer = Zeros(),  # noqa: B008  # frozen
    ) -> None:
        """Creates a vector or a matrix.

        Args:
            name: its name, different from all others.
            shape: its shape: (n,) or (rows, columns).
            dtype: float32, float64, int32 or int64, as text, or as numpy's or torch's.
            optimizer: what an update does: `Add` adds it; others take it as a gradient. See
                `trireme.tables.table_spec`.
            initializer: the first values.

        Raises:
            ConfigurationError: an argument is out of range, or the job was joined before.
        """
        found = (shape,) if isinstance(shape, int) else tuple(shape)
        if len(found) not in (1, 2) or min(found) < 1:
            raise ConfigurationError(
                f"create({name!r}, {shape!r}): the shape is (n,) or (rows, columns), each at least "
                "1; for rows by key, use create_table"
            )
        if len(found) == 1 and isinstance(optimizer, RowWiseAdagrad):
            raise ConfigurationError(
                f"create({name!r}): RowWiseAdagrad is for matrices and tables, a vector has no rows"
            )
        array = ArrayRows(found)
        self._create(TableSpec(name, array.width, optimizer, name_of(dtype), initializer))
        self._arrays[name] = array

    def create_table(
        self,
        name: str,
        width: int,
        *,
        dtype: DType = "float32",
        optimizer: Optimizer = Add(),  # noqa: B008  # frozen
        initializer: Initializer = Zeros(),  # noqa: B008  # frozen
        admit_after: int = 1,
        drop_after: int = 0,
    ) -> None:
        """Creates a sparse table: rows by int64 key, made when they are first updated.

        See `create` for the arguments and what it raises, and `TableSpec` of
        `trireme.tables.table_spec`.
        """
        kind = name_of(dtype)
        self._create(TableSpec(name, width, optimizer, kind, initializer, admit_after, drop_after))

    def _create(self, spec: TableSpec) -> None:
        if self._job is not None:
            raise ConfigurationError(
                f"create({spec.name!r}): all arrays and tables are created before the first pull, "
                "push or clock"
            )
        if spec.name in self._specs:
            raise ConfigurationError(f"create({spec.name!r}): there is one of that name already")
        self._specs[spec.name] = spec

    # -- values -----------------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """This worker's index, from 0."""
        return self._settings.task.index

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the one that saves, and should print what all have reached."""
        return self._worker.lifecycle.is_chief

    @property
    def workers(self) -> int:
        """The number of workers that the job has begun with."""
        return self._settings.task.workers

    @property
    def step(self) -> int:
        """The global step: the number of updates in the values of the last clock."""
        return self._worker.global_step

    @property
    def stopping(self) -> bool:
        """Whether the job has ended for this worker: it makes no more updates."""
        return self._worker.backend.stopping

    @property
    def interrupted(self) -> bool:
        """Whether the job stops before its end, or this worker is to leave it."""
        lifecycle = self._worker.lifecycle
        return lifecycle.interrupted is not None or lifecycle.dismissed is not None

    @property
    def life(self) -> int:
        """How often the job has gone back to a checkpoint, as far as this worker knows.

        What was computed from values of an earlier life belongs to values that are no more.
        """
        return self._worker.life

    def pull(self, name: str, keys: Any = None) -> Array:
        """Returns values as they are now.

        Args:
            name: of an array or a table.
            keys: of a table or a matrix: which rows, int64, of any shape. None for a whole array.

        Returns:
            The array; or rows, of the shape of the keys with a further dimension. Keys that were
            never updated have their first values.

        Raises:
            ConfigurationError: there is no such array or table, or a key is out of range.
        """
        place, spec = self._place(name)
        array = self._arrays.get(name)
        if keys is None and array is None:
            raise ConfigurationError(f"pull({name!r}): it is a table: say which keys")
        whole = array if keys is None else None
        found = self._keys(name, keys) if whole is None else np.arange(whole.rows)
        self._joined()
        assert self._pushed.fetch is not None
        wanted = RowKeys(place, found.reshape(-1).astype(np.int64))
        (rows,) = self._pushed.fetch(RowRequest(self._pushed.specs, wanted=[wanted]))
        return rows.reshape((*found.shape, spec.width)) if whole is None else whole.joined(rows)

    def push(self, name: str, *what: Any) -> None:
        """Takes an update, which `clock` sends: `push(name, array)` or `push(name, keys, rows)`.

        Args:
            name: of an array or a table.
            what: a whole array; or keys, int64 of any shape, and a row for each. Rows of one key
                are added.

        Raises:
            ConfigurationError: there is no such array or table, shapes do not match, an integer
                does not fit into the dtype, or a number is infinite or not a number, which would
                stay in the values for good.
        """
        place, spec = self._place(name)
        array = self._arrays.get(name)
        if len(what) not in (1, 2) or (len(what) == 1 and array is None):
            or_whole = "" if array is None else ", or the whole array"
            raise ConfigurationError(f"push({name!r}, ...): give keys and rows{or_whole}")
        values = _converted(name, _plain(what[-1]), spec.dtype)
        if len(what) == 1 and array is not None:
            if values.shape != array.shape:
                raise ConfigurationError(
                    f"push({name!r}): its shape is {array.shape}, and the update's {values.shape}"
                )
            keys, rows = np.arange(array.rows), array.divided(values)
        else:
            keys = self._keys(name, what[0])
            if values.shape != (*keys.shape, spec.width):
                raise ConfigurationError(
                    f"push({name!r}): {keys.shape} keys need rows of shape "
                    f"{(*keys.shape, spec.width)}, and these have {values.shape}"
                )
            rows = values.reshape(-1, spec.width)
        self._pushed.add(place, keys.reshape(-1).astype(np.int64), rows)

    def clock(self, *, weight: float = 1.0) -> PushResult:
        """Ends an iteration: sends all updates since the last one; returns the verdict.

        Under `async` it is applied at once; under `ssp` the answer waits while this worker is too
        far ahead of the slowest; under `sync` the updates of all workers make one step.

        Args:
            weight: how much gradients of this worker count in the mean of a synchronous step, at
                least 0. Additions have no weight: they do not go with 0, which leaves all out.

        Raises:
            ConfigurationError: the weight is no such number, or would leave additions out; a sum is
                infinite; or the job has ended: `stopping` says so before.
            JobFailed: the job has ended elsewhere.
        """
        given: object = weight
        if not (isinstance(given, (int, float)) and math.isfinite(weight) and weight >= 0):
            raise ConfigurationError(
                f"clock(weight={weight!r}): it is a finite number of at least 0"
            )
        worker = self._worker
        if not weight and (adds := self._pushed.adds):
            raise ConfigurationError(
                f"clock(weight={weight!r}) would leave out what was added to "
                f"{', '.join(map(repr, adds))}: give a weight above 0, which counts for gradients "
                "only"
            )
        assert self._dense is not None
        self._dense.grad = torch.zeros_like(self._dense)
        worker.begin_step()
        result = worker.update(weight, ())
        self._pushed.forget()
        return result or PushResult(Stale(worker.global_step), worker.global_step, 0, False)

    def snapshot(self) -> Mapping[str, Mapping[str, Array]]:
        """Returns all rows of one consistent step: for each name its `keys` and `rows`, by key."""
        extra = self._worker.backend.snapshot(state=True).extra
        found: dict[str, dict[str, Array]] = {}
        for name, spec in self._specs.items():
            rows = np.empty((0, spec.width), spec.dtype)
            found[name] = {"keys": np.empty(0, np.int64), "rows": rows}
            if f"{name}/keys" in extra:
                found[name] = {field: extra[f"{name}/{field}"].numpy() for field in found[name]}
        return found

    def save(self) -> None:
        """Saves a checkpoint now, if this worker is chief; see `Session.save`."""
        self._worker.save()

    def end(self) -> None:
        """Makes no more updates: no other worker waits for this one. It may still pull."""
        self._joined()
        self._retire()

    def _retire(self) -> None:
        if self._job is not None and not self._retired:
            self._retired = True
            self._job.complete()
            self._job.worker.end()
            self._job.worker.lifecycle.liveness.excuse = "it has made its last update"

    def finish(self) -> None:
        """Makes no more updates, and waits until no worker in the job does; the chief saves.

        What `pull` returns afterwards is final. A worker that was lost and is started again is not
        waited for, unless it is back. The end of the block calls it too.

        Raises:
            CheckpointError: the last step is not on the disk.
            RolledBack: the job continues from a step before its end.
        """
        self._joined().end()

    # -- inside -----------------------------------------------------------------------------------

    def _place(self, name: str) -> tuple[int, TableSpec]:
        if name not in self._specs:
            known = ", ".join(map(repr, self._specs)) or "none"
            raise ConfigurationError(f"there is no array or table {name!r}: there are {known}")
        return list(self._specs).index(name), self._specs[name]

    def _keys(self, name: str, keys: Any) -> Array:
        found = _plain(keys)
        if not found.size:
            found = found.astype(np.int64)
        if found.dtype.kind not in "iu":
            raise ConfigurationError(f"{name!r}: keys are integers, and these are {found.dtype}")
        array = self._arrays.get(name)
        if array is not None and len(array.shape) == 1:
            raise ConfigurationError(f"{name!r} is a vector: pull and push it whole, without keys")
        if array is not None and found.size and not 0 <= found.min() <= found.max() < array.rows:
            raise ConfigurationError(f"{name!r} has {array.rows} rows: a key is out of range")
        return found

    @property
    def _worker(self) -> Worker:
        return self._joined().worker

    def _joined(self) -> Job:
        """Returns the part in the job, which is joined the first time."""
        if self._closed:
            raise ConfigurationError("the connection was closed: use it inside its `with` block")
        if self._job is not None:
            return self._job
        if not self._specs:
            raise ConfigurationError("create an array or a table first")
        model = nn.ParameterList([nn.Parameter(torch.zeros(1))])
        settings = self._settings
        self._pushed.specs = tuple(self._specs.values())
        setup = assemble(settings, lambda: model, lambda params: torch.optim.SGD(params, lr=0.0))
        self._job = Job(replace(setup, extension=self._pushed), records=False)
        self._job.before_end = self._retire
        (self._dense,) = setup.flat.parameters.values()
        return self._job


def connect(
    run_dir: str | Path | None = None,
    max_steps: int | None = None,
    *,
    servers: str | None = None,
    worker: int = 0,
    workers: int = 1,
    **options: Unpack[OptionValues],
) -> Connection:
    """Connects this worker to the parameter servers of its job.

    The launch of the program says which job that is: `trireme run`, `trireme task` or another
    launcher. A program that has none, such as a notebook, names the servers itself, which
    `trireme task --job-name ps` has started.

    Args:
        run_dir: where checkpoints go; see `trireme.Session`.
        max_steps: the global step at which the job ends; None for no end.
        servers: the servers as `host:port`, separated by commas, in the order that all tasks of
            the job have; None for those of the launch.
        worker: with `servers`, the index of this worker, from 0.
        workers: with `servers`, the number of workers that the servers were started for.
        options: `strategy`, `checkpoint`, `resume` and `seed`, as of `trireme.Session`.

    Raises:
        ConfigurationError: an option is unknown or out of range, the launch asks for what tables
            do not know, or `servers` is given in a process that was launched as a task.
    """
    for name in options:
        if name not in _OPTIONS:
            raise ConfigurationError(
                f"connect has no option {name!r}: it has run_dir, max_steps, servers, worker, "
                f"workers, {', '.join(_OPTIONS)}"
            )
    if servers is None and (worker, workers) != (0, 1):
        raise ConfigurationError(
            "connect(worker=, workers=) go with servers=: the launch says which worker this is"
        )
    given: object = servers
    if given is not None and not (isinstance(given, str) and given.strip()):
        raise ConfigurationError(
            f"connect(servers={servers!r}): name them in one text, such as "
            "servers='host1:2222,host2:2222', in the order that all tasks of the job have"
        )
    task = current_task() if servers is None else worker_of_servers(servers, worker, workers)
    settings = Settings.of(task, make_options(options, caller="connect"), run_dir, max_steps)
    check_settings(settings)
    return Connection(settings)


def _plain(values: Any) -> Array:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ConfigurationError(f"keys and updates are arrays of numbers: {error}") from None


def _converted(name: str, given: Array, dtype: str) -> Array:
    """Returns an update in a dtype, in which each of its numbers must be."""
    if not np.can_cast(given.dtype, dtype, "same_kind"):
        raise ConfigurationError(f"push({name!r}): {given.dtype} does not fit into {dtype}")
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        values = given.astype(dtype)
    integers = given.dtype.kind in "iu" and values.dtype.kind == "i"
    if integers and (given != values).any():
        wrong = f"an integer that does not fit into {dtype}"
    elif not np.isfinite(values).all():
        wrong = f"NaN or infinity in {dtype}"
    else:
        return values
    raise ConfigurationError(f"push({name!r}): the update has {wrong}")
