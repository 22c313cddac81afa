"""The sampler's kernel: Metropolis-Hastings within Gibbs, with the two proposals of LightLDA.

Yuan et al.: LightLDA: Big Topic Models on Modest Computer Clusters, WWW 2015, section 4.

The innermost loop is one function without views of rows: numba counts references to each array that
is passed on, which takes longer than the arithmetic here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trireme.tables.compiled import compiled

from .counts import Counts
from .proposals import Floats
from .random_numbers import State, uniform


@compiled
def sample(
    offsets: npt.NDArray[np.int64],
    words: npt.NDArray[np.int32],
    assignments: npt.NDArray[np.int32],
    before: npt.NDArray[np.int32],
    rows: Counts,
    totals: npt.NDArray[np.int64],
    stale: Counts,
    inverse: Floats,
    starts: npt.NDArray[np.int64],
    topics: npt.NDArray[np.int32],
    others: npt.NDArray[np.int32],
    limits: npt.NDArray[np.float32],
    masses: Floats,
    alpha: float,
    beta: float,
    vocabulary: int,
    steps: int,
    state: State,
) -> int:
    """Samples the topic of each token of some documents anew, one after the other.

    For each token the full conditional of collapsed Gibbs sampling (Griffiths and Steyvers, PNAS
    2004) is the target. Each step proposes a topic from the alias tables of the word and one from
    the document, and accepts or rejects each. Every step leaves the posterior of all assignments
    unchanged, whatever fixed counts the tables were built from.

    A token is not in the tables that propose its topic: those that drew from its own last topic
    would keep it there, above all for words that are rare. LightLDA has it in them; without, the
    perplexity after fifty sweeps is that of some hundred sweeps with it.

    Args:
        offsets: of the documents, in `words` and `assignments`.
        words: the row of each token.
        assignments: the topic of each token, which is changed.
        before: the topic of each token in the counts that the tables were built from.
        rows: the counts of the words, which are changed.
        totals: the number of tokens of each topic, which is changed.
        stale: as the fields of `Proposals`, and so on to `masses`.
        inverse: 1 / (n_k + V beta) of the stale counts.
        starts: where the tables begin.
        topics: their entries.
        others: likewise.
        limits: likewise.
        masses: the sums of the tables.
        alpha: the concentration of the prior of documents' topics.
        beta: that of topics' words.
        vocabulary: the number of words, V.
        steps: how often each of the two proposals is made for a token.
        state: of the random numbers.

    Returns:
        The number of proposals of another topic that were accepted.
    """
    count = rows.shape[1]
    shared = len(masses) - 1
    beta_sum = beta * vocabulary
    within = np.zeros(count, np.int32)  # the document's tokens by topic
    accepted = 0
    for document in range(len(offsets) - 1):
        start, stop = offsets[document], offsets[document + 1]
        length = stop - start
        for token in range(start, stop):
            within[assignments[token]] += 1
        for token in range(start, stop):
            word, topic, own = words[token], assignments[token], before[token]
            within[topic] -= 1
            rows[word, topic] -= 1
            totals[topic] -= 1
            for _ in range(steps):
                # From the tables of the word, as if the token itself were not in them.
                while True:
                    place = uniform(state) * (masses[word] + masses[shared])
                    table, share = word, place / masses[word]
                    if place >= masses[word]:
                        table, share = shared, (place - masses[word]) / masses[shared]
                    new = _draw(starts[table], starts[table + 1], share, topics, others, limits)
                    if table == shared or new != own or uniform(state) * stale[word, own] >= 1.0:
                        break
                if new != topic:
                    to = (
                        (within[new] + alpha)
                        * (rows[word, new] + beta)
                        * (totals[topic] + beta_sum)
                    )
                    to *= (stale[word, topic] - (topic == own) + beta) * inverse[topic]
                    back = (
                        (within[topic] + alpha)
                        * (rows[word, topic] + beta)
                        * (totals[new] + beta_sum)
                    )
                    back *= (stale[word, new] - (new == own) + beta) * inverse[new]
                    if uniform(state) * back < to:
                        topic = new
                        accepted += 1
                # From the document: the topic of one of its tokens, or, for the prior, any topic.
                place = uniform(state) * (length + count * alpha)
                if place < length:
                    other = start + min(int(place), length - 1)
                    new = topic if other == token else assignments[other]
                else:
                    new = min(int((place - length) / alpha), count - 1)
                if new != topic:  # what depends on the document cancels in the ratio
                    to = (rows[word, new] + beta) * (totals[topic] + beta_sum)
                    back = (rows[word, topic] + beta) * (totals[new] + beta_sum)
                    if uniform(state) * back < to:
                        topic = new
                        accepted += 1
            assignments[token] = topic
            within[topic] += 1
            rows[word, topic] += 1
            totals[topic] += 1
        for token in range(start, stop):
            within[assignments[token]] = 0
    return accepted


@compiled
def _draw(
    start: int,
    stop: int,
    share: float,
    topics: npt.NDArray[np.int32],
    others: npt.NDArray[np.int32],
    limits: npt.NDArray[np.float32],
) -> int:
    """Returns a topic of the alias table [start, stop), by a uniform number in [0, 1)."""
    place = share * (stop - start)
    entry = min(int(place), stop - start - 1)
    own = place - entry < limits[start + entry]
    return int(topics[start + entry] if own else others[start + entry])
