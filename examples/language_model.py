"""A language model of words: the classic LSTM, or a small transformer; perplexity each epoch.

    python examples/language_model.py                                       the LSTM, one process
    python examples/language_model.py --model transformer
    trireme run --ps 1 --workers 2 --strategy sync examples/language_model.py

Without `--data-dir` it learns the English in the pages of Python's own help(), in about a minute.
With the files of the Penn Treebank in DIR, and as the "small" model of the classic TensorFlow
tutorial:

    python examples/language_model.py --data-dir DIR --width 200 --length 20 --dropout 0 \
        --epochs 13 --hold 4 --decay 0.5
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from language import text
from language.networks import LSTMLanguageModel, Transformer
from torch.nn import functional as F

import trireme

ROWS = 10
"""How many pieces of a text are evaluated side by side."""


@dataclass(frozen=True)
class Recipe:
    """How a kind of network is trained where the command line does not say."""

    optimizer: type[torch.optim.Optimizer]
    learning_rate: float
    clip_norm: float


RECIPES = {
    # The tutorial's 1 and 5: its loss is the sum over the 20 tokens of a window, ours their mean.
    "lstm": Recipe(torch.optim.SGD, 20.0, 0.25),
    "transformer": Recipe(torch.optim.Adam, 1e-3, 1.0),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(RECIPES), default="lstm")
    parser.add_argument("--data-dir", "--data_dir", metavar="DIR", help="default: Python's help()")
    parser.add_argument("--vocabulary", type=int, default=10_000, metavar="N")
    parser.add_argument("--width", type=int, default=128, metavar="N")
    parser.add_argument("--layers", type=int, default=2, metavar="N")
    parser.add_argument("--heads", type=int, default=4, metavar="N", help="of the transformer")
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--length", type=int, default=32, metavar="N", help="tokens in a window")
    parser.add_argument("--batch-size", "--batch_size", type=int, default=20, metavar="N")
    parser.add_argument("--epochs", type=float, default=12)
    parser.add_argument("--max-steps", "--max_steps", type=int, metavar="N", help="not by epochs")
    parser.add_argument("--learning-rate", "--learning_rate", type=float)
    parser.add_argument("--hold", type=float, default=6, help="epochs at the full learning rate")
    parser.add_argument("--decay", type=float, default=0.6, help="of the rate, each epoch then")
    parser.add_argument("--run-dir", "--run_dir", metavar="DIR", help="default: keep nothing")
    return parser.parse_args(trireme.program_arguments())


def network(given: argparse.Namespace, vocabulary: int) -> torch.nn.Module:
    if given.model == "lstm":
        return LSTMLanguageModel(vocabulary, given.width, given.layers, given.dropout, carry=True)
    sizes = (given.width, given.heads, given.layers, given.length)
    return Transformer(vocabulary, *sizes, given.dropout)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean over all tokens: windows are equally long, so it is the mean over them too."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def epochs(
    session: trireme.Session, windows: text.TextWindows, given: argparse.Namespace
) -> Iterator[tuple[int, float]]:
    """Trains; at the end of each epoch gives its number and the mean loss of this worker's part.

    The LSTM reads batches in the order of the text, and goes on where the last one ended. In a
    synchronous job each worker has lanes of the text to itself. Asynchronous workers are dealt
    some consecutive batches at a time; the first of them is read from a state of zero.
    """
    recurrent = isinstance(session.model, LSTMLanguageModel)
    dealt = session.loader(windows, given.batch_size, shuffle=not recurrent, epochs=given.epochs)
    losses: list[float] = []
    before, epoch = None, 0
    for batch in dealt:
        span = batch.spans[0]
        if losses and span[0] // len(windows) > epoch:
            yield epoch + 1, statistics.fmean(losses)
            losses.clear()
        epoch = span[0] // len(windows)
        if recurrent and not windows.follows(before, span):
            session.model.reset_state()
        before = span
        losses.append(session.step(batch).loss)
    if losses:
        yield epoch + 1, statistics.fmean(losses)


def report(
    session: trireme.Session, epoch: int, loss: float, held_out: dict[str, text.TextWindows]
) -> None:
    """Prints and records the perplexities.

    A perplexity is no metric of the session: those are means over batches, and the exponential of
    a mean loss is not the mean of the exponentials.
    """
    reached = {"train": math.exp(loss)}
    for name, windows in held_out.items():
        reached[name] = math.exp(session.evaluate(windows, name=name, batch_size=ROWS)["loss"])
    for name, perplexity in reached.items():
        step = session.global_step if name == "train" else session.evaluated_step
        session.log(perplexity=perplexity, run=name, step=step)
    print(f"epoch {epoch}: perplexity", ", ".join(f"{k} {v:.1f}" for k, v in reached.items()))


def main() -> None:
    given = options()
    recipe = RECIPES[given.model]
    corpus = text.load(given.data_dir, vocabulary_size=given.vocabulary)
    session = trireme.Session(
        lambda: network(given, len(corpus.vocabulary)),
        cross_entropy,
        lambda parameters: recipe.optimizer(
            parameters, lr=given.learning_rate or recipe.learning_rate
        ),
        run_dir=given.run_dir,
        max_steps=given.max_steps,
        clip_norm=recipe.clip_norm,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: given.decay ** max(0.0, step // windows.steps + 1 - given.hold)
        ),
    )
    # One batch of each worker side by side: so `steps` of the windows are the global steps of an
    # epoch, and the lanes that a worker reads in a synchronous job stay the same.
    lanes = given.batch_size * session.batches_per_step
    windows = text.TextWindows(corpus.train, given.length, lanes)
    held_out = {
        "validation": text.TextWindows(corpus.validation, given.length, ROWS),
        "test": text.TextWindows(corpus.test, given.length, ROWS),
    }
    with session:
        for epoch, loss in epochs(session, windows, given):
            if session.is_chief:
                report(session, epoch, loss, held_out)


if __name__ == "__main__":
    main()
