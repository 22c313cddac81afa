"""Jobs on a Ray cluster of two nodes and more, all on this host. Run by `make test-ray`."""

from __future__ import annotations

import json
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import PACKAGES
from tests.integration.shell import PROGRAMS, ROOT, Running, Shell
from tests.integration.test_counting import consumed, notes, saved, table, updates

pytestmark = [pytest.mark.processes, pytest.mark.ray, pytest.mark.timeout(400)]

TRAIN = (PROGRAMS / "train.py", "--out", "out")
SECONDS = 200.0
STEPS = 3000
BATCH = 4
NODE = {"num_cpus": 2, "object_store_memory": 80_000_000}


class Nodes:
    """The nodes of a cluster.

    Args:
        cluster: a `ray.cluster_utils.Cluster`.
        options: of each node.
    """

    def __init__(self, cluster: Any, options: dict[str, Any]) -> None:
        self.address: str = cluster.address
        self._cluster = cluster
        self._options = options
        self._added: list[Any] = []

    def add(self) -> None:
        """Adds a node and waits until the cluster has it."""
        self._added.append(self._cluster.add_node(**self._options))

    def kill(self) -> None:
        """Kills the node that was added last, and waits until the cluster knows that."""
        self._cluster.remove_node(self._added.pop(), allow_graceful=False)
        self._cluster.wait_for_nodes()

    def is_head(self, node: str) -> bool:
        """Whether a node, as messages name it, is the one where launchers run."""
        head: str = self._cluster.head_node.node_id
        return head.startswith(node.rpartition("(")[2].rstrip(")"))

    def free_cores(self) -> float:
        """Returns how many cores nobody holds."""
        import ray

        ray.init(address=self.address, log_to_driver=False, logging_level="ERROR")
        try:
            return float(ray.available_resources().get("CPU", 0.0))
        finally:
            ray.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A cluster of one node, where launchers run."""
    pytest.importorskip("ray", reason="Ray is not installed: `make test-ray` runs these tests")
    from ray.cluster_utils import Cluster

    # Ray's sockets have to have short names, and its directory is not to be another cluster's.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir="/tmp") as short:
        temp = f"{short}/ray"  # where Ray writes down a new cluster's address, too
        patch.setenv("RAY_TMPDIR", short)
        patch.setenv("PYTHONPATH", PACKAGES)
        head = {**NODE, "include_dashboard": False, "temp_dir": temp}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            yield Nodes(cluster, {**NODE, "temp_dir": temp})
        finally:
            cluster.shutdown()


@pytest.fixture(scope="module")
def cluster(nodes: Nodes) -> str:
    """The address of the cluster, which has a second node."""
    nodes.add()
    return nodes.address


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
    assert len(tasks) >= 4  # the launcher, server, two workers
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


def counting(shell: Shell, address: str, *words: object) -> Running:
    """Starts the counting program, which makes no pauses any more once it is released."""
    program = (PROGRAMS / "counting.py", "--out", "out", "--max-steps", STEPS, "--rows", 2)
    paces = ("--batch-size", BATCH, "--pause", 0.05, "--pause-until", "released")
    where = ("run", "--on", "ray", "--ray-address", address, "--run-dir", "run")
    return shell.start(*where, "--strategy", "async", *words, *program, *paces)


def placement(shell: Shell) -> list[set[str]]:
    """The nodes that hold the copies of each part of the parameters, when all are whole."""
    deadline = time.monotonic() + SECONDS
    while True:
        found = json.loads(shell.run("status", "--json", "run").out)["placement"]
        shards = [] if found is None else found["shards"]
        if shards and not found["moving"] and not any(s["missing"] for s in shards):
            nodes = json.loads((shell.directory / "run" / "job.json").read_text())["nodes"]
            copies = [(shard["primary"], *shard["backups"]) for shard in shards]
            return [{nodes[name] for name in names} for names in copies]
        assert time.monotonic() < deadline, f"some copy is missing: {found}"


def totals(shell: Shell) -> list[float]:
    """Each worker's updates, of which there are as many as there were steps."""
    data = saved(shell, STEPS)
    rows = updates(data)
    assert rows == [table(data)[worker] for worker in range(2)]
    assert sum(rows) == STEPS
    assert sum(stop - start for start, stop in consumed(data)) == STEPS * BATCH
    return rows


def test_a_job_grows_onto_a_node_that_comes_and_gives_back_what_it_leaves(
    shell: Shell, nodes: Nodes, cluster: str
) -> None:
    running = counting(shell, cluster, "--ps", 3, "--replicas", 2, "--workers", 1)
    running.until_there(shell.directory / "out" / "notes-0", SECONDS)
    # Three servers on two nodes: two of them are on one node, and hold no part together.
    assert all(len(holders) == 2 for holders in placement(shell))
    scaling = shell.start("scale", "--ps", 4, "--workers", 2, "run")
    running.until(
        r"waiting for room on the Ray cluster: ps:3, worker:1 ask for 2 cores, 1 core of them on "
        r"one node; the cluster has 4 cores \(0 free\)",
        SECONDS,
    )
    nodes.add()
    try:
        grown = scaling.ended(SECONDS)
        assert grown.status == 0, grown.text
        assert "the job has 4 servers and 2 workers" in grown.out
        assert all(len(holders) == 2 for holders in placement(shell))
        # It gets smaller than it was at first.
        shrunk = shell.run("scale", "--ps", 2, "run")
        assert shrunk.status == 0, shrunk.text
        running.until("ps:3 has left: the job was made smaller", SECONDS)
        running.until("ps:2 has left: the job was made smaller", SECONDS)
        until_free(nodes, 2.0)
        assert running.process.poll() is None
        (shell.directory / "released").touch()
        ended = running.ended(SECONDS)
    finally:
        nodes.kill()
    assert ended.status == 0, ended.text
    known = [notes(shell, worker) for worker in range(2)]
    rows = totals(shell)
    assert rows == [one["applied"] for one in known] == [one["attempted"] for one in known]


def until_free(nodes: Nodes, cores: float) -> None:
    """Waits until nobody holds so many cores. A task gives its own back a moment after its end."""
    deadline = time.monotonic() + 30.0
    while (free := nodes.free_cores()) != cores:
        assert time.monotonic() < deadline, f"{free:g} cores are free, and not {cores:g}"


def test_the_tasks_of_a_killed_node_are_started_again_on_one_that_comes(
    shell: Shell, nodes: Nodes, cluster: str
) -> None:
    words = ("--ps", 2, "--replicas", 2, "--workers", 2, "--max-restarts", 2)
    running = counting(shell, cluster, *words)
    noted = [shell.directory / "out" / f"notes-{worker}" for worker in range(2)]
    for path in noted:
        running.until_there(path, SECONDS)
    assert all(len(holders) == 2 for holders in placement(shell))
    places = json.loads((shell.directory / "run" / "job.json").read_text())["nodes"]
    lost = [name for name, node in places.items() if not nodes.is_head(node)]
    assert [name.partition(":")[0] for name in lost] == ["ps", "worker"]
    survivor = 1 - int(lost[1].partition(":")[2])
    nodes.kill()
    running.until(f"waiting for room on the Ray cluster: {', '.join(lost)} ask for", SECONDS)
    until_grown(noted[survivor], 50)
    nodes.add()
    until_grown(noted[1 - survivor], 10)
    assert all(len(holders) == 2 for holders in placement(shell))
    (shell.directory / "released").touch()
    ended = running.ended(SECONDS)
    assert ended.status == 0, ended.text
    assert f"{lost[0]} was lost with its agent on node" in ended.err
    rows, known = totals(shell), [notes(shell, worker) for worker in range(2)]
    assert known[survivor]["attempted"] == known[survivor]["applied"] == rows[survivor]
    # Of the update that was under way nobody but the servers knows what became.
    other = known[1 - survivor]
    assert other["applied"] <= rows[1 - survivor] <= other["attempted"] <= other["applied"] + 1


def until_grown(path: Path, updates: int) -> None:
    """Waits until a worker has noted so many further updates."""
    begin, deadline = path.read_bytes().count(b"applied"), time.monotonic() + SECONDS
    while path.read_bytes().count(b"applied") < begin + updates:
        assert time.monotonic() < deadline, f"{path} does not grow"
        time.sleep(0.02)


def test_without_ray_one_line_says_what_to_install(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "hide").mkdir()
    (tmp_path / "hide" / "ray.py").write_text("raise ImportError('no ray here')\n")
    hidden = f"{tmp_path / 'hide'}:{ROOT}"
    words = ("run", "--on", "ray", "--ps", 1, ROOT / "examples" / "digits.py")
    ended = shell.run(*words, environ={"PYTHONPATH": hidden})
    assert ended.status == 2
    # Where it is not installed, and where it is and cannot be imported.
    assert re.search(r"pip install '(trireme-train\[ray\]|ray>=2\.40)'", ended.err), ended.err
    assert "Traceback" not in ended.text
