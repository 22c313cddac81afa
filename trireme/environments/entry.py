"""The environment `launchers`: flags first, then variables, those of inner launchers first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trireme.environments.flags import find_flagged, split_flags
from trireme.environments.launchers import TORCHRUN, find_launched_task
from trireme.environments.tf_config import find_tf_task
from trireme.environments.unknown import check_no_other_launcher
from trireme.launch.environment import Environment, Launched


def _find(environ: Mapping[str, str], arguments: Sequence[str]) -> Launched | None:
    return (
        find_flagged(arguments)
        or find_launched_task(environ, TORCHRUN)
        or find_tf_task(environ)
        or find_launched_task(environ)
    )


LAUNCHERS = Environment(_find, check_no_other_launcher, lambda words: split_flags(words)[1])
