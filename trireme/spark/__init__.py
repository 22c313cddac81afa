"""Training on a Spark cluster, from a Spark program."""

from trireme.spark.function import launch
from trireme.spark.rows import Rows

__all__ = ["Rows", "launch"]
