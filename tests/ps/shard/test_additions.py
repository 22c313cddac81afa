"""Parameters that one worker adds, while another is out."""

from __future__ import annotations

import torch

from tests.ps.bench import ASYNC, SGD, Bench, told
from trireme.ps.messages import Applied, Attach, ParameterSpec, PushReply
from trireme.ps.shard.participants import Participant
from trireme.ps.snapshot_messages import AddParameters, ParametersAdded, TensorSpec


def test_a_worker_that_was_out_meanwhile_goes_on_with_the_parameters_that_it_has() -> None:
    bench = Bench(workers=(0, 1))
    bench.attach(1)
    bench.view(1)  # worker 0 is out, and its process goes on
    more = bench.layout.grown([ParameterSpec("b", (16,), "float64", 0)])
    spec = TensorSpec("values", "float64", "float64.1", 0, 16)
    shown = Attach(0, more.spec, SGD, ASYNC)
    request = AddParameters(bench.view_number, 7, shown, (spec,))
    payload = [(spec, torch.ones(16, dtype=torch.float64))]
    out = bench.shard.request(bench.now, "add", Participant(1, 1), request, payload)
    assert [type(message) for _, message in told(out)] == [ParametersAdded]
    bench.view((0, 2), 1)
    layout = bench.shard.state.layout_of(0)
    assert layout is not None and layout.spec == bench.layout.spec
    assert bench.shard.state.layout_of(1) is bench.shard.state.layout
    ((_, reply),) = told(bench.push(0, 1, incarnation=2))
    assert isinstance(reply, PushReply) and reply.verdict == Applied(1)
