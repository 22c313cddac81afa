"""Jobs on a real Spark of three executors, all on this host. Run by `make test-spark`."""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import PACKAGES
from tests.integration.shell import Running, Shell

PYSPARK = pytest.importorskip(
    "pyspark", reason="PySpark is not installed: `make test-spark` runs these"
)
pytestmark = [
    pytest.mark.processes,
    pytest.mark.spark,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("java") is None, reason="SPARK IS NOT TESTED: install Java 17"),
]

SECONDS = 300.0
ROWS = 1_000_000
SESSION = """
import os, sys, time
import torch, trireme, trireme.spark
from pyspark.sql import SparkSession, functions as F

spark = (
    SparkSession.builder.master("local-cluster[3,2,1024]").appName("test")
    .config("spark.executor.memory", "1g").config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1").config("spark.driver.bindAddress", "127.0.0.1")
    .config("spark.python.worker.reuse", "false").getOrCreate()
)
spark.sparkContext.setLogLevel("OFF")
"""
COUNT = (
    SESSION
    + """
ROWS = int(sys.argv[1])

class Counts(torch.nn.Module):
    "Each gradient is 1 for each example of a row, so that values count how often a row came."
    def __init__(self):
        super().__init__()
        self.of = torch.nn.Parameter(torch.zeros(ROWS, dtype=torch.float64))

    def forward(self, batch):
        return self.of[batch["row"]]

def train(rows, batch):
    assert len(rows) == ROWS and rows[7]["x"].dtype == torch.float32
    model = Counts()
    def loss(outputs, batch):
        return -outputs.sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with trireme.Session(model, loss, optimizer) as session:
        for each in session.loader(rows, batch_size=batch, epochs=1):
            session.step((each, each))
            if session.global_step % 10 == 0:
                print("HERE", session.global_step, flush=True)
            time.sleep(float(os.environ.get("PAUSE", "0.05")))
    return model.of.detach().clone()

frame = spark.range(ROWS, numPartitions=7).select(
    F.col("id").alias("row"),
    F.array(F.col("id").cast("float"), F.lit(1.5).cast("float")).alias("x"),
)
options = dict(zip(sys.argv[3::2], map(int, sys.argv[4::2])))
found = trireme.spark.launch(train, frame, args=(int(sys.argv[2]),), run_dir="run", **options)
print("COUNTS", found.min().item(), found.max().item(), found.sum().item(), flush=True)
"""
)


def start(shell: Shell, program: str, *words: object, **environ: str) -> Running:
    (shell.directory / "program.py").write_text(program)
    variables = {
        "PYTHONPATH": PACKAGES,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_DIRS": str(shell.directory / "spark"),
        **environ,
    }
    return shell.start("program.py", *words, environ=variables, command=(sys.executable,))


def executor_of(task: str, run: Path) -> psutil.Process:
    """Returns the executor on which a task of the job in a run directory is."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if task in words and "--task" in words and process.cwd() == str(run.parent):
            return next(each for each in process.parents() if each.name() == "java")
    raise AssertionError(f"no process of {task}")


def test_every_row_of_a_million_is_counted_once_though_an_executor_is_killed(shell: Shell) -> None:
    options = ("ps", 1, "workers", 3, "max_restarts", 3)
    running = start(shell, COUNT, ROWS, 2000, *options)
    running.until(r"worker:2 \| HERE", SECONDS)
    executor_of("worker:2", shell.directory / "run").send_signal(signal.SIGKILL)
    ended = running.ended(SECONDS)
    assert ended.status == 0, ended.text
    assert "worker:2 was lost" in ended.text or "started again" in ended.text
    assert f"COUNTS 1.0 1.0 {float(ROWS)}" in ended.out


FAIL = (
    SESSION
    + """
def fails():
    raise ValueError("of the function")

def large():
    model = torch.nn.Linear(1, 1)
    with trireme.Session(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1)) as s:
        s.step((torch.ones(1, 1), torch.ones(1, 1)))
    return torch.rand(4_000_000)

for each in (fails, large):
    try:
        trireme.spark.launch(each, run_dir=each.__name__)
    except trireme.JobFailed as error:
        print("FAILED", error, flush=True)
"""
)


def test_what_fails_and_what_is_lost_on_its_way_back_is_said(shell: Shell) -> None:
    small = '.config("spark.driver.maxResultSize", "1m")'
    program = FAIL.replace('.appName("test")', f'.appName("test"){small}')
    ended = start(shell, program).ended(SECONDS)
    assert ended.status == 0, ended.text
    assert "ValueError: of the function" in ended.out.partition("FAILED")[2], ended.text
    assert "what worker:0 returned is lost" in ended.out, ended.text
    assert "maxResultSize" in ended.out.partition("is lost")[2], ended.text
