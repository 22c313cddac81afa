"""Vowpal Wabbit: FTRL-proximal on one pass over a file of its own format; prints the seconds.

    python vowpal_wabbit.py TRAIN TEST PREDICTIONS BITS ALPHA L1

It runs in the peer's environment, and writes the scores of the rows of TEST.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from vowpalwabbit import Workspace


def main() -> None:
    train, test, predictions, bits, alpha, l1 = sys.argv[1:]
    model = f"{predictions}.model"
    learner = f"--loss_function logistic --ftrl --ftrl_alpha {alpha} --ftrl_beta 1 --l1 {l1}"
    began = time.perf_counter()
    learnt = Workspace(
        f"-d {train} -b {bits} {learner} -f {model} --quiet"
    )  # reads all of the file
    learnt.run_parser()
    print(time.perf_counter() - began)
    learnt.finish()
    tested = Workspace(f"-d {test} -i {model} -t -p {predictions} --quiet")
    tested.run_parser()
    tested.finish()
    Path(model).unlink()


if __name__ == "__main__":
    main()
