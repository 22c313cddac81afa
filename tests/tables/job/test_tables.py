"""Models with sparse tables, in one process and with parameter servers: the same as torch's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

import trireme
from tests.harness import Cluster, run_job
from trireme.errors import ConfigurationError
from trireme.session.session import Session
from trireme.session.worker.worker import Worker
from trireme.tables.table_spec import FTRL, Normal

pytest.importorskip("numba", reason="tables are not tested: pip install 'trireme-train[tables]'")

KEYS, WIDTH, EXAMPLES, BATCH = 50, 4, 64, 16
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(KEYS, (EXAMPLES, 3), generator=GENERATOR)
TARGETS = torch.randn(EXAMPLES, 1, generator=GENERATOR)
DATA = TensorDataset(IDS, TARGETS)


class WrittenOutFTRL(torch.optim.Optimizer):
    """FTRL-proximal as McMahan et al. (2013) write it, algorithm 1, for the rows of a batch.

    The weights follow from the sums z and n. A first value other than 0 holds until the first
    update of its row.
    """

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Updates the rows that have a gradient."""
        (weight,) = self.param_groups[0]["params"]
        state = self.state[weight]
        if not state:
            state["z"], state["n"] = torch.zeros_like(weight), torch.zeros_like(weight)
        gradient = weight.grad.coalesce()
        for key, g in zip(gradient.indices()[0].tolist(), gradient.values(), strict=True):
            z, n, w = state["z"][key], state["n"][key], weight[key]
            sigma = ((n + g**2).sqrt() - n.sqrt()) / FOLLOWED.alpha
            z += g - sigma * w
            n += g**2
            shrunk = torch.sign(z) * (z.abs() - FOLLOWED.l1).clamp(min=0)
            w.copy_(-shrunk / ((FOLLOWED.beta + n.sqrt()) / FOLLOWED.alpha + FOLLOWED.l2))


FOLLOWED = FTRL(alpha=0.1, beta=0.5, l1=0.02, l2=0.1)

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, tuple[Make, Make]] = {
    "SGD": (lambda p: torch.optim.SGD(p, 0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, 0.1), lambda p: torch.optim.Adagrad(p, 0.1)),
    "Adam": (lambda p: torch.optim.Adam(p, 0.01), lambda p: torch.optim.SparseAdam(p, 0.01)),
    "FTRL": (lambda p: torch.optim.SGD(p, 0.1), WrittenOutFTRL),
}
"""By name: the optimizer of the model, and torch's for the embedding."""


class Net(nn.Module):
    def __init__(self, bag: nn.Module) -> None:
        super().__init__()
        self.bag = bag
        self.top = nn.Linear(WIDTH, 1)
        with torch.no_grad():
            self.top.weight.fill_(0.3)
            self.top.bias.zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(self.bag(ids))
        return out


def make(
    optimizer: str, run_dir: Path | None = None, *, ahead: bool = False, **options: Any
) -> Session:
    ids = (lambda batch: batch[0]) if ahead else None
    own = FOLLOWED if optimizer == "FTRL" else None
    net = Net(trireme.EmbeddingBag(KEYS, WIDTH, mode="sum", ids=ids, optimizer=own))
    build = OPTIMIZERS[optimizer][0]
    return trireme.Session(
        net, nn.functional.mse_loss, build(net.parameters()), run_dir=run_dir, **options
    )


def train(session: Session, batch: int, steps: int) -> list[torch.Tensor]:
    """Trains; returns the rows of all keys, and the dense parameters."""
    for data in session.loader(DATA, batch, shuffle=False):
        session.step(data)
        if session.global_step >= steps:
            break
    return state_of(session)


def state_of(session: Session) -> list[torch.Tensor]:
    bag = session.model.bag
    assert isinstance(bag, trireme.EmbeddingBag)
    with torch.no_grad():
        rows = bag(torch.arange(KEYS).reshape(-1, 1))
    return [rows, *(p.detach().clone() for p in session.model.top.parameters())]  # type: ignore[union-attr]


def first_rows() -> torch.Tensor:
    with make("SGD") as session:
        return state_of(session)[0]


def plain(optimizer: str, steps: int) -> list[torch.Tensor]:
    bag = nn.EmbeddingBag(KEYS, WIDTH, mode="sum", sparse=optimizer in ("Adam", "FTRL"))
    with torch.no_grad():
        bag.weight.copy_(first_rows())
    net = Net(bag)
    dense, sparse = OPTIMIZERS[optimizer]
    each = [dense(net.top.parameters()), sparse(bag.parameters())]
    for step in range(steps):
        places = torch.arange(step * BATCH, (step + 1) * BATCH) % EXAMPLES
        nn.functional.mse_loss(net(IDS[places]), TARGETS[places]).backward()
        for one in each:
            one.step()
            one.zero_grad()
    return [bag.weight.detach(), *(p.detach() for p in net.top.parameters())]


STEPS = 80


@cache
def expected(optimizer: str) -> list[torch.Tensor]:
    """What plain torch comes to after `STEPS` steps."""
    return plain(optimizer, STEPS)


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("cluster", "optimizer", "ahead"),
    [
        (Cluster(servers=0), "Adam", True),
        (Cluster(servers=0), "SGD", False),
        (Cluster(workers=1), "FTRL", True),
        (Cluster(workers=1), "Adagrad", False),
        (Cluster(workers=1, servers=2), "SGD", True),
        (Cluster(workers=1, servers=2), "Adam", False),
        (Cluster(workers=2, servers=2, strategy="sync"), "Adagrad", True),
        (Cluster(workers=2, servers=2, strategy="sync"), "FTRL", False),
    ],
    ids=str,
)
def test_tables_train_as_torch_s_embedding(cluster: Cluster, optimizer: str, ahead: bool) -> None:
    ran = run_job(
        cluster,
        lambda _: make(optimizer, max_steps=STEPS, ahead=ahead),
        lambda session: train(session, BATCH // cluster.workers, STEPS),
    )
    for found in ran.values:
        for one, other in zip(found, expected(optimizer), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_resumed_tables_are_bit_equal_under_another_number_of_servers(
    strategy: str, tmp_path: Path
) -> None:
    def ran(run_dir: Path, steps: int, servers: int) -> list[torch.Tensor]:
        cluster = Cluster(workers=1, servers=servers, strategy=strategy)
        return run_job(
            cluster,
            lambda _: make("Adam", run_dir, max_steps=steps),
            lambda session: train(session, BATCH, steps),
        ).values[0]

    whole = ran(tmp_path / "whole", 20, 2)
    ran(tmp_path / "parts", 7, 3)
    ran(tmp_path / "parts", 12, 1)
    with make("Adam", tmp_path / "parts", max_steps=15) as session:  # in one process
        train(session, BATCH, 15)
    for one, other in zip(ran(tmp_path / "parts", 20, 2), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    parts, once = (
        trireme.session.checkpoint.load(
            trireme.session.checkpoint.list_checkpoints(tmp_path / name)[-1]
        )
        for name in ("parts", "whole")
    )
    assert parts.tables.keys() == once.tables.keys()
    assert torch.equal(parts.tables["bag/keys"], once.tables["bag/keys"])
    assert torch.equal(parts.tables["bag/touches"], once.tables["bag/touches"])


class Shared(nn.Module):
    """Two modules that share a table, one of which is used twice."""

    def __init__(self, embedding: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.left, self.right = embedding(), embedding()
        self.top = nn.Linear(WIDTH, 1)
        with torch.no_grad():
            self.top.weight.fill_(0.3)
            self.top.bias.zero_()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.left(ids[:, 0]) * self.right(ids[:, 1]) + self.left(ids[:, 2])
        out: torch.Tensor = self.top(found)
        return out


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.05}, {"accumulate": 4}], ids=str)
@pytest.mark.parametrize(
    "cluster", [Cluster(servers=0), Cluster(workers=2, servers=2, strategy="sync")], ids=str
)
def test_modules_that_share_a_table(cluster: Cluster, options: dict[str, Any]) -> None:
    def made(_: int) -> Session:
        net = Shared(lambda: trireme.Embedding(KEYS, WIDTH, padding_idx=3, table="bag"))
        sgd = torch.optim.SGD(net.parameters(), 0.1)
        return trireme.Session(net, nn.functional.mse_loss, sgd, max_steps=30, **options)

    def program(session: Session) -> list[torch.Tensor]:
        for data in session.loader(DATA, BATCH // cluster.workers, shuffle=False):
            session.step(data)
        with torch.no_grad():
            rows = session.model.left(torch.arange(KEYS))  # type: ignore[operator]
        return [rows, *(p.detach().clone() for p in session.model.top.parameters())]  # type: ignore[union-attr]

    weight = first_rows()
    weight[3] = 0
    table = nn.Embedding(KEYS, WIDTH, padding_idx=3)
    with torch.no_grad():
        table.weight.copy_(weight)
    net = Shared(lambda: table)
    sgd = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(30):
        places = torch.arange(step * BATCH, (step + 1) * BATCH) % EXAMPLES
        nn.functional.mse_loss(net(IDS[places]), TARGETS[places]).backward()
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(net.parameters(), options["clip_norm"])
        sgd.step()
        sgd.zero_grad()
    expected = [table.weight.detach(), *(p.detach() for p in net.top.parameters())]
    for found in run_job(cluster, made, program).values:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_compiled_model_trains_the_same() -> None:
    found = []
    for compiles in (False, True):
        net = Net(trireme.EmbeddingBag(KEYS, WIDTH, mode="sum", initializer=Normal(seed=1)))
        model: nn.Module = torch.compile(net, backend="eager") if compiles else net
        session = trireme.Session(model, nn.functional.mse_loss, SGD(model), max_steps=5)
        with session:
            found.append([session.step(batch).loss for batch in session.loader(DATA, BATCH)])
    assert found[0] == found[1]
    assert len(found[0]) == 5


def test_what_tables_cannot_do_is_said() -> None:
    module = trireme.Embedding(KEYS, WIDTH)
    with pytest.raises(ConfigurationError, match="has no table: a"):
        module(torch.tensor([1]))
    with make("SGD") as session, pytest.raises(ConfigurationError, match="the id 50: ids run from"):
        session.model(torch.tensor([[50]]))
    with pytest.raises(ConfigurationError, match="open inside the session only"):
        session.model(torch.tensor([[1]]))
    with pytest.raises(ConfigurationError, match="under ema are not built yet"):
        make("SGD", ema=0.9).__enter__()
    for wrong in ({"embedding_dim": 0}, {"embedding_dim": 3, "ids": "x"}):
        with pytest.raises(ConfigurationError, match="give a"):
            trireme.Embedding(KEYS, **wrong)
    for wrong_ids in (None, IDS.float()):
        foretold = trireme.EmbeddingBag(KEYS, WIDTH, ids=lambda _, ids=wrong_ids: ids)
        net = Net(foretold)
        session = trireme.Session(net, nn.functional.mse_loss, SGD(net))
        with pytest.raises(ConfigurationError, match="ids= of EmbeddingBag returns"), session:
            train(session, BATCH, 2)
    alone = trireme.Embedding(KEYS, 1)
    with pytest.raises(ConfigurationError, match="no parameter besides"):
        trireme.Session(alone, nn.functional.mse_loss, SGD).__enter__()
    net = Net(trireme.EmbeddingBag(KEYS, WIDTH))
    momentum = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    with pytest.raises(ConfigurationError, match="SGD as it is set up has no row-wise form"):
        trireme.Session(net, nn.functional.mse_loss, momentum).__enter__()
    net.second = trireme.Embedding(KEYS, WIDTH + 1, table="bag")
    with pytest.raises(ConfigurationError, match="two modules share the table 'bag' and differ"):
        trireme.Session(net, nn.functional.mse_loss, SGD(net)).__enter__()


def SGD(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), 0.1)


def test_models_whose_tables_differ_are_told() -> None:
    def made(index: int) -> Session:
        net = Net(trireme.EmbeddingBag(KEYS, WIDTH + index, table="bag"))
        net.top = nn.Linear(WIDTH, 1)
        return trireme.Session(net, nn.functional.mse_loss, SGD(net), max_steps=3)

    with pytest.raises(trireme.ModelMismatchError, match=r"the tables differ: .*bag"):
        _ = run_job(Cluster(workers=2, servers=2), made, lambda session: None).values


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_rows_of_the_next_batch_come_with_the_answer(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled: list[int] = []
    pull = Worker._pull_extra

    def counting(worker: Worker, wanted: Any) -> Any:
        pulled.append(1)
        return pull(worker, wanted)

    monkeypatch.setattr(Worker, "_pull_extra", counting)
    steps = 40
    rows = DataLoader(DATA, BATCH, collate_fn=default_collate)  # made by torch, not gathered

    def program(session: Session) -> int:
        for data in session.loader(rows if strategy == "async" else DATA, *sizes):
            session.step(data)
        return session.global_step

    sizes = () if strategy == "async" else (BATCH,)
    ran = run_job(
        Cluster(workers=2, servers=2, strategy=strategy),
        lambda _: make("Adam", max_steps=steps, ahead=True),
        program,
    )
    assert ran.values == [steps, steps]
    assert len(pulled) <= 2, "only the rows of each worker's first batch are pulled"


@pytest.mark.parametrize(
    "ids",
    [
        lambda batch: batch[0],
        lambda batch: torch.cat([batch[0].flatten(), torch.arange(5)]),
        lambda batch: batch[0] + 1,
    ],
    ids=["the same", "more", "others"],
)
def test_the_rows_are_those_that_are_looked_up_whatever_was_told(
    ids: Callable[[Any], torch.Tensor],
) -> None:
    def made(foretold: Callable[[Any], torch.Tensor] | None) -> Session:
        bag = trireme.EmbeddingBag(
            KEYS, WIDTH, mode="sum", ids=foretold, initializer=Normal(seed=1), padding_idx=3
        )
        net = Net(bag)
        return trireme.Session(net, nn.functional.mse_loss, SGD(net), max_steps=20)

    def program(session: Session) -> list[float]:
        losses = []
        for batch in session.loader(DATA, BATCH, shuffle=False):
            batch.data[0].add_(batch.epoch).remainder_(KEYS)  # after the ids were told
            losses.append(session.step(batch).loss)
        return losses

    found = [
        run_job(Cluster(workers=1, servers=2), lambda _, told=told: made(told), program).values
        for told in (None, ids)
    ]
    assert found[0] == found[1]
    assert len(found[0][0]) == 20
