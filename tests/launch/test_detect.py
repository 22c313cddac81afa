from __future__ import annotations

import pytest

from trireme.errors import ConfigurationError
from trireme.launch.detect import TASK_VARIABLE, TaskConfig, detect, encode_task


def test_alone_it_is_a_job_of_its_own() -> None:
    first, second = detect({}), detect({})
    assert (first.name, first.workers, first.servers, first.coordinator) == ("worker:0", 1, 0, "")
    assert first.job != second.job


def test_reads_what_a_launcher_wrote() -> None:
    config = TaskConfig(
        job="j", role="ps", index=3, workers=2, servers=4, secret="ab", origins={"ps": "default"}
    )
    assert detect({TASK_VARIABLE: encode_task(config)}) == config


@pytest.mark.parametrize("value", ["", "{}", "[]", '{"job": "j", "wurkers": 2}', '{"job": 1}'])
def test_refuses_what_no_launcher_wrote(value: str) -> None:
    with pytest.raises(ConfigurationError, match=TASK_VARIABLE):
        detect({TASK_VARIABLE: value})


def test_does_not_show_the_secret() -> None:
    text = repr(TaskConfig(job="j", secret="abcdef"))
    assert "abcdef" not in text
    assert "job='j'" in text


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4"}, "torchrun"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "srun"),
    ],
)
def test_does_not_train_apart_unnoticed(environ: dict[str, str], launcher: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{launcher} started 4 processes"):
        detect(environ)
    alone = {name: "1" for name in environ}
    assert detect(alone).workers == 1
