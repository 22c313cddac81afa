"""Whole tensors that are moved between processes one at a time."""

from __future__ import annotations

import socket
from collections.abc import Callable

import torch

from tests.process_groups import SPAWNER
from trireme.mesh import Mesh
from trireme.parallel.backends.tensor_stream import TensorStream
from trireme.parallel.processes.process_group import ProcessGroupConfig, TorchProcessGroup

_SECONDS = 60.0
_TENSORS = {
    "a": torch.arange(6.0).reshape(2, 3),
    "b": torch.tensor(3),
    "c": torch.tensor([True, False]),
    "d": torch.zeros(0),
    "e": torch.arange(4, dtype=torch.bfloat16).reshape(2, 2).t(),
}


def _held(rank: int) -> dict[str, torch.Tensor]:
    """The tensors of each process: `a` in both."""
    names = ("a", "c") if rank == 0 else ("a", "b", "d", "e")
    return {name: _TENSORS[name] for name in names}


def _child(
    program: Callable[[TorchProcessGroup], object], rank: int, address: str, said: object
) -> None:
    group = TorchProcessGroup(ProcessGroupConfig(Mesh(pp=2), rank, address, join_seconds=_SECONDS))
    try:
        result = program(group)
    finally:
        group.close(together=True)
    said.send(result)  # type: ignore[attr-defined]


def _run(program: Callable[[TorchProcessGroup], object]) -> list[object]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        address = f"127.0.0.1:{found.getsockname()[1]}"
    results = []
    processes = []
    for rank in range(2):
        ours, theirs = SPAWNER.Pipe(duplex=False)
        process = SPAWNER.Process(target=_child, args=(program, rank, address, theirs), daemon=True)
        process.start()
        theirs.close()
        processes.append((process, ours))
    for process, ours in processes:
        results.append(ours.recv() if ours.poll(_SECONDS) else None)
        process.join(_SECONDS)
    return results


def _stream(group: TorchProcessGroup) -> list[bool]:
    stream = TensorStream(group, _held(group.rank))
    if not group.is_chief:
        stream.serve()
        return []
    try:
        assert list(stream.shapes) == ["a", "c", "b", "d", "e"]
        assert stream.shapes["e"].dtype == torch.bfloat16 and stream.shapes["e"].is_meta
        return [torch.equal(stream.read(name), _TENSORS[name]) for name in "ebacde"]
    finally:
        stream.close()


def test_the_chief_reads_what_others_hold_in_any_order() -> None:
    assert _run(_stream) == [[True] * 6, []]
