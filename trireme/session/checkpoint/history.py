"""The checkpoints of a run: lists them, loads the newest undamaged one, deletes old ones."""

from __future__ import annotations

from collections.abc import Callable, Collection

from trireme.errors import CheckpointError
from trireme.location import Location
from trireme.session.checkpoint.format import CheckpointData, load
from trireme.session.checkpoint.manifest import CHECKPOINTS, order_of
from trireme.session.checkpoint.place import RunDir, place_of


def list_checkpoints(run_dir: RunDir) -> list[Location]:
    """Returns the directories of a run's checkpoints, oldest first, including damaged ones."""
    place = place_of(run_dir)
    try:
        return place.list()
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {place.run_dir / CHECKPOINTS} cannot be read: {error}"
        ) from error


def step_of(path: Location) -> int:
    """Returns the global step of a checkpoint from its directory's name."""
    order = order_of(path.name)
    if order is None:
        raise ValueError(f"{path} does not have the name of a checkpoint")
    return order[1]


def latest(
    run_dir: RunDir,
    on_damaged: Callable[[Location, CheckpointError], None],
    *,
    streamed: bool = False,
) -> CheckpointData | None:
    """Reads the newest undamaged checkpoint of a run; where all are damaged, `CheckpointError`.

    To begin anew is then the user's decision. `on_damaged` is called with each.
    """
    place = place_of(run_dir)
    paths = list_checkpoints(place)
    for path in reversed(paths):
        try:
            return load(path, streamed=streamed)
        except CheckpointError as error:
            on_damaged(path, error)
    if not paths:
        return None
    raise CheckpointError(
        f"every checkpoint in {place.run_dir / CHECKPOINTS} is damaged ({len(paths)} of them): "
        "restore one from a copy, or move them away to begin anew"
    )


def prune(
    run_dir: RunDir,
    keep: int,
    keep_every_steps: int | None = None,
    *,
    spared: Collection[Location] = (),
) -> list[Location]:
    """Deletes and returns old checkpoints, but the newest `keep` and those that are `spared`.

    With `keep_every_steps`, the first at or after each multiple stays too.
    """
    place = place_of(run_dir)
    paths = list_checkpoints(place)
    stay = {*paths[-keep:], *spared}
    if keep_every_steps is not None:
        first: dict[int, Location] = {}
        for path in paths:
            first.setdefault(step_of(path) // keep_every_steps, path)
        stay.update(path for number, path in first.items() if number > 0)
    doomed = [path for path in paths if path not in stay]
    for path in doomed:
        try:
            place.remove(path)
        except OSError as error:
            raise CheckpointError(f"{path} could not be deleted: {error}") from error
    return doomed
