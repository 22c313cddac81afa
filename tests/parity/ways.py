"""Every way to spread a model that is compared with one plain process."""

from __future__ import annotations

from tests.gangs import Gang

WAYS = {
    "allreduce": Gang(2, strategy="allreduce"),
    "fsdp": Gang(2, strategy="fsdp"),
    "tensor": Gang(2, strategy="tensor"),
    "pipeline gpipe": Gang(2, strategy="pipeline", schedule="gpipe"),
    "pipeline 1f1b": Gang(2, strategy="pipeline", schedule="1f1b"),
    "pipeline interleaved": Gang(2, strategy="pipeline", schedule="interleaved"),
    "pipeline zero-bubble": Gang(2, strategy="pipeline", schedule="zero-bubble"),
    "one micro-batch": Gang(2, strategy="pipeline", schedule="gpipe", microbatches=1),
    "dp=2,tp=2": Gang(mesh="dp=2,tp=2", inside=4),
    "dp=2,pp=2": Gang(mesh="dp=2,pp=2", inside=4),
    "tp=2,pp=2": Gang(mesh="tp=2,pp=2", inside=4),
    "dp=2,fsdp=2": Gang(mesh="dp=2,fsdp=2", inside=4),
    "fsdp=2,tp=2": Gang(mesh="fsdp=2,tp=2", inside=4),
    "fsdp=2,pp=2": Gang(mesh="fsdp=2,pp=2", inside=4),
    "ps sync over pp=2": Gang(2, servers=1, strategy="sync", mesh="pp=2", inside=2),
    "averaging, H=1": Gang(2, servers=1, strategy="averaging", every=1),
    "ps sync over tp=2": Gang(2, servers=2, strategy="sync", mesh="tp=2", inside=2),
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
    "averaging, H=1": 2,
    "ps sync over tp=2": 2,
}
"""How many batches make a step, where that is not one."""
