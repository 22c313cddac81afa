from __future__ import annotations

from trireme.cluster.view import LastChief, ShardEntry, View, WorkerEntry


def test_the_primary_of_a_shard_is_named_where_it_is() -> None:
    view = View(3, (), (), (ShardEntry(0, 8, 2), ShardEntry(8, 16, 0)))
    assert [view.primary_name(shard) for shard in (0, 1)] == ["ps:2", "ps:0"]
    assert View(0, (), ()).primary_name(1) == "ps:1", "before the first view"


STEP = 9


def view(*workers: int, saved: int | None = None) -> View:
    """A view with these workers."""
    return View(1, (), tuple(WorkerEntry(worker, 1) for worker in workers), saved=saved)


def ended(worker: int, *, is_chief: bool) -> LastChief:
    """A worker that has made its last update."""
    chief = LastChief(worker)
    chief.settle(is_chief)
    return chief


def test_nothing_is_settled_while_training_goes_on() -> None:
    chief = LastChief(1)
    assert chief.saves is None
    assert not chief.follow(view(1), STEP) and not chief.awaits(view(0, 1), STEP)


def test_the_chief_saves_and_the_others_wait_for_it() -> None:
    first, second = ended(0, is_chief=True), ended(1, is_chief=False)
    assert first.saves and not first.awaits(view(0, 1), STEP)
    assert not second.saves and second.awaits(view(0, 1), STEP)
    assert not second.awaits(view(0, 1, saved=STEP), STEP)


def test_without_a_coordinator_there_is_nobody_to_wait_for() -> None:
    assert not ended(1, is_chief=False).awaits(None, STEP)


def test_the_next_worker_takes_over_from_a_chief_that_is_lost() -> None:
    second, third = ended(1, is_chief=False), ended(2, is_chief=False)
    assert second.follow(view(1, 2), STEP) and second.saves
    assert not second.awaits(view(1, 2), STEP)
    assert not third.follow(view(1, 2), STEP) and third.awaits(view(1, 2), STEP)


def test_nobody_takes_over_from_one_that_has_saved() -> None:
    second = ended(1, is_chief=False)
    assert not second.follow(view(1, saved=STEP), STEP) and not second.saves


def test_a_chief_that_is_back_gets_the_last_step_back() -> None:
    second = ended(1, is_chief=False)
    second.follow(view(1), STEP)
    assert second.follow(view(0, 1), STEP) and not second.saves
    assert second.awaits(view(0, 1), STEP)


def test_steps_that_were_made_after_the_last_one_was_saved_are_saved_too() -> None:
    """A worker came back when the others had ended training."""
    late = ended(1, is_chief=False)
    assert late.awaits(view(0, 1, saved=STEP), STEP + 1)
    assert late.follow(view(1, saved=STEP), STEP + 1) and late.saves


def test_training_that_goes_on_settles_it_anew() -> None:
    chief = ended(1, is_chief=False)
    chief.reopen()
    chief.settle(True)
    chief.settle(False)
    assert chief.saves
