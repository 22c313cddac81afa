"""What XProf reads, read back by Google's own decoder: from the schema, not from the encoder."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from torch.autograd import DeviceType
from torch.autograd.profiler_util import Interval

from trireme.dashboards.step_trace import StepTrace, encode

# name, number and type of each field; what is repeated ends in a star. Maps are lists of entries.
SCHEMA = {
    "XSpace": ["planes* 1 XPlane"],
    "XPlane": [
        "id 1 int64",
        "name 2 string",
        "lines* 3 XLine",
        "event_metadata* 4 Entry",
        "stat_metadata* 5 Entry",
    ],
    "XLine": ["id 1 int64", "name 2 string", "events* 4 XEvent"],
    "XEvent": ["metadata_id 1 int64", "offset_ps 2 int64", "duration_ps 3 int64", "stats* 4 XStat"],
    "XStat": ["metadata_id 1 int64", "int64_value 4 int64", "str_value 5 string"],
    "Entry": ["key 1 int64", "value 2 Metadata"],
    "Metadata": ["id 1 int64", "name 2 string"],
}


def decoded(data: bytes) -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="xplane.proto", syntax="proto3")
    for message, fields in SCHEMA.items():
        made = file.message_type.add(name=message)
        for field in fields:
            name, number, kind = field.split()
            one = made.field.add(name=name.rstrip("*"), number=int(number))
            one.label = one.LABEL_REPEATED if name.endswith("*") else one.LABEL_OPTIONAL
            if kind in SCHEMA:
                one.type, one.type_name = one.TYPE_MESSAGE, f".{kind}"
            else:
                one.type = one.TYPE_INT64 if kind == "int64" else one.TYPE_STRING
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    space = message_factory.GetMessageClass(pool.FindMessageTypeByName("XSpace"))()
    space.ParseFromString(data)
    whole = space.SerializeToString()
    space.DiscardUnknownFields()
    assert space.SerializeToString() == whole  # nothing is there that the schema lacks
    return space


def read(data: bytes) -> dict[tuple[str, str], list[tuple[str, int, int, dict[str, Any]]]]:
    """Events (name, begin, duration, what else is known) by plane and line."""
    found = {}
    for plane in decoded(data).planes:
        names = {entry.key: entry.value.name for entry in plane.event_metadata}
        stats = {entry.key: entry.value.name for entry in plane.stat_metadata}
        for line in plane.lines:
            found[plane.name, line.name] = [
                (
                    names[event.metadata_id],
                    event.offset_ps,
                    event.duration_ps,
                    {stats[s.metadata_id]: s.str_value or s.int64_value for s in event.stats},
                )
                for event in line.events
            ]
    return found


def event(name: str, start: float, end: float, **more: Any) -> Any:
    usual = {"device_type": DeviceType.CPU, "thread": 1, "input_shapes": []}
    return Of(name=name, time_range=Interval(start, end), **(usual | more))


def test_threads_and_streams_each_have_a_line() -> None:
    kernel = {"device_type": DeviceType.CUDA, "device_index": 1, "device_resource_id": 7}
    events = [
        event("step", 0.0, 2_000_000.5),
        event("aten::mm", 1.25, 3.0, input_shapes=[[100, 784], [784, 500], []]),
        event("aten::mm", 4.0, 3.0, thread=300),  # clocks may disagree
        event("sgemm", 2.0, 2.5, **kernel),
    ]
    assert read(encode(events, 50)) == {
        ("/host:CPU", "thread 1"): [
            ("step", 0, 2_000_000_500_000, {"step_num": 50, "_r": 1}),
            ("aten::mm", 1_250_000, 1_750_000, {"shapes": "100x784, 784x500"}),
        ],
        ("/host:CPU", "thread 300"): [("aten::mm", 4_000_000, 0, {})],
        ("/device:GPU:1", "stream 7"): [("sgemm", 2_000_000, 500_000, {})],
    }


def test_a_step_as_the_profiler_saw_it(tmp_path: Path) -> None:
    trace = StepTrace()
    torch.ones(3, 4) @ torch.ones(4, 5)
    trace.stop()
    trace.write(tmp_path, "worker_2", 12)
    events = read((tmp_path / "plugins/profile/step_000000012/worker_2.xplane.pb").read_bytes())
    (operations,) = events.values()
    ((begin, length, step),) = [e[1:] for e in operations if e[0] == "step"]
    assert step == {"step_num": 12, "_r": 1}
    ((at, taken, known),) = [e[1:] for e in operations if e[0] == "aten::mm"]
    assert begin < at < at + taken < begin + length
    assert known == {"shapes": "3x4, 4x5"}
    recorded = json.loads((tmp_path / "worker_2.000000012.pt.trace.json").read_text())
    names = {"cpu_op", "user_annotation"}
    assert sorted(e[0] for e in operations) == sorted(
        e["name"] for e in recorded["traceEvents"] if e.get("cat") in names
    )
