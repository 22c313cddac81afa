"""Modules with rows in a table, as programs treat modules: loops, copies, dtypes, freezing."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import trireme
from tests.process_groups import ProcessGroup, run_process_group
from trireme.errors import ConfigurationError
from trireme.loops.distributed_optimizer import DistributedOptimizer
from trireme.tables.table_spec import Normal, RowWiseAdagrad

pytest.importorskip("numba", reason="tables are not tested: pip install 'trireme-train[tables]'")

KEYS, WIDTH, BATCH, STEPS = 20, 4, 8, 12
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(KEYS, (STEPS, BATCH), generator=GENERATOR)
TARGETS = torch.randn(STEPS, BATCH, generator=GENERATOR)


Join = Callable[..., DistributedOptimizer]


class Net(nn.Module):
    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.top = nn.Linear(WIDTH, 1)
        with torch.no_grad():
            self.top.weight.fill_(0.3)
            self.top.bias.zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.embedding(ids).tanh()).squeeze(-1)
        return out


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.5)


def table_net(**arguments: Any) -> Net:
    return Net(trireme.Embedding(KEYS, WIDTH, **arguments))


def loss_of(net: nn.Module, step: int) -> torch.Tensor:
    return nn.functional.mse_loss(net(IDS[step]), TARGETS[step])


def rows_of(net: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = net.embedding(torch.arange(KEYS)).clone()  # type: ignore[operator]
    return found


@pytest.fixture
def join() -> Iterator[Callable[..., DistributedOptimizer]]:
    """Returns a function that joins the job of this process, which is left at the end."""
    joined: list[DistributedOptimizer] = []

    def join(net: nn.Module, **options: Any) -> DistributedOptimizer:
        joined.append(trireme.distribute(net, sgd(net), **options))
        return joined[-1]

    yield join
    for each in joined:
        each.close()


# Each trains for one step of a loop that is not ours, as such loops are written.


def drop_before_backward(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss = loss_of(net, step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def drop_by_the_model(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    net.zero_grad()
    loss_of(net, step).backward()
    optimizer.step()


def drop_what_is_not_used(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    loss_of(net, step).backward()
    optimizer.zero_grad()
    loss_of(net, (step + 1) % STEPS)  # never goes backward
    loss_of(net, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulate(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    (loss_of(net, step) / 2).backward()
    if step % 2:
        optimizer.step()
        optimizer.zero_grad()


def backward_twice(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss = loss_of(net, step)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def in_evaluation_mode(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    drop_before_backward(net.eval(), optimizer, step)


@pytest.mark.parametrize(
    "make_step",
    [
        drop_before_backward,
        drop_by_the_model,
        drop_what_is_not_used,
        accumulate,
        backward_twice,
        in_evaluation_mode,
    ],
)
def test_a_loop_of_one_s_own_trains_rows_as_torch_does(
    make_step: Callable[[nn.Module, torch.optim.Optimizer, int], None], join: Join
) -> None:
    net = table_net()
    optimizer = join(net)
    plain = Net(nn.Embedding.from_pretrained(rows_of(net), freeze=False))
    other = sgd(plain)
    for step in range(STEPS):
        make_step(net, optimizer, step)
        make_step(plain, other, step)
    torch.testing.assert_close(rows_of(net), rows_of(plain), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(net.top.weight, plain.top.weight, rtol=1e-6, atol=1e-6)


def test_clipping_counts_rows_in_a_loop_of_one_s_own(join: Join) -> None:
    net = table_net()
    optimizer = join(net, clip_norm=0.05)
    plain = Net(nn.Embedding.from_pretrained(rows_of(net), freeze=False))
    other = sgd(plain)
    for step in range(STEPS):
        drop_before_backward(net, optimizer, step)
        other.zero_grad()
        loss_of(plain, step).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        other.step()
    torch.testing.assert_close(rows_of(net), rows_of(plain), rtol=1e-6, atol=1e-6)


def test_several_optimizers_are_refused() -> None:
    """Each would update the rows: a generator's those of its discriminator."""
    net = table_net(optimizer=RowWiseAdagrad(lr=0.1))
    several = [torch.optim.SGD([p], 0.1) for p in net.parameters()]
    with pytest.raises(ConfigurationError, match=r"'embedding', and the program several"):
        trireme.distribute(net, several)
    with pytest.raises(ConfigurationError, match=r"'embedding', and the program several"):
        trireme.Session(net, nn.functional.mse_loss, several).__enter__()


@pytest.fixture
def joined(join: Join) -> tuple[Net, DistributedOptimizer]:
    """A model in a loop of its own that has made one step, and its optimizer."""
    net = table_net()
    optimizer = join(net)
    drop_before_backward(net, optimizer, 0)
    return net, optimizer


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = (trireme.Embedding(None, WIDTH) for _ in range(2))
        self.other = trireme.Embedding(None, WIDTH, table="user")
        self.bias = nn.Parameter(torch.zeros(1))


def test_tables_begin_with_rows_of_their_own_and_the_same_in_every_process(join: Join) -> None:
    net = Two()
    join(net)
    keys = torch.arange(2000)
    with torch.no_grad():
        user, item, other = net.user(keys), net.item(keys), net.other(keys)
    assert torch.equal(user, other)
    assert abs(float((user * item).mean())) < 0.05
    assert [float(rows.std()) for rows in (user, item)] == pytest.approx([1, 1], abs=0.05)
    written_out = torch.tensor([0.3367, 0.1940, -0.3690, 0.8425])
    torch.testing.assert_close(user[3], written_out, rtol=0, atol=1e-4)


def test_a_copy_of_a_model_has_no_table(joined: tuple[Net, DistributedOptimizer]) -> None:
    net, _ = joined
    torch.save(net, io.BytesIO())
    copied = copy.deepcopy(net)
    assert torch.equal(copied.top.weight, net.top.weight)
    with pytest.raises(ConfigurationError, match="opens it for the model that it is given, and"):
        copied(IDS[0])
    net(IDS[0])


def test_rows_are_frozen_by_their_module(joined: tuple[Net, DistributedOptimizer]) -> None:
    net, optimizer = joined
    before, top = rows_of(net), net.top.weight.detach().clone()
    net.embedding.requires_grad_(False)
    drop_before_backward(net, optimizer, 1)
    assert torch.equal(rows_of(net), before)
    assert not torch.equal(net.top.weight, top)
    net.embedding.requires_grad_()
    drop_before_backward(net, optimizer, 1)
    assert not torch.equal(rows_of(net), before)


def test_a_model_of_doubles_has_rows_of_doubles(join: Join) -> None:
    net = table_net(initializer=Normal(seed=3)).double()
    join(net)
    assert rows_of(net).dtype == torch.float64
    with pytest.raises(ConfigurationError, match=r"convert the model to torch\.float32 before"):
        net.float()
    net.double()


def test_what_torch_s_embedding_has_and_a_table_has_not_is_said() -> None:
    assert not hasattr(trireme.Embedding(KEYS, WIDTH), "weight")
    for reduced in (table_net().half, table_net().bfloat16):
        with pytest.raises(ConfigurationError, match='precision="bfloat16"'):
            reduced()
    for padding in (KEYS, -KEYS - 1):
        with pytest.raises(ConfigurationError, match=r"padding_idx=.*: ids run from 0 to 19"):
            trireme.Embedding(KEYS, WIDTH, padding)
    with pytest.raises(ConfigurationError, match=r"num_embeddings='20': give an integer"):
        trireme.Embedding("20", WIDTH)  # type: ignore[arg-type]


def test_rows_that_an_earlier_session_has_kept_are_told(tmp_path: Path, capsys: Any) -> None:
    def train(net: nn.Module, steps: int, run_dir: Path | None) -> str:
        with trireme.Session(
            net, nn.functional.mse_loss, sgd(net), max_steps=steps, run_dir=run_dir
        ) as session:
            while not session.should_stop:
                session.step((IDS[0], TARGETS[0]))
        printed: str = capsys.readouterr().out
        return printed

    net = table_net()
    assert "begin anew" not in train(net, 2, tmp_path)
    assert "begin anew" not in train(net, 4, tmp_path)
    assert "the sparse tables embedding begin anew, and the parameters where" in train(net, 2, None)


def enter() -> None:
    """Enters a session of a model with tables. In a process of its own."""
    trireme.Session(net := table_net(), nn.functional.mse_loss, sgd(net)).__enter__()


def connect() -> None:
    """Connects a program of the bare server. In a process of its own."""
    trireme.ps.connect()


@pytest.mark.parametrize("program", [enter, connect])
@pytest.mark.parametrize("strategy", ["allreduce", "graph"])
def test_processes_that_hold_a_model_together_refuse_tables(
    strategy: str, program: Callable[[], None]
) -> None:
    raised = run_process_group(ProcessGroup(workers=2, strategy=strategy), program).raised
    assert len(raised) == 2
    for text in raised.values():
        assert f"trireme.ps.connect) under the strategy {strategy} are not built yet" in text


def test_rows_have_the_default_dtype_of_torch() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert trireme.Embedding(None, 4).dtype == torch.float64
        assert trireme.Embedding(None, 4, dtype=torch.float32).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
