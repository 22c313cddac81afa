"""A model's graph, and what a pass through it cost, in TensorBoard's formats.

The graph is a `GraphDef`; the cost of one step is a `RunMetadata` whose nodes have the names of
the graph's, as TensorFlow wrote it: TensorBoard lists them under "Tag" and colours the graph by
compute time or memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorboard.compat.proto.attr_value_pb2 import AttrValue
from tensorboard.compat.proto.config_pb2 import RunMetadata
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.compat.proto.node_def_pb2 import NodeDef
from tensorboard.compat.proto.step_stats_pb2 import (
    AllocatorMemoryUsed,
    DeviceStepStats,
    NodeExecStats,
    NodeOutput,
    StepStats,
)
from tensorboard.compat.proto.tensor_description_pb2 import TensorDescription
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.versions_pb2 import VersionDef

__all__ = ["Graph", "Node", "Output"]

_PRODUCER = 22  # the version of the format, as TensorBoard understands it


@dataclass(frozen=True)
class Output:
    """A tensor that a node makes.

    Attributes:
        shape: its.
        dtype: its, in words.
        bytes: of memory taken for it; 0 where it lies in memory that an input had.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Node:
    """An operation, a parameter, an input or an output.

    Attributes:
        name: unique, with scopes separated by `/`.
        kind: what it does.
        device: where, in TensorFlow's spelling.
        sources: the names of the nodes whose outputs it takes.
        outputs: what it makes.
        began: when, in nanoseconds of any clock; 0 for what is not computed.
        nanoseconds: how long it took.
    """

    name: str
    kind: str
    device: str
    sources: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    began: int = 0
    nanoseconds: int = 0


@dataclass(frozen=True)
class Graph:
    """What one pass did, in the order in which it was done."""

    nodes: tuple[Node, ...]

    def definition(self) -> GraphDef:
        """Returns the graph, with shapes and devices."""
        return GraphDef(
            node=[_definition(node) for node in self.nodes],
            versions=VersionDef(producer=_PRODUCER),
        )

    def costs(self) -> RunMetadata:
        """Returns the time and the memory of each node that computes."""
        devices = dict.fromkeys(node.device for node in self.nodes)
        return RunMetadata(
            step_stats=StepStats(
                dev_stats=[
                    DeviceStepStats(
                        device=device,
                        node_stats=[
                            _cost(node)
                            for node in self.nodes
                            if node.device == device and node.began
                        ],
                    )
                    for device in devices
                ]
            )
        )


def _definition(node: Node) -> NodeDef:
    definition = NodeDef(name=node.name, op=node.kind, device=node.device, input=node.sources)
    if node.outputs:
        shapes = AttrValue.ListValue(shape=[_shape(output) for output in node.outputs])
        definition.attr["_output_shapes"].list.CopyFrom(shapes)
        dtypes = ", ".join(output.dtype for output in node.outputs)
        definition.attr["dtype"].s = dtypes.encode()
    return definition


def _cost(node: Node) -> NodeExecStats:
    micros = max(round(node.nanoseconds / 1000), 1)  # none at all would count as not run
    return NodeExecStats(
        node_name=node.name,
        all_start_micros=node.began // 1000,
        op_start_rel_micros=0,
        op_end_rel_micros=micros,
        all_end_rel_micros=micros,
        memory=[
            AllocatorMemoryUsed(
                allocator_name=node.device.rpartition("/")[2],
                total_bytes=sum(output.bytes for output in node.outputs),
            )
        ],
        output=[
            NodeOutput(slot=slot, tensor_description=TensorDescription(shape=_shape(output)))
            for slot, output in enumerate(node.outputs)
        ],
    )


def _shape(output: Output) -> TensorShapeProto:
    return TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in output.shape])
