"""Finds batches with labels that do not count, which are weighed by their examples."""

from __future__ import annotations

from typing import Any

from trireme.session.model.batch import counted_labels, inputs_and_targets
from trireme.session.model.computation import Computation
from trireme.session.worker.observer import Observer


class UncountedLabels(Observer):
    """Warns, once, where labels among the chief's first batches are left out of the mean."""

    _looks = 16  # of the chief's first batches

    def before_gradient(self, computation: Computation, batch: Any) -> None:
        if not self._looks or not self.worker.lifecycle.is_chief:  # all run the same program
            return
        self._looks -= 1
        if computation.weighs_examples:
            _, targets = inputs_and_targets(batch)
            counted = counted_labels(computation.model, targets)
            if counted is not None and counted < targets.numel():
                self._looks = 0
                self.worker.warn_as_chief(
                    "targets are -100, which losses of PyTorch leave out of their mean, and each "
                    "batch counts by its examples. Give the number of labels that count, such as "
                    "weight=lambda batch, outputs: (batch[1] != -100).sum()"
                )
