"""scikit-learn's SGDClassifier on one pass over a file of libsvm; prints the seconds.

    python sgd_classifier.py TRAIN TEST PREDICTIONS BITS RATE

Trireme's reader parses the rows, 100,000 at a time: scikit-learn's own reads a file as a whole.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.linear_model import SGDClassifier
from sparse_data import LibsvmReader, SparseBatch

ROWS = 100_000


def matrix(batch: SparseBatch, bits: int) -> csr_matrix:
    """Returns the rows as scikit-learn takes them."""
    indices = (batch.keys.numpy().astype(np.int32), batch.bounds.numpy().astype(np.int32))
    return csr_matrix(
        (batch.values.numpy().astype(np.float64), *indices), shape=(len(batch.labels), 1 << bits)
    )


def main() -> None:
    train, test, predictions = map(Path, sys.argv[1:4])
    bits, rate = int(sys.argv[4]), float(sys.argv[5])
    model = SGDClassifier(loss="log_loss", alpha=1e-7, learning_rate="constant", eta0=rate)
    next(iter(LibsvmReader(test, ROWS)))  # loads the kernels
    began = time.perf_counter()
    for batch in LibsvmReader(train, ROWS):
        model.partial_fit(matrix(batch, bits), batch.labels.numpy(), classes=[0, 1])
    print(time.perf_counter() - began)
    scores = [model.decision_function(matrix(batch, bits)) for batch in LibsvmReader(test, ROWS)]
    np.savetxt(predictions, np.concatenate(scores))


if __name__ == "__main__":
    main()
