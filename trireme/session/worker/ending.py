"""The end of a worker's training: it waits for the others, and the chief saves the last step."""

from __future__ import annotations

from trireme.errors import CheckpointLockLost, Fenced, JobFailed, WaitTimeout
from trireme.session.worker.lifecycle import WaitCutShort
from trireme.session.worker.stopping import rolled_back
from trireme.session.worker.worker import Worker


def finish(worker: Worker) -> None:
    """Waits until training has ended on all workers; the chief saves the final step.

    A chief that saved and left earlier would save no update that is made meanwhile. The others wait
    until it has saved: if it is lost before, one of them takes over.
    """
    lifecycle, backend, checkpoints = worker.lifecycle, worker.backend, worker.checkpoints
    worker.end()
    lifecycle.last_chief.settle(lifecycle.is_chief)
    lifecycle.liveness.excuse = "it has ended training"
    if not backend.stopping:
        checkpoints.buffers.publish()
    if _leaves(worker):
        return
    if not (backend.stopping or backend.together):
        checkpoints.finish()
    while backend.stopping or backend.together:
        has_all = _drain(worker)
        if not has_all and _leaves(worker):
            return
        if has_all and not _wait_for_chief(worker):
            continue
        try:
            checkpoints.finish()
            break
        except Fenced:
            if not has_all:
                raise
        except CheckpointLockLost:
            if not lifecycle.directory_lost():
                raise
            if lifecycle.last_step_is_saved:
                break
    lifecycle.last_step_saved()


def _wait_for_chief(worker: Worker) -> bool:
    while True:
        _follow_chief(worker)
        if not worker.lifecycle.awaits_chief:
            worker.lifecycle.warn_if_unheard()
            return True
        if not worker.lifecycle.wait_for_chief():
            return False


def _follow_chief(worker: Worker) -> None:
    lifecycle = worker.lifecycle
    if lifecycle.last_chief.follow(lifecycle.view, worker.global_step):
        worker.checkpoints.follow_view()


def _leaves(worker: Worker) -> bool:
    leaves = worker.lifecycle.depart()
    if leaves:
        worker.progress.message(f"this worker leaves: {worker.lifecycle.dismissed}")
    return leaves


def _drain(worker: Worker) -> bool:
    """Waits until every worker has made its last update, and receives the final values.

    Returns False where the job needs nothing more from this worker.
    """
    lifecycle, backend = worker.lifecycle, worker.backend
    while True:
        lifecycle.draining = True
        try:
            backend.drain()
            worker.remember()  # the final values are none that the program has written
            return True
        except WaitCutShort:
            if lifecycle.dismissed is not None:
                return False
            _meanwhile(worker)
            continue
        except Fenced as reason:
            cause = reason
        finally:
            lifecycle.draining = False
        try:
            lifecycle.come_back()
            if lifecycle.life != worker.life:
                before = backend.global_step
                worker.rejoin()
                if not backend.stopping and backend.global_step < before:
                    raise rolled_back(before, backend.step, ended=worker.task.name)
            if worker.retire() and not backend.stopping:  # if not, the servers tell again
                backend.end()
        except (JobFailed, WaitTimeout):
            if lifecycle.life != worker.life:
                raise
            worker.progress.warn(
                f"this worker was taken for lost after its last update: its model stays as it "
                f"was at step {backend.global_step} ({cause})"
            )
            return False


def _meanwhile(worker: Worker) -> None:
    """Does what cannot wait for the others: asks the job to stop, and saves as chief."""
    lifecycle, servers = worker.lifecycle, worker.lifecycle.servers
    if lifecycle.interrupted is not None and not lifecycle.stop_sent:
        worker.stop(lifecycle.interrupted)
    if lifecycle.leads and servers is not None:
        _follow_chief(worker)
        worker.checkpoints.save_due(max(each.step for each in servers.status()))
