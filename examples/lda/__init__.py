"""Topic models: latent Dirichlet allocation by collapsed Gibbs sampling.

The model is that of Blei, Ng and Jordan (JMLR 2003). A `TopicSampler` assigns a topic to each token
of its documents. The counts of words by topic, which all samplers share, are behind the interface
`TopicCounts`: in memory, or wherever rows of integers can be read and added to::

    counts = LocalCounts(len(documents.vocabulary), topics=100)
    sampler = TopicSampler(documents, topics=100)
    initial = InitialTopics.learned(documents, topics=100)
    sampler.assignments[:] = initial.draw(documents)
    sampler.start(counts)
    for _ in range(50):
        sampler.sweep(counts)
    learned = topic_words(counts.rows(every_word), sampler.beta)
    print(perplexity(learned, held_out, alpha=sampler.alpha))

On parameter servers, with several workers, `SharedTopics` takes the place of both: the counts and
the assignments lie in tables, and agree whatever happens to a worker.

The kernels are compiled by numba: `pip install 'trireme-train[tables]'`.
"""

from .counts import LocalCounts, TopicCounts, topic_words
from .evaluation import complete, halves, perplexity
from .initial_topics import InitialTopics
from .sampler import Sweep, TopicSampler
from .shared_topics import SharedTopics

__all__ = [
    "InitialTopics",
    "LocalCounts",
    "SharedTopics",
    "Sweep",
    "TopicCounts",
    "TopicSampler",
    "complete",
    "halves",
    "perplexity",
    "topic_words",
]
