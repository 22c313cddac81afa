"""Rows of sparse features that stream from disk: libsvm, CSV and Criteo's format.

A reader is an iterable data set of batches. Several files are one data set; it is cut into shards
by byte ranges, and its iterator tells and takes its place by `state_dict` and `load_state_dict`. So
`session.loader` deals its batches to workers and resumes them exactly::

    rows = LibsvmReader(["train.libsvm"], batch_size=1000)
    for batch in session.loader(rows, batch_size=1, collate_fn=SparseBatch.join):
        ...

Arrow parses CSV and Criteo's format; kernels of numba parse libsvm and hash. Both come with
`pip install 'trireme-train[tables,parquet]'`. Kernels are compiled once, in about two seconds a
format; later processes load them.
"""

from .batches import ClickBatch, SparseBatch, log_scale
from .criteo import CriteoReader
from .delimited import CsvReader
from .hashing import feature
from .libsvm import LibsvmReader
from .reader import RowReader

__all__ = [
    "ClickBatch",
    "CriteoReader",
    "CsvReader",
    "LibsvmReader",
    "RowReader",
    "SparseBatch",
    "feature",
    "log_scale",
]
