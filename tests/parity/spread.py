"""Models and batches for every way to spread a model, and one plain process to compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from images.networks import CifarNetwork, LeNet5
from language.networks import LSTMLanguageModel, Transformer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate

from tests.parity.plain import Values, values_of
from trireme.models import MLP
from trireme.session.loss import model_loss
from trireme.session.session import Session

STEPS, BATCH = 10, 16
WORDS, TIME = 24, 8


@dataclass(frozen=True)
class Case:
    """A model, what it learns from, and how.

    Attributes:
        build: makes the model.
        inputs: shape of one example's input; whole numbers below `WORDS` where `words`.
        words: whether inputs are tokens.
        classes: how many targets there are.
        own_loss: whether the model computes its loss, from a batch by name.
        optimizer: by which it is trained, where nothing else is said.
        ignored: whether half of the targets are ignored, from the fourth batch on.
        before: called with the trained parameters by name and the step before each step.
    """

    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    words: bool = False
    classes: int = 10
    own_loss: bool = False
    optimizer: str = "sgd"
    ignored: bool = False
    before: Callable[[Mapping[str, nn.Parameter], int], None] = lambda parameters, step: None


def tied_transformer() -> nn.Module:
    """The head's matrix is the embedding's, as in GPT-2."""
    model = Transformer(WORDS, 16, 4, 2, TIME)
    model.head.weight = model.embedding.token.weight
    return model


def bert() -> nn.Module:
    """Two layers of BERT, of random weights, that say to which of ten kinds a sequence belongs."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=32,
            max_position_embeddings=TIME,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=10,
            problem_type="single_label_classification",
        )
    )


def gpt2() -> nn.Module:
    """Two layers of GPT-2, of random weights; its head is tied to its embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=TIME,
            n_embd=16,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
    )


class WithUnused(nn.Module):
    """A layer that has another one which nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(32, 32)
        self.unused = nn.Linear(32, 32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.used(inputs)
        return outputs


class Gated(nn.Module):
    """A branch for examples that ask for it: a batch, or a process's part of it, may have none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 32), nn.Linear(32, 10)
        self.branch = nn.Linear(20, 32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        asks = inputs[:, 0] > 1.4
        if asks.any():
            more = torch.zeros_like(hidden)
            more[asks] = self.branch(inputs[asks])
            hidden = hidden + more
        outputs: torch.Tensor = self.last(torch.tanh(hidden))
        return outputs


def _freeze(parameters: Mapping[str, nn.Parameter], step: int) -> None:
    """Freezes the second layer half way, in whatever process has it."""
    if step == STEPS // 2:
        for name, parameter in parameters.items():
            if name.startswith("2."):
                parameter.requires_grad_(False)


CASES = {
    "MLP": Case(lambda: MLP(20, 32, 24, 10), (20,)),
    "LeNet-5": Case(lambda: LeNet5(1, 12), (1, 12, 12)),
    "LSTM": Case(lambda: LSTMLanguageModel(WORDS, 16, 2), (TIME,), words=True, classes=WORDS),
    "transformer": Case(
        lambda: Transformer(WORDS, 16, 4, 2, TIME), (TIME,), words=True, classes=WORDS
    ),
}

TRANSFORMERS = {
    "BERT": Case(bert, (TIME,), words=True, own_loss=True),
    "GPT-2": Case(gpt2, (TIME,), words=True, classes=WORDS, own_loss=True),
}
"""Models of another library, which have outputs of their own classes and compute their loss."""

TIED = {"tied weights": Case(tied_transformer, (TIME,), words=True, classes=WORDS)}

HAS_TRANSFORMERS = find_spec("transformers") is not None

STATEFUL = {
    "LSTM that goes on": Case(
        lambda: LSTMLanguageModel(WORDS, 16, 2, carry=True), (TIME,), words=True, classes=WORDS
    ),
    "batch normalization": Case(
        lambda: nn.Sequential(
            nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.BatchNorm1d(16)
        ),
        (20,),
    ),
}
"""Models with more to them than parameters."""

ABSENT = {
    "unused": Case(
        lambda: nn.Sequential(
            nn.Linear(20, 32), nn.Tanh(), WithUnused(), nn.Tanh(), nn.Linear(32, 10)
        ),
        (20,),
        optimizer="decay",
    ),
    "frozen": Case(
        lambda: nn.Sequential(
            nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)
        ),
        (20,),
        before=_freeze,
    ),
}
"""Of their parameters, some have no gradient: never, or not any more."""

GATED = {"gated": Case(Gated, (20,), optimizer="decay")}
"""What has a gradient in one process may have none in another."""

CIFAR = {"CIFAR network": Case(lambda: CifarNetwork(8), (3, 8, 8))}

IGNORED = {"ignored targets": Case(lambda: MLP(20, 32, 24, 10), (20,), ignored=True)}
"""The loss is the mean over the examples for the first batches only."""

ALL = CASES | IGNORED | TIED | TRANSFORMERS | STATEFUL | ABSENT | GATED | CIFAR


class ByName(Dataset[dict[str, torch.Tensor]]):
    """Examples as tokenizers give them: dicts of `input_ids` and `labels`."""

    def __init__(self, tokens: torch.Tensor, labels: torch.Tensor) -> None:
        self._tokens, self._labels = tokens, labels

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._labels[index]}


def model_of(case: str) -> nn.Module:
    """The model with its first values, the same in every process."""
    torch.manual_seed(3)
    return ALL[case].build()


def inputs_of(case: str) -> torch.Tensor:
    """The inputs of all examples of a case whose batches are pairs."""
    data = data_of(case)
    assert isinstance(data, TensorDataset)
    return data.tensors[0]


def data_of(case: str) -> Dataset[Any]:
    """Random examples, enough for all steps."""
    generator = torch.Generator().manual_seed(4)
    shape = (STEPS * BATCH, *ALL[case].inputs)
    if ALL[case].words:
        tokens = torch.randint(WORDS, shape, generator=generator)
        if ALL[case].own_loss:
            of_sequence = ALL[case].classes != WORDS
            return ByName(tokens, tokens.sum(1) % 10 if of_sequence else tokens)
        return TensorDataset(tokens, (tokens + 1) % WORDS)
    inputs = torch.randn(shape, generator=generator)
    targets = inputs.flatten(1)[:, :10].argmax(1)
    if ALL[case].ignored:
        targets.view(STEPS, BATCH)[3:, : BATCH // 2] = -100
    return TensorDataset(inputs, targets)


def batches_of(case: str, steps: int = STEPS) -> Iterator[Any]:
    """The batches of one plain process, in order."""
    data = data_of(case)
    for step in range(steps):
        start = step % STEPS * BATCH
        yield default_collate([data[index] for index in range(start, start + BATCH)])


def plain_loss(case: str, model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss as a program without Trireme computes it."""
    if ALL[case].own_loss:
        return model(**batch).loss
    inputs, targets = batch
    return loss_of(model(inputs), targets)


def loss_for(case: str) -> Callable[[Any, Any], torch.Tensor]:
    """What a session is given."""
    return model_loss if ALL[case].own_loss else loss_of


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, also of sequences."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adam, fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.003, weight_decay=0.3),
    "decay": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1),
}


def train_plain(
    case: str, optimizer: str = "", clip_norm: float | None = None, steps: int = STEPS
) -> Values:
    """Trains one plain PyTorch process."""
    model = model_of(case)
    made = OPTIMIZERS[optimizer or ALL[case].optimizer](model.parameters())
    for step, batch in enumerate(batches_of(case, steps)):
        ALL[case].before(dict(model.named_parameters()), step)
        made.zero_grad()
        plain_loss(case, model, batch).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        made.step()
    return {n: t.clone() for n, t in model.state_dict().items() if t.is_floating_point()}


def train_averaged(case: str, decay: float) -> Values:
    """Trains one plain process; returns the moving average of its values."""
    model = model_of(case)
    made = OPTIMIZERS["sgd"](model.parameters())
    average = values_of(model)
    for batch in batches_of(case):
        made.zero_grad()
        plain_loss(case, model, batch).backward()
        made.step()
        now = values_of(model)
        average = {name: decay * average[name] + (1 - decay) * now[name] for name in average}
    return average


def train_spread(
    case: str,
    replicas: int,
    optimizer: str = "",
    options: dict[str, Any] | None = None,
    which: str = "values",
) -> dict[str, Any]:
    """Trains as the launch says, and returns the whole model at the end, as NumPy arrays.

    Args:
        case: which.
        replicas: how many batches make a step.
        optimizer: by name; the case's own where it is empty.
        options: of the session.
        which: `values` or `average`.
    """
    torch.use_deterministic_algorithms(True)
    session = Session(
        model_of(case),
        loss_for(case),
        OPTIMIZERS[optimizer or ALL[case].optimizer],
        **{"max_steps": STEPS, **(options or {})},
    )
    with session:
        for batch in session.loader(data_of(case), BATCH // replicas, shuffle=False):
            ALL[case].before(session.parameters, session.global_step)
            session.step(batch)
        average = dict(session.worker.backend.snapshot(state=False).average)
    values = {n: t for n, t in session.model.state_dict().items() if t.is_floating_point()}
    return {n: t.numpy() for n, t in (average if which == "average" else values).items()}


def train_frozen(run_dir: str, steps: int, start: int = 0) -> dict[str, Any]:
    """Trains with an optimizer over all parameters, some of them frozen, and saves at the end."""
    model = model_of("frozen")
    _freeze({n: p for n, p in model.named_parameters() if n == "2.weight"}, STEPS // 2)
    session = Session(model, loss_of, OPTIMIZERS["adamw"], max_steps=steps, run_dir=run_dir)
    with session:
        assert session.global_step == start
        for batch in session.loader(data_of("frozen"), BATCH // 2, shuffle=False):
            session.step(batch)
    return {name: value.numpy() for name, value in values_of(session.model).items()}


def _frozen_in_between(model: nn.Module, step: int) -> None:
    """Freezes the first parameter for some of the steps, as a program does with its own model."""
    next(model.parameters()).requires_grad_(not STEPS // 3 <= step < STEPS - 3)


def train_plain_frozen_in_between() -> Values:
    """Trains one plain process, whose first parameter is frozen in between."""
    model = model_of("MLP")
    made = OPTIMIZERS["decay"](model.parameters())
    for step, batch in enumerate(batches_of("MLP")):
        _frozen_in_between(model, step)
        made.zero_grad()
        plain_loss("MLP", model, batch).backward()
        made.step()
    return values_of(model)


def train_frozen_in_between(replicas: int) -> dict[str, Any]:
    """As that, in a session, which computes with other tensors where the model is cut."""
    session = Session(model_of("MLP"), loss_of, OPTIMIZERS["decay"], max_steps=STEPS)
    with session:
        for batch in session.loader(data_of("MLP"), BATCH // replicas, shuffle=False):
            _frozen_in_between(session.model, session.global_step)
            session.step(batch)
    return {name: value.numpy() for name, value in values_of(session.model).items()}


def train_past_the_model(replicas: int) -> None:
    """Computes the loss with the program's own module, past the outputs that it is given."""
    model = model_of("MLP")
    session = Session(
        model,
        lambda outputs, targets: loss_of(model(torch.ones(2, *ALL["MLP"].inputs)), targets[:2]),
        OPTIMIZERS["sgd"],
        max_steps=STEPS,
    )
    with session:
        for batch in session.loader(data_of("MLP"), BATCH // replicas, shuffle=False):
            session.step(batch)


def train_and_look(case: str, replicas: int) -> tuple[dict[str, Any], list[float]]:
    """As `train_spread`; meanwhile the chief alone evaluates now and then. Returns its losses."""
    session = Session(model_of(case), loss_of, OPTIMIZERS["sgd"], max_steps=STEPS)
    losses = []
    with session:
        for batch in session.loader(data_of(case), BATCH // replicas, shuffle=False):
            if session.is_chief and session.global_step % 4 == 0:
                losses.append(session.evaluate(data_of(case))["loss"])
            session.step(batch)
    return {name: value.numpy() for name, value in values_of(session.model).items()}, losses
