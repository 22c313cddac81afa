"""A `SummaryWriter` in the calling thread, and events that it has no method for, such as graphs.

Each function takes the writer of a run.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from io import FileIO
from itertools import count, product
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.versions_pb2 import VersionDef
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.writer import FileWriter

from trireme.dashboards.forward_tracer import Graph, Node

_PRODUCER = 22  # the version of the graph's format, as TensorBoard understands it
_VERSION = "brain.Event:2"
_numbers = count()
_CALL = re.compile(r"_\d+$")


def add_graph(
    writer: SummaryWriter, graph: Graph, devices: Mapping[str, str] | None = None
) -> None:
    """Writes the graph of the run's model, with shapes and devices: the GRAPHS dashboard.

    `devices` says where modules are placed, such as `worker:0/cuda:1`, by their names in the model,
    of which "" is the whole: a node is where the innermost of its modules is placed, or was traced.
    """
    placed = (_placed(node, devices) for node in graph) if devices else graph
    nodes, versions = [_definition(node) for node in placed], VersionDef(producer=_PRODUCER)
    definition = GraphDef(node=nodes, versions=versions)
    untyped: Any = writer
    untyped._get_file_writer().add_event(Event(graph_def=definition.SerializeToString()))


def _placed(node: Node, devices: Mapping[str, str]) -> Node:
    """Returns a node at the place of the innermost module that has one."""
    path = node.name.split("/")[:-1]
    for length in range(len(path), -1, -1):
        # A module that is called again has a number behind its name.
        spellings = [dict.fromkeys([name, _CALL.sub("", name)]) for name in path[:length]]
        for names in product(*spellings):
            if (scope := ".".join(names)) in devices:
                return replace(node, place=devices[scope])
    return node


def device_name(place: str) -> str:
    """Returns TensorFlow's name of a place such as `worker:1`, `worker:0/cuda:1` or `ps:0`."""
    task, _, device = place.partition("/")
    role, _, index = task.partition(":")
    kind, _, number = device.partition(":")
    shown = "GPU" if kind == "cuda" else (kind or "cpu").upper()
    return f"/job:{role}/task:{index or 0}/device:{shown}:{number or 0}"


def _definition(node: Node) -> NodeDef:
    device = device_name(node.place)
    definition = NodeDef(name=node.name, op=node.kind, device=device, input=node.sources)
    if node.outputs:
        sizes = ([TensorShapeProto.Dim(size=size) for size in each.shape] for each in node.outputs)
        shapes = AttrValue.ListValue(shape=[TensorShapeProto(dim=each) for each in sizes])
        definition.attr["_output_shapes"].list.CopyFrom(shapes)
        dtypes = ", ".join(output.dtype for output in node.outputs)
        definition.attr["dtype"].s = dtypes.encode()
    return definition


class _WholeWrites(FileIO):
    """A file without a buffer, so that closing it writes nothing."""

    def write(self, data: Any) -> int:
        done = 0
        while done < len(data):
            done += super().write(data[done:])
        return done


class _EventFile:
    """What `FileWriter` takes for TensorBoard's writer: writes each event to the file at once."""

    def __init__(self, directory: str) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.get_logdir = lambda: directory
        name = f"{time.time():010.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        file = _WholeWrites(f"{directory}/events.out.tfevents.{name}", "w")
        self._records = RecordWriter(file)
        self.flush, self.close = file.flush, file.close
        self.add_event(Event(wall_time=time.time(), file_version=_VERSION))

    def add_event(self, event: Event) -> None:
        self._records.write(event.SerializeToString())


class _FileWriter(FileWriter):
    def __init__(self, directory: str) -> None:
        self.event_writer = _EventFile(directory)


class RunWriter(SummaryWriter):
    """A `SummaryWriter` that writes in the thread that calls, and raises the `OSError` of the disk.

    TensorBoard's own writer has a thread for each file, which ends with a traceback on standard
    error when the disk is full.
    """

    def _get_file_writer(self) -> Any:
        untyped: Any = self
        if untyped.file_writer is None:
            untyped.file_writer = _FileWriter(self.log_dir)
            untyped.all_writers = {self.log_dir: untyped.file_writer}
            step, untyped.purge_step = self.purge_step, None
            if step is not None:
                start = SessionLog(status=SessionLog.START)
                untyped.file_writer.add_event(Event(step=step, file_version=_VERSION))
                untyped.file_writer.add_event(Event(step=step, session_log=start))
        return untyped.file_writer
