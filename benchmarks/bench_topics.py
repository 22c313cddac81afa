"""(s) Topic models: held-out perplexity, planted topics recovered, and tokens a second.

Latent Dirichlet allocation of one corpus with the same topics and priors, by Trireme in one process
and on a server with two workers, gensim, scikit-learn and tomotopy. One evaluator for all:
`lda.perplexity`, document completion.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from lda import documents, perplexity
from lda.documents import Documents
from lda.initial_topics import INITIAL_SWEEPS
from lda.planted import planted_topics, recovered

from benchmarks.context import Context
from benchmarks.machine import ROOT
from benchmarks.pairs import Interleaved, Sample
from benchmarks.processes import environment
from benchmarks.programs.topic_files import Corpus, Learned
from benchmarks.results import Goal, Kind, Result

ONE, TWO = "Trireme, one process", "Trireme, ssp, two workers"
GENSIM, LEARN = "gensim, LdaModel", "scikit-learn, LatentDirichletAllocation"
TOMOTOPY, TOMOTOPY_2 = "tomotopy, LDAModel", "tomotopy, two threads"
ALL = "all that were planted"

PERPLEXITY, SPEED = "held-out perplexity", "million tokens/s"
PLANTED = "share of planted topics recovered"

SECONDS = 300.0
"""How long one program may take."""


@dataclass(frozen=True)
class Model:
    """The options that all programs have in common: the number of topics, alpha and beta."""

    topics: int
    alpha: float
    beta: float


TEXT = Model(50, 0.1, 0.1)
SMALL = Model(20, 0.05, 0.05)


@dataclass(frozen=True)
class Learner:
    """A program that learns topics.

    Attributes:
        name: the name that the results show.
        kind: of its results.
        command: how it is started; `topic_files.arguments` has its arguments.
        text: sweeps and seeds of Python's text; no seeds where it is not measured there.
        planted: of planted topics.
    """

    name: str
    kind: Kind
    command: tuple[str, ...]
    text: tuple[int, int]
    planted: tuple[int, int]

    def learn(
        self, context: Context, train: Documents, model: Model, sweeps: int, seed: int
    ) -> Learned:
        """Learns the topics of a corpus.

        Raises:
            RuntimeError: the program failed.
            subprocess.TimeoutExpired: it took too long.
        """
        corpus, learned = context.scratch / "corpus.npz", context.scratch / "learned.npz"
        Corpus(train.offsets, train.words, len(train.vocabulary)).write(corpus)
        learned.unlink(missing_ok=True)
        options = {**vars(model), "sweeps": sweeps, "seed": seed}
        words = [f"--{name}={value}" for name, value in options.items()]
        done = subprocess.run(
            [*self.command, str(corpus), str(learned), *words],
            cwd=context.scratch,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if done.returncode or not learned.exists():
            raise RuntimeError(done.stderr[-500:] or done.stdout[-500:])
        return Learned.read(learned)


def learners(context: Context) -> list[Learner]:
    """Returns all that are installed."""
    programs, python = ROOT / "benchmarks" / "programs", sys.executable
    ours = str(programs / "trireme_topics.py")
    job = ("-m", "trireme", "run", "--ps", "1", "--workers", "2", "--strategy", "ssp")
    found = [
        Learner(ONE, "trireme", (python, ours), (150, 8), (100, 10)),
        Learner(TWO, "trireme", (python, *job, ours), (150, 8), (100, 10)),
        Learner(LEARN, "peer", (python, str(programs / "sklearn_topics.py")), (50, 2), (50, 1)),
    ]
    peers = {name: context.peers.python(name) for name in ("gensim", "tomotopy")}
    if (gensim := peers["gensim"]) is not None:
        program = (str(gensim), str(programs / "gensim_topics.py"))
        found.append(Learner(GENSIM, "peer", program, (50, 2), (50, 1)))
    if (tomotopy := peers["tomotopy"]) is not None:
        program = (str(tomotopy), str(programs / "tomotopy_topics.py"))
        found.append(Learner(TOMOTOPY, "peer", program, (150, 4), (200, 2)))
        found.append(Learner(TOMOTOPY_2, "peer", (*program, "--threads=2"), (150, 4), (0, 0)))
    return found


def run(context: Context) -> Result:
    """Learns the topics of Python's text, and planted ones, with several seeds."""
    result = Result(
        name="topics",
        title="Latent Dirichlet allocation: Trireme, gensim, scikit-learn and tomotopy",
        unit="as the condition says",
        higher_is_better=None,
        references=(ONE,),
        goals=_goals(),
    )
    found = learners(context)
    kinds: dict[str, Kind] = {ALL: "limit", **{each.name: each.kind for each in found}}
    reached, speed = _text(context, found)
    result.add(reached, kinds, condition=PERPLEXITY)
    result.add(speed, kinds, condition=SPEED)
    result.add(_planted(context, found), kinds, condition=PLANTED)
    result.skipped += [
        f"{name}: no environment (`make bench-peers`)"
        for name in ("gensim", "tomotopy")
        if context.peers.python(name) is None
    ]
    result.notes += _notes(found, reached)
    return result


def _goals() -> list[Goal]:
    """Returns what the issue asks for; tokens/s are shown beside tomotopy's without a bound."""
    goals = [
        Goal(f"perplexity, {ours}: of {peer}", PERPLEXITY, ours, peer, at_most=1.02, by="means")
        for ours in (ONE, TWO)
        for peer in (GENSIM, LEARN)
    ]
    goals.append(Goal(f"perplexity, {TWO}: of one", PERPLEXITY, TWO, ONE, 0.99, 1.01, by="means"))
    goals += [
        Goal(f"planted topics, {ours}: every seed", PLANTED, ours, ALL, at_least=0.95, by="least")
        for ours in (ONE, TWO)
    ]
    return [
        *goals,
        Goal(f"tokens/s, {ONE}: of tomotopy", SPEED, ONE, TOMOTOPY, at_least=1),
        Goal(f"tokens/s, {TWO}: of tomotopy, two threads", SPEED, TWO, TOMOTOPY_2, at_least=1),
    ]


def _notes(found: list[Learner], reached: Interleaved) -> list[str]:
    """Returns the notes below the results."""
    means = [
        f"{name} {statistics.fmean(reached.values(name)):.1f} ({len(samples)})"
        for name, samples in reached.samples.items()
    ]
    passes = [f"{each.name} {each.text[0]} and {each.planted[0]}" for each in found]
    return [
        f"{PERPLEXITY}: the English text that ships with Python, every tenth document held out; "
        f"{TEXT.topics} topics, alpha {TEXT.alpha}, beta {TEXT.beta}. Half of a held-out document "
        f"is given and the other half predicted, by one evaluator for all. Means, and seeds: "
        f"{'; '.join(means)}.",
        f"{PLANTED}: {SMALL.topics} in 1000 documents of 80 tokens, another corpus with each seed; "
        "as many are learned. One is recovered where the cosine with a topic of its own is at "
        "least 0.9.",
        f"{SPEED}: tokens times sweeps, by the time of the sweeps alone. The sweeps of a sample "
        f"from which Trireme's first topics come ({INITIAL_SWEEPS}, with half as many topics more, "
        "in each worker) are not in it. In a pass of gensim and scikit-learn each document has "
        "many iterations.",
        f"Sweeps or passes, of the text and of planted topics: {'; '.join(passes)}.",
        "Goals: ratios of perplexity are of the means over seeds, of planted topics the least of "
        "all seeds.",
    ]


def _text(context: Context, found: list[Learner]) -> list[Interleaved]:
    """Returns the perplexity and the speed on Python's text, seed by seed."""
    train, held_out = documents.hold_out(documents.of_python())

    def measure(learner: Learner, seed: int) -> tuple[float, float]:
        sweeps = 5 if context.quick else learner.text[0]
        learned = learner.learn(context, train, TEXT, sweeps, seed)
        reached = perplexity(learned.topics, held_out, alpha=TEXT.alpha)
        speed = len(train.words) * sweeps / learned.seconds / 1e6
        context.say(f"  seed {seed}, {learner.name}: {reached:.1f}, {speed:.2f} million tokens/s")
        return reached, speed

    return _in_turns(context, {each: each.text[1] for each in found}, measure, figures=2)


def _planted(context: Context, found: list[Learner]) -> Interleaved:
    """Returns the share of planted topics that each recovers, seed by seed."""

    def measure(learner: Learner, seed: int) -> tuple[float]:
        planted = planted_topics(
            SMALL.topics, 1000, 1000, length=80, alpha=SMALL.alpha, beta=SMALL.beta, seed=seed
        )
        sweeps = 5 if context.quick else learner.planted[0]
        learned = learner.learn(context, planted.documents, SMALL, sweeps, seed)
        share = recovered(planted.topics, learned.topics)
        context.say(f"  seed {seed}, {learner.name}: {share:.0%} of the planted topics")
        return (share,)

    (shares,) = _in_turns(context, {each: each.planted[1] for each in found}, measure)
    most = max((len(samples) for samples in shares.samples.values()), default=0)
    shares.samples[ALL] = [Sample(1.0)] * most
    return shares


def _in_turns(
    context: Context,
    seeds: dict[Learner, int],
    measure: Callable[[Learner, int], tuple[float, ...]],
    *,
    figures: int = 1,
) -> list[Interleaved]:
    """Measures each program with so many seeds, in turns.

    One that fails is left out from then on, and all its figures with it.
    """
    measured = [Interleaved({each.name: [] for each in seeds}) for _ in range(figures)]
    for seed in range(1 if context.quick else max(seeds.values())):
        for learner, count in seeds.items():
            if seed >= count or learner.name in measured[0].failed:
                continue
            try:
                values = measure(learner, seed)
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                context.say(f"{learner.name} failed: {error}")
                for each in measured:
                    each.failed[learner.name] = f"{type(error).__name__}: {error}"
                    del each.samples[learner.name]
            else:
                for each, value in zip(measured, values, strict=True):
                    each.samples[learner.name].append(Sample(value))
    return measured
