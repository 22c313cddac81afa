"""A function that the workers of a job call, and what it returns.

This is the only module that pickles. Pickled functions and results are in nameless files, which
only the processes of the job inherit: they are on no disk, and never cross a network, other than
within Spark's own tasks. It is also the program of those workers: `python -m
trireme.jobs.function`.
"""

from __future__ import annotations

import fcntl
import functools
import linecache
import os
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import IO, Any

import msgspec

from trireme.errors import ConfigurationError
from trireme.launch.config.secret import nameless_file
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.environment import detect

_HEADER = struct.Struct("<qq")
"""One more than the index of the worker that has returned the result, and the length of the pickle
after it; zeros, or nothing, where none has."""
_SOURCES_LENGTH = 1 << 22


class _Parcel(msgspec.Struct, frozen=True):
    """A function as the workers receive it."""

    paths: list[str]  # where the caller's modules are searched for, `sys.path`
    # the text of code that is in no file, such as a notebook's cells, by its name
    sources: dict[str, str]
    call: bytes  # the pickle of the function and its arguments


def function_name(function: Callable[..., object]) -> str:
    """Returns a short name of a function that a file can have, such as `train`."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__name__", type(inner).__name__)
    return "".join(each if each.isalnum() else "-" for each in name).strip("-") or "function"


def pack_call(function: Callable[..., object], args: Sequence[object]) -> IO[bytes]:
    """Returns a nameless file that holds a function and its arguments, for `run_call`."""
    try:
        call = _cloudpickle().dumps((function, tuple(args)))
    except ConfigurationError:
        raise
    except Exception as error:  # whatever the objects' own code raises
        raise ConfigurationError(
            f"{function_name(function)} cannot be sent to the workers of a job: "
            f"{type(error).__name__}: {error}. It, its arguments and what it refers to travel to "
            "other processes: open files, locks and connections inside the function"
        ) from error
    paths = [os.path.abspath(path) for path in sys.path]
    file = nameless_file("function")
    _write_all(file, msgspec.msgpack.encode(_Parcel(paths, _sources(), call)))
    return file


def _cloudpickle() -> ModuleType:
    try:
        import cloudpickle  # an extra, and slow to load
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "to launch a function cloudpickle must be installed: pip install "
            "'trireme-train[notebook]'; or write the function into a script, and launch its path"
        ) from error
    module: ModuleType = cloudpickle
    return module


def _sources() -> dict[str, str]:
    """Returns the text of code that is in no file, so that tracebacks in workers can show it."""
    found: dict[str, str] = {}
    length = 0
    for name, entry in reversed(list(linecache.cache.items())):
        if len(entry) != 4 or os.path.exists(name):  # not loaded yet, or a file
            continue
        text = "".join(entry[2])
        length += len(text)
        if length > _SOURCES_LENGTH:
            break
        found[name] = text
    return found


def _write_all(file: IO[bytes], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _read_all(fd: int) -> bytes:
    """Returns what is in a file, whose position other processes share."""
    size, data = os.fstat(fd).st_size, bytearray()
    while len(data) < size and (part := os.pread(fd, size - len(data), len(data))):
        data += part  # one call reads 2 GiB at most
    return bytes(data)


def by_worker(data: bytes) -> int:
    """Returns one more than the index of the worker whose result a file has; 0 for none."""
    number: int = _HEADER.unpack_from(data.ljust(_HEADER.size, b"\0"))[0]
    return number


def read_result(file: IO[bytes]) -> object:
    """Returns what the chief has returned; None if no worker has returned anything.

    Call it after all workers have ended. It unpickles what they wrote, and so runs code of theirs.
    """
    data = _read_all(file.fileno()).ljust(_HEADER.size, b"\0")
    number, length = _HEADER.unpack_from(data)
    if not number:
        return None
    try:
        value: object = pickle.loads(memoryview(data)[_HEADER.size : _HEADER.size + length])
    except Exception as error:  # whatever the objects' own code raises
        raise ConfigurationError(
            f"what worker:{number - 1} returned cannot be read here: {type(error).__name__}: "
            f"{error}. Return numbers, tensors, or a state_dict()"
        ) from error
    return value


def call(task: TaskConfig) -> None:
    """Calls the function of a worker, and leaves what it returns."""
    function, args = _receive(task.descriptors["call"], task)
    result = task.descriptors.get("result")
    if result is not None:
        os.set_inheritable(result, False)
    value = function(*args)
    if result is not None and task.group.rank == 0:
        _leave(result, task.index, value)


def _receive(fd: int, task: TaskConfig) -> tuple[Callable[..., object], tuple[Any, ...]]:
    """Returns the function and its arguments."""
    try:
        os.set_inheritable(fd, False)
        data = _read_all(fd)
        os.close(fd)
        parcel = msgspec.msgpack.decode(data, type=_Parcel)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"{task.name} has not received the function that it is to call: the engine "
            f"{task.config.launch.on} must pass on the descriptors of each task "
            "(`TaskConfig.descriptors`) to its process, on the same host; start a script there, "
            "or leave out `on`"
        ) from error
    sys.path += [path for path in parcel.paths if path not in sys.path]
    for name, text in parcel.sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    try:
        function, args = pickle.loads(parcel.call)
    except Exception as error:  # whatever the objects' own code raises
        raise ConfigurationError(
            f"{task.name} cannot read the function that it is to call: "
            f"{type(error).__name__}: {error}"
        ) from error
    return function, args


def _leave(fd: int, index: int, value: object) -> None:
    """Leaves a worker's result, unless a worker of lower index has left one.

    The chief is the worker of lowest index of those that live, so its result stays.
    """
    try:
        data = _cloudpickle().dumps(value)
    except Exception as error:  # whatever the objects' own code raises
        raise ConfigurationError(
            f"what worker:{index} returned cannot be sent back: {type(error).__name__}: {error}. "
            "Return numbers, tensors, or a state_dict()"
        ) from error
    with os.fdopen(fd, "r+b", buffering=0) as file:
        fcntl.lockf(file, fcntl.LOCK_EX)  # a lock of this process, which ends with it
        before, _ = _HEADER.unpack(os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
        if 0 < before <= index:
            return
        os.ftruncate(fd, 0)  # a worker that is killed here leaves nothing
        file.seek(_HEADER.size)
        _write_all(file, data)
        os.pwrite(fd, _HEADER.pack(index + 1, len(data)), 0)


if __name__ == "__main__":
    call(detect())
