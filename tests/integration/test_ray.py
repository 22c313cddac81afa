"""Jobs on a Ray cluster of two nodes, both on this host. Run by `make test-ray`."""

from __future__ import annotations

import json
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.shell import PROGRAMS, ROOT, Running, Shell

pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.timeout(400)]

TRAIN = (PROGRAMS / "train.py", "--out", "out")
SECONDS = 200.0
NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes."""
    pytest.importorskip("ray", reason="Ray is not installed: `make test-ray` runs these tests")
    from ray.cluster_utils import Cluster

    # Ray's sockets have to have short names, and its directory is not to be another cluster's.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/tmp") as short:
        temp = f"{short}/ray"  # where Ray writes down a new cluster's address, too
        patch.setenv("RAY_TMPDIR", short)
        patch.setenv("PYTHONPATH", str(ROOT))
        head = {**NODE, "include_dashboard": False, "temp_dir": temp}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        try:
            nodes.add_node(**NODE, temp_dir=temp)
            yield nodes.address
        finally:
            nodes.shutdown()


def agents() -> list[psutil.Process]:
    """The agents of jobs, which are processes of Ray's."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any("ray::NodeAgent" in word for word in process.info["cmdline"] or []):
            found.append(process)
    return found


@pytest.fixture(autouse=True)
def _no_agent_is_left() -> Iterator[None]:
    before = {process.pid for process in agents()}
    yield
    mine = [process for process in agents() if process.pid not in before]
    assert psutil.wait_procs(mine, 20.0)[1] == []


def start(shell: Shell, address: str, *words: object) -> Running:
    """Starts a server and two workers on the cluster."""
    return shell.start(
        *("run", "--on", "ray", "--ray-address", address, "--ps", 1, "--workers", 2),
        *("--run-dir", "run", *words),
    )


def test_the_demo_trains_on_both_nodes(shell: Shell, cluster: str) -> None:
    demo = (ROOT / "examples" / "digits.py", "--max-steps", 300)
    ended = start(shell, cluster, "--strategy", "sync", *demo).ended(SECONDS)
    assert ended.status == 0, ended.text
    assert ended.err.count("trireme: on node ") == 2
    assert "worker:0 | test accuracy: 0.9" in ended.out
    assert "worker:1 | step 100" in ended.out
    logs = shell.directory / "run" / "logs"
    assert "test accuracy" in (logs / "worker-0.log").read_text()
    record = json.loads((shell.directory / "run" / "job.json").read_text())
    assert record["state"] == "finished"
    assert len(set(record["nodes"].values())) == 2


def test_processes_that_hold_one_model_meet_on_the_cluster(shell: Shell, cluster: str) -> None:
    ended = shell.start(
        *("run", "--on", "ray", "--ray-address", cluster, "--workers", 2, "--max-restarts", 1),
        *("--run-dir", "run", *TRAIN, "--fault", "1:18:before:kill", "--max-steps", 30),
        *("--every-steps", 5),
    ).ended(SECONDS)
    assert ended.status == 0, ended.text
    assert "worker:1 was killed by SIGKILL; all workers are started again" in ended.text
    found = json.loads((shell.directory / "out" / "worker-0.json").read_text())
    assert found["global_step"] == 30
    assert found["restored_from"] in (10, 15)


def test_a_killed_worker_is_started_again_and_ctrl_c_ends_all(shell: Shell, cluster: str) -> None:
    running = start(
        *(shell, cluster, "--max-restarts", 1, *TRAIN),
        *("--fault", "1:5:before:kill", "--max-steps", 1_000_000),
    )
    running.until(r"worker:1 failed: killed by SIGKILL; started again \(1 of 1\)", SECONDS)
    running.until(r"worker:1 \| step 10 ", SECONDS)  # its first start did not get there
    running.send(signal.SIGINT)
    ended = running.ended(SECONDS)
    assert ended.status == 130, ended.text
    assert list((shell.directory / "run" / "checkpoints").glob("step-*"))


def test_a_launcher_that_is_killed_leaves_nothing_behind(shell: Shell, cluster: str) -> None:
    running = start(shell, cluster, *TRAIN, "--max-steps", 1_000_000)
    running.until(r"worker:0 \| step 10 ", SECONDS)
    tasks = shell.processes()
    assert len(tasks) >= 5  # the launcher, coordinator, server, two workers
    running.send(signal.SIGKILL)
    running.ended(SECONDS)
    assert psutil.wait_procs(tasks, 60.0)[1] == []


def test_a_cluster_without_room_says_what_it_has(shell: Shell, cluster: str) -> None:
    began = time.monotonic()
    ended = start(*(shell, cluster, "--ray-cpus-per-worker", 3, "--join-timeout", 3, *TRAIN)).ended(
        SECONDS
    )
    assert ended.status == 1, ended.text
    assert "asks for 7 cores, 3 cores of them on one node; the cluster has 4 cores" in ended.err
    assert time.monotonic() < began + SECONDS


def test_without_ray_one_line_says_what_to_install(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "ray.py").write_text("raise ImportError('no ray here')\n")
    hidden = f"{tmp_path / 'hide'}:{ROOT}"
    words = ("run", "--on", "ray", "--ps", 1, ROOT / "examples" / "digits.py")
    ended = shell.run(*words, environ={"PYTHONPATH": hidden})
    assert ended.status == 2
    assert "pip install 'ray>=2.40'" in ended.err
    assert "Traceback" not in ended.text
    assert not (shell.directory / "runs").exists()
