"""The observers that warn, as their entry points declare them."""

from __future__ import annotations

from trireme.session.worker.observer import ObserverType

LOST_UPDATES = ObserverType("trireme.advice.lost_updates:LostUpdates")
LABELS = ObserverType("trireme.advice.programs:UncountedLabels")
SCHEDULES = ObserverType("trireme.advice.programs:PassedSchedules")
OTHER_OPTIMIZERS = ObserverType("trireme.advice.programs:OtherOptimizers")
SERVED_OPTIMIZER = ObserverType("trireme.advice.served_optimizer:ServedOptimizer")
