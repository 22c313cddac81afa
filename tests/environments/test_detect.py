from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.errors import ConfigurationError, UsageError
from trireme.launch.config.task_config import TASK_VARIABLE, TaskConfig, encode_task
from trireme.launch.environment import detect
from trireme.strategies import choose


def slurm(rank: int, size: int, nodes: str = "node[01-02]") -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NODELIST": nodes,
    }


def torchrun(rank: int, size: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "run",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def tf(kind: str, index: int, **cluster: list[str]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_under_torchrun_every_process_is_a_worker(tmp_path: Path) -> None:
    task = detect(torchrun(1, 2) | {"TRIREME_RUN_DIR": "r", "OMP_NUM_THREADS": "3"}, tmp_path)
    assert (task.name, task.workers, task.group.size, task.group.rank, task.group.local_rank) == (
        *("worker:1", 2, 2, 1, 1),
    )
    assert (task.group.address, task.group.prefix) == ("localhost:29500", "trireme/1/2")
    assert (task.job, task.config.output.run_dir, task.threads, task.display) == (
        "run",
        "r",
        3,
        "none",
    )
    assert detect(torchrun(0, 2), tmp_path).display == "plain"


def test_one_process_of_torchrun_is_alone_and_has_its_options(tmp_path: Path) -> None:
    task = detect(torchrun(0, 1) | {"TRIREME_RUN_DIR": "r"}, tmp_path)
    assert (task.group.size, task.group.address, task.config.output.run_dir) == (1, "", "r")


def test_the_file_counts_under_other_launchers_too(tmp_path: Path) -> None:
    (tmp_path / "trireme.toml").write_text('mesh = "tp=2"\n')
    assert detect(torchrun(0, 2), tmp_path).config.model.mesh == "tp=2"


def test_who_was_started_last_says_what_this_process_is(tmp_path: Path) -> None:
    cluster = tf("worker", 0, worker=["a:1", "b:1", "c:1"])
    assert detect(slurm(1, 4) | torchrun(0, 2) | cluster, tmp_path).workers == 2
    assert detect(slurm(1, 4) | cluster, tmp_path).workers == 3
    assert detect(slurm(1, 4) | {TASK_VARIABLE: encode_task(TaskConfig(job="j"))}).job == "j"


def test_servers_are_not_for_others_to_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ps is 1 \(environment TRIREME_PS\).*torchrun"):
        detect(torchrun(0, 2) | {"TRIREME_PS": "1"}, tmp_path)
    task = detect(torchrun(0, 2) | {"TRIREME_STRATEGY": "async"}, tmp_path)
    with pytest.raises(UsageError, match=r"async.*server.*\(.*environment TRIREME_STRATEGY\)"):
        choose(task.config, workers=task.workers, servers=task.servers)


def test_workers_of_tf_config_meet_at_the_chief(tmp_path: Path) -> None:
    hosts = {"chief": ["a:1"], "worker": ["b:1", "a:2"]}
    task = detect(tf("worker", 1, **hosts), tmp_path)
    assert (task.name, task.workers, task.group.rank, task.group.local_rank) == (
        "worker:2",
        3,
        2,
        1,
    )
    assert task.group.address == "a:1"
    assert detect(tf("chief", 0, **hosts), tmp_path).group.rank == 0


def test_tf_config_with_servers_is_a_job_by_hand(tmp_path: Path) -> None:
    hosts = {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]}
    environ = {"TRIREME_SECRET": "0123456789abcdef" * 2, "TRIREME_STRATEGY": "sync"}
    task = detect(tf("worker", 0, **hosts) | environ, tmp_path)
    assert (task.name, task.workers, task.servers, task.group.size) == ("worker:1", 2, 1, 1)
    assert (task.coordinator, task.config.training.strategy) == ("tcp://localhost:3", "sync")
    assert detect(tf("ps", 0, **hosts) | environ, tmp_path).name == "ps:0"
    assert not detect(tf("ps", 0, **hosts) | environ, tmp_path).config.network.allow_plaintext
    allowed = environ | {"TRIREME_ALLOW_PLAINTEXT": "yes"}
    assert detect(tf("ps", 0, **hosts) | allowed, tmp_path).config.network.allow_plaintext
    far = {"worker": ["a:2"], "ps": ["b:3"]}
    with pytest.raises(ConfigurationError, match="this one has no certificate"):
        detect(tf("worker", 0, **far), tmp_path)
    with pytest.raises(ConfigurationError, match="no secret was given"):
        detect(tf("worker", 0, **far) | {"TRIREME_ALLOW_PLAINTEXT": "yes"}, tmp_path)


# Whatever is set, there is a task or one error that says what to do -------------------------------

NUMBERS = st.sampled_from(["", "0", "1", "2", "3", "-1", "x", "1.5", "9" * 30, "\u0663", " 1 "])
NODES = st.sampled_from(["", "n1", "n[1-2]", "n[01-03,7],m", "n[", "n[2-1]", ",", "n[1-9999999]"])
CLUSTERS = st.dictionaries(
    st.sampled_from(["worker", "chief", "ps", "evaluator", "gpu"]),
    st.lists(
        st.sampled_from(["localhost:1", "127.0.0.1:2", "a:3", "b", "", "a:99999"]), max_size=3
    ),
)
TF = st.one_of(
    st.sampled_from(["{", "[]", "1", '{"task": 3}', '{"cluster": {"worker": {"1": "a:1"}}}', "{}"]),
    st.builds(
        lambda cluster, kind, index: json.dumps(
            {"cluster": cluster, "task": {"type": kind, "index": index}}
        ),
        CLUSTERS,
        st.sampled_from(["worker", "chief", "ps", "evaluator", "gpu", "", 3]),
        st.sampled_from([0, 1, 5, -1, "1", "x", None]),
    ),
)
VARIABLES = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "PMI_RANK", "PMI_SIZE"), NUMBERS),
    **dict.fromkeys(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), NUMBERS),
    **dict.fromkeys(("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), NUMBERS),
    **dict.fromkeys(("LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_LOCALID"), NUMBERS),
    **dict.fromkeys(("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"), NUMBERS),
    **dict.fromkeys(("SLURM_CPUS_PER_TASK", "SLURM_JOB_ID", "SLURM_STEP_ID"), NUMBERS),
    "SLURM_STEP_TASKS_PER_NODE": st.sampled_from(["2(x3),1", "1", "", "x"]),
    "SLURM_STEP_NODELIST": NODES,
    "SLURM_JOB_NODELIST": NODES,
    "MASTER_ADDR": st.sampled_from(["", "localhost", "::1", "a b", "10.0.0.1"]),
    "MASTER_PORT": st.sampled_from(["", "29500", "0", "x", "70000"]),
    "TORCHELASTIC_USE_AGENT_STORE": st.sampled_from(["True", "False", ""]),
    "TF_CONFIG": TF,
    "TRIREME_MESH": st.sampled_from(["", "tp=2", "tp=x"]),
    "TRIREME_STRATEGY": st.sampled_from(["", "allreduce", "async", "fsdp", "ring"]),
    "TRIREME_PS": NUMBERS,
}


@given(environ=st.fixed_dictionaries({}, optional=VARIABLES))
def test_any_variables_give_a_task_or_one_error(environ: dict[str, str]) -> None:
    environ = environ | {"TRIREME_SECRET": "0123456789abcdef" * 2}
    try:
        task = detect(environ, Path("/nowhere"))
    except UsageError as error:
        assert str(error)
        return
    assert 0 <= task.index < max(task.workers, task.servers)
    assert 0 <= task.group.rank < task.group.size
    assert bool(task.group.address) == (task.group.size > 1)
    if task.group.address:
        host, _, port = task.group.address.rpartition(":")
        assert host
        assert 0 < int(port) < 65536


@given(size=st.integers(1, 9), mpi=st.booleans())
def test_the_processes_of_one_start_are_one_process_group(size: int, mpi: bool) -> None:
    def environ(rank: int) -> dict[str, str]:
        if not mpi:
            return slurm(rank, size)
        return {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}

    tasks = [detect(environ(rank), Path("/nowhere")) for rank in range(size)]
    assert [task.index for task in tasks] == list(range(size))
    assert len({(task.group.address, task.workers, task.group.size) for task in tasks}) == 1
