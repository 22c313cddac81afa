"""Whole jobs under virtual time: real shards, simulated workers, a network that breaks.

    python -m trireme.simulate --seeds 0:2000 --mode all

Everything is drawn from a seed, so that what fails once fails always. A worker here follows the
rules of `trireme.ps.client`; processes die and come back, connections break, servers hear of views
at different times, copies are taken in the middle. A witness that shares no code with the shards
checks that every acknowledged update is in the values once, on every server; that rounds are exact
means; that nobody runs too far ahead, that examples are used once, and that nobody waits for ever.
"""

from trireme.simulate.account import Violation
from trireme.simulate.runs import simulate
from trireme.simulate.schedule import MODES, Schedule, draw
from trireme.simulate.world import Makers

__all__ = ["MODES", "Makers", "Schedule", "Violation", "draw", "simulate"]
