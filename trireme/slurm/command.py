"""`trireme slurm script`: prints a batch script for a job."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence

from trireme.cli.command import number
from trireme.cli.run import configuration, prepare
from trireme.errors import UsageError
from trireme.job_config import JobConfig
from trireme.launch.engines import engine_options
from trireme.launch.process_setup.program import check_program, program_name
from trireme.slurm.entry import OWN, SLURM_COMMAND
from trireme.slurm.options import SlurmOptions

_TIME = re.compile(r"[0-9]+|[0-9]+(:[0-9]{2}){1,2}|[0-9]+-[0-9]{1,2}(:[0-9]{2}){0,2}")


def main(arguments: Sequence[str]) -> int:
    """Prints the script and returns 0."""
    parser = SLURM_COMMAND.parser()
    if arguments[:1] in (["-h"], ["--help"]):
        parser.parse_args(arguments)
    if arguments[:1] != ["script"]:
        raise UsageError("say what to do: trireme slurm script [OPTIONS] SCRIPT [ARGS...]")
    options, program = parser.split(arguments[1:])
    given = vars(parser.parse_args(options))
    own = {name: given.pop(name) for name in OWN}
    if not program:
        raise UsageError("name the program: trireme slurm script [OPTIONS] SCRIPT [ARGS...]")
    check_program(program)
    config = configuration({**given, "on": "slurm"}, given["config"])
    prepare(config)
    words = [*_without_own(options)]
    if config.values["run-dir"] is None:
        words += ["--run-dir", f"runs/{program_name(program)}"]
    print(batch_script(config, own, [*words, *program], os.getcwd(), program_name(program)), end="")
    return 0


def _without_own(options: Sequence[str]) -> Sequence[str]:
    """Returns the options that are those of `trireme run`, as they were given."""
    own = {f"--{name.replace('_', '-')}" for name in OWN} | {"--on"}
    words = [*options]
    for place in reversed(range(len(words))):
        if words[place].partition("=")[0] in own:
            del words[place : place + (1 if "=" in words[place] else 2)]
    return words


def batch_script(
    config: JobConfig, own: Mapping[str, str | None], run: Sequence[str], directory: str, name: str
) -> str:
    """Returns a batch script.

    Args:
        config: the configuration of the job.
        own: the options of the script itself, by their names in `OWN`.
        run: the arguments of `trireme run`, without `--on slurm`.
        directory: where it runs.
        name: of the job.
    """
    nodes, servers = (_count(option, own[option], least) for option, least in _COUNTS)
    grace = _count("grace", own["grace"], 1)
    if not _TIME.fullmatch(own["time"] or ""):
        raise UsageError(f"--time is {own['time']!r}: give it as sbatch takes it, such as 1:30:00")
    if servers and not config.tasks.ps:
        raise UsageError("--server-nodes are for parameter servers: give --ps N too")
    options, tasks = engine_options(config, SlurmOptions), config.tasks
    assert tasks.workers != "auto"  # the engine refuses it
    workers = -(-tasks.workers * options.cpus_per_worker // nodes)
    shared = 0 if servers else -(-tasks.ps // nodes)
    gpus = -(-int(tasks.workers * options.gpus_per_worker) // nodes)
    component = [
        f"#SBATCH --nodes={nodes} --ntasks-per-node=1 --cpus-per-task={workers + shared}",
        *([f"#SBATCH --gpus-per-node={gpus}"] if gpus else []),
    ]
    if servers:
        cores = -(-tasks.ps // servers)
        first = f"#SBATCH --nodes={servers} --ntasks-per-node=1 --cpus-per-task={cores}"
        component = [f"{first}  # the servers", "#SBATCH hetjob", *component]
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={shlex.quote(name)} --output=%x-%j.txt --open-mode=append",
        f"#SBATCH --time={own['time']}",
        *([f"#SBATCH --partition={own['partition']}"] if own["partition"] else []),
        "#SBATCH --no-kill  # the job goes on without a node that fails",
        f"#SBATCH --requeue --signal=B:TERM@{grace}  # before its time is over it saves",
        *component,
        "",
        f"cd {shlex.quote(directory)} || exit 2",
        "trap 'again=1; kill -TERM $launcher 2>/dev/null' TERM",
        f"trireme run --on slurm {shlex.join(run)} &",
        "launcher=$!",
        "while wait $launcher; status=$?; kill -0 $launcher 2>/dev/null; do :; done",
        "# The program has saved, as its time was over: it goes on where it was, in its turn.",
        '[ -n "$again" ] && [ $status = 130 ] && scontrol requeue "$SLURM_JOB_ID" && sleep 60',
        "exit $status",
    ]
    return "\n".join(lines) + "\n"


_COUNTS = (("nodes", 1), ("server_nodes", 0))


def _count(option: str, text: str | None, least: int) -> int:
    what = f"a whole number from {least}"
    named = f"--{option.replace('_', '-')}"
    return int(number(named, str(text), what, lambda it: it >= least and it % 1 == 0))
