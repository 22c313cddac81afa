"""A Slurm of four nodes on this host, with a controller and an authentication of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "sinfo", "squeue")
SECONDS = 60.0
NODES = ("n1", "n2", "n3", "n4")

_CONFIGURATION = """
ClusterName=four
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
SlurmctldPort={controller}
SlurmctldPidFile={directory}/controller.pid
SlurmdPidFile={directory}/%n.pid
SlurmdSpoolDir={directory}/spool-%n
StateSaveLocation={directory}/state
SlurmctldLogFile={directory}/controller.log
SlurmdLogFile={directory}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=10
SchedulerParameters=sched_interval=2,requeue_delay=1
NodeName=n[1-4] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=4000
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Returns the programs of Slurm's that are not installed here."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [name for name in NEEDED if shutil.which(name, path=path) is None]


class Slurm:
    """The cluster: `environ` has what its commands need."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environ = {
            **os.environ,
            "SLURM_CONF": str(directory / "slurm.conf"),
            "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin",
        }

    def run(self, *command: str) -> str:
        """Runs a command of Slurm's, and returns what it prints."""
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def start_node(self, name: str) -> None:
        self.run("slurmd", "-N", name)

    def kill_node(self, name: str) -> None:
        """Kills a node's daemon and all that it has started, as when its power fails."""
        slurmd = psutil.Process(int((self.directory / f"{name}.pid").read_text()))
        lost = {slurmd}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == name:
                    lost.add(process)
                    step = process.parent()
                    lost |= {step} if step and step.name().startswith("slurmstepd") else set()
        for process in lost:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def states(self) -> Mapping[str, str]:
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + SECONDS
        while set(self.states().values()) != {"idle"}:
            assert time.monotonic() < deadline, self.states()
            time.sleep(0.2)


@contextmanager
def four_nodes(directory: Path) -> Iterator[Slurm]:
    """Starts the cluster in a directory, whose name is short, as a socket is in it."""
    slurm = Slurm(directory)
    key = directory / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    first, *ports = _free_ports(5)
    while ports != [*range(ports[0], ports[0] + 4)]:
        first, *ports = _free_ports(5)
    (directory / "slurm.conf").write_text(
        _CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            directory=directory,
            controller=first,
            first=ports[0],
            last=ports[-1],
        )
    )
    for name in ("state", *(f"spool-{node}" for node in NODES)):
        (directory / name).mkdir()
    munged = subprocess.Popen(
        [
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--socket={directory}/munge.socket", f"--pid-file={directory}/munge.pid"),
            *(f"--log-file={directory}/munge.log", f"--seed-file={directory}/munge.seed"),
        ],
        env=slurm.environ,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + SECONDS
        while not (directory / "munge.socket").exists():
            assert time.monotonic() < deadline, "munged does not listen"
            time.sleep(0.05)
        slurm.run("slurmctld")
        for node in NODES:
            slurm.start_node(node)
        slurm.wait_until_idle()
        yield slurm
    finally:
        for file in (directory / "controller.pid", *(directory / f"{n}.pid" for n in NODES)):
            if file.exists():
                _end(int(file.read_text()))
        munged.terminate()
        munged.wait(SECONDS)


def _end(pid: int) -> None:
    try:
        os.kill(pid, 9)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.02)
    except ProcessLookupError:
        pass


def _free_ports(count: int) -> list[int]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        found = int(one.getsockname()[1])
    return [found - 1, *range(found, found + count - 1)]
