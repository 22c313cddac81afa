"""The engine `spark`, as its entry point declares it, and its options."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from trireme.agents.resources import check_cluster
from trireme.job_config import Option
from trireme.launch.engines import EngineType


class SparkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `--on spark`."""

    # fmt: off
    master: Annotated[str | None, Option("URL",
        "spark: the cluster's master, such as spark://HOST:7077 (default: that of this program's "
        "session, or of Spark's configuration)")] = None
    # fmt: on


_check = partial(check_cluster, of="the Spark cluster")

SPARK = EngineType(
    "the executors of a Spark cluster", "trireme.spark.pool:run_spark", SparkOptions, _check
)
