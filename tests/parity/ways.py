"""Every way to spread a model that is compared with one plain process."""

from __future__ import annotations

from tests.process_groups import ProcessGroup

WAYS = {
    "allreduce": ProcessGroup(2, strategy="allreduce"),
    "fsdp": ProcessGroup(2, strategy="fsdp"),
    "tensor": ProcessGroup(2, strategy="tensor"),
    "pipeline gpipe": ProcessGroup(2, strategy="pipeline", schedule="gpipe"),
    "pipeline 1f1b": ProcessGroup(2, strategy="pipeline", schedule="1f1b"),
    "pipeline interleaved": ProcessGroup(2, strategy="pipeline", schedule="interleaved"),
    "pipeline zero-bubble": ProcessGroup(2, strategy="pipeline", schedule="zero-bubble"),
    "one micro-batch": ProcessGroup(2, strategy="pipeline", schedule="gpipe", microbatches=1),
    "dp=2,tp=2": ProcessGroup(mesh="dp=2,tp=2", inside=4),
    "dp=2,pp=2": ProcessGroup(mesh="dp=2,pp=2", inside=4),
    "tp=2,pp=2": ProcessGroup(mesh="tp=2,pp=2", inside=4),
    "dp=2,fsdp=2": ProcessGroup(mesh="dp=2,fsdp=2", inside=4),
    "fsdp=2,tp=2": ProcessGroup(mesh="fsdp=2,tp=2", inside=4),
    "fsdp=2,pp=2": ProcessGroup(mesh="fsdp=2,pp=2", inside=4),
    "ps sync over pp=2": ProcessGroup(2, servers=1, strategy="sync", mesh="pp=2", inside=2),
    "graph": ProcessGroup(2, strategy="graph"),
    "ps sync over graph=2": ProcessGroup(2, servers=1, strategy="sync", mesh="graph=2", inside=2),
    "averaging, H=1": ProcessGroup(2, servers=1, strategy="averaging", every=1),
    "ps sync over tp=2": ProcessGroup(2, servers=2, strategy="sync", mesh="tp=2", inside=2),
    "ps sync over dp=2": ProcessGroup(2, servers=1, strategy="sync", mesh="dp=2", inside=2),
    "ps sync over dp=2,tp=2": ProcessGroup(
        2, servers=2, strategy="sync", mesh="dp=2,tp=2", inside=4
    ),
    "ps sync over fsdp=2": ProcessGroup(1, servers=1, strategy="sync", mesh="fsdp=2", inside=2),
    "ps sync over dp=2,pp=2": ProcessGroup(
        1, servers=1, strategy="sync", mesh="dp=2,pp=2", inside=4
    ),
}
"""By the name in the table. Each trains on the same batches as one plain process."""

REPLICAS = {
    "allreduce": 2,
    "fsdp": 2,
    "dp=2,tp=2": 2,
    "dp=2,pp=2": 2,
    "dp=2,fsdp=2": 4,
    "fsdp=2,tp=2": 2,
    "fsdp=2,pp=2": 2,
    "ps sync over pp=2": 2,
    "ps sync over graph=2": 2,
    "averaging, H=1": 2,
    "ps sync over tp=2": 2,
    "ps sync over dp=2": 4,
    "ps sync over dp=2,tp=2": 4,
    "ps sync over fsdp=2": 2,
    "ps sync over dp=2,pp=2": 2,
}
"""How many batches make a step, where that is not one."""
