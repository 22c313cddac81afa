"""Whole jobs under virtual time: real shards, clients and membership, a network that breaks.

    python -m tests.simulation --seeds 0:2000 --mode all

Everything is drawn from a seed, so that what fails once fails always. The objects that decide are
those of a real job; the network, the clock and the processes are simulated. Processes die and come
back, heartbeats stay out, connections break, servers hear of views at different times, copies are
taken in the middle. Servers are killed, stopped and cut off, join and leave, and the coordinator is
started again from its journal. In the modes `links` and `sync-links` pairs of servers are cut from
each other, and loops of servers are stuck; a checker looks from outside whether that is noticed in
time. An invariant checker that shares no code with the shards checks that
every acknowledged update is in the values once, on every server; that copies of a shard are equal;
that nobody has seen values that are lost; that rounds are exact means; that nobody runs too far
ahead, that examples are used once, and that nobody waits for ever.
"""

from tests.simulation.expected_values import Violation
from tests.simulation.makers import Makers
from tests.simulation.runs import simulate
from tests.simulation.schedule import MODES, Schedule, draw

__all__ = ["MODES", "Makers", "Schedule", "Violation", "draw", "simulate"]
