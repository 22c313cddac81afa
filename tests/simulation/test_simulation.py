"""Thousands of simulated jobs hold all invariants, and each planted bug is found."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from tests.simulation import (
    MODES,
    Makers,
    Violation,
    draw,
    planted,
    planted_links,
    planted_membership,
    planted_replication,
    simulate,
)
from tests.simulation.__main__ import main
from tests.simulation.network import Weather
from tests.simulation.schedule import Fault, Schedule
from trireme.ps.extension import EXTENSIONS

PART = 10
"""A test runs so many schedules of a mode; `make test` one such test of each."""

PARTS = 90
"""Of each mode, in `make test-slow`: 10,000 schedules. `make soak` goes on from there."""

REFUSALS = 12
"""So many schedules of a mode have pushes that cannot be applied."""

PLENTY = 400
"""Within so many schedules every planted bug must show."""


@pytest.fixture(autouse=True)
def small_tensors() -> Iterator[None]:
    """Threads and gradients only slow down what is as small as this; so does what is loaded."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    gc.disable()
    with torch.no_grad():
        yield
    gc.enable()
    gc.unfreeze()
    torch.set_num_threads(threads)


def parts() -> list[Any]:
    return [
        pytest.param(part * PART, marks=[pytest.mark.slow] if part else []) for part in range(PARTS)
    ]


@pytest.mark.thorough(but=("async-0", "links-0", "sync-links-0"))
@pytest.mark.parametrize("first", parts())
@pytest.mark.parametrize("mode", MODES)
def test_every_invariant_holds(mode: str, first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + PART):
        schedule = draw(mode, seed)
        try:
            counts += simulate(schedule)
        except Violation as violation:
            pytest.fail(f"{violation}\n{schedule}")
    if first == 0:
        enough_happened(mode, counts)


def enough_happened(mode: str, counts: Counter[str]) -> None:
    """That nothing went wrong means little if little happened."""
    for event in ("applied", "broken", "cuts"):
        assert counts[event] > 2, f"{event}: {counts}"
    for event in ("resumed", "equal copies"):
        assert counts[event] > 0, f"{event}: {counts}"
    assert counts["duplicate"] + counts["fenced"] > 2, f"{counts}"
    assert (counts["seen"] > 500) == (mode == "counts")
    assert (counts["rows told"] > 100) == ("rows" in mode)
    assert (counts["rows pulled"] > 10) == ("rows" in mode)
    assert mode not in ("backup", "clip") or counts["stale"] > 0
    assert (counts["clipped"] > 2) == (mode in ("clip", "sync-grow"))
    for event in ("cut pair", "stick server", "cut worker"):
        assert counts[event] == 0 or "links" in mode


@pytest.mark.parametrize("mode", MODES)
def test_schedules_have_faults_of_every_kind(mode: str) -> None:
    """In too few of ten to ask whether they happened."""
    drawn = [draw(mode, seed) for seed in range(100)]
    kinds = Counter(fault.kind for schedule in drawn for fault in schedule.faults)
    wanted = ["kill server", "stop server", "silence server", "add server", "remove server"]
    if "links" in mode:
        wanted.append("deafen server")
        wanted += ["cut pair", "stick server", "cut worker"]
    assert all(kinds[kind] > 2 for kind in wanted), kinds
    assert sum(len(schedule.crashes) for schedule in drawn) > 10
    assert sum(len(schedule.evictions) for schedule in drawn) > 10


DEAF = 12
"""So many schedules of each mode of links have one deaf server and nothing else."""


def with_one_deaf_server(mode: str) -> Iterator[Schedule]:
    ends = (each for each in (draw(mode, seed) for seed in range(1000)) if each.stop_at is None)
    for number, drawn in enumerate(islice(ends, DEAF)):
        at, seconds = (0.3, 1.1, 2.3)[number % 3], (None, 3.0)[number % 2]
        yield replace(
            drawn,
            seed=1,  # no other job goes on from its last copy
            servers=2 + number % 2,
            replicas=2,
            survives=True,
            weather=Weather(),
            crashes=(),
            evictions=(),
            faults=(Fault(at, "deafen server", number, 0, seconds),),
        )


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["links", "sync-links"])
def test_one_deaf_server_costs_no_values(mode: str) -> None:
    """It is heard for a while, and its copies are lost: the others' are not given up before."""
    counts: Counter[str] = Counter()
    for schedule in with_one_deaf_server(mode):
        found = simulate(schedule)
        assert found["lives"] == 1, schedule
        counts += found
    assert counts["deafen server"] > DEAF / 2


@pytest.mark.parametrize("mode", ["links", "sync-links"])
def test_a_planted_bug_that_gives_up_the_copies_of_who_hears_is_found(mode: str) -> None:
    makers = Makers(patches=(planted_links.asks_not_who_hears,))
    assert any(simulate(each, makers)["lives"] > 1 for each in with_one_deaf_server(mode))


@pytest.mark.slow(one_in=2)
@pytest.mark.thorough(but=("sync",))
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "async-deltas"])
def test_a_push_that_cannot_be_applied_is_refused_by_all_copies(mode: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(REFUSALS):
        schedule = replace(draw(mode, seed), poison=0.1)
        try:
            counts += simulate(schedule)
        except Violation as violation:
            pytest.fail(f"{violation}\n{schedule}")
    for event in ("refused", "applied"):
        assert counts[event] > 0, f"{event}: {counts}"


BUGS: list[tuple[str, Makers]] = [
    ("async", Makers(shard=planted.AppliesRepeats)),
    ("async", Makers(shard=planted.AnswersFirst)),
    ("backup", Makers(shard=planted.AppliesStale)),
    ("async", Makers(shard=planted.IgnoresFence)),
    ("sync", Makers(shard=planted.AnswersNobodyDropped)),
    ("ssp", Makers(shard=planted.RunsAhead)),
    ("backup", Makers(shard=planted.NamesOldStep)),
    ("async", Makers(shard=planted.KeepsExamplesOfTheLost)),
    ("backup", Makers(shard=planted.KeepsExamplesOfTheStale)),
    ("ssp", Makers(shard=planted.LosesLeases)),
    ("async", Makers(shard=planted.CutsWithoutHold)),
    ("sync", Makers(shard=planted.CutsWithoutHold)),
    ("ssp", Makers(shard=planted.ForgetsVerdicts)),
    ("sync", Makers(shard=planted.TakesSequencesOver)),
    ("async", Makers(shard=planted.EndsLate)),
    ("async", Makers(shard=planted.EndsEarly)),
    ("ssp", Makers(shard=planted.StopsAtOnce)),
    ("backup", Makers(shard=planted.TakesAll)),
    ("sync", Makers(shard=planted.LeaderDecidesAlone)),
    ("sync", Makers(shard=planted.EachDecidesAlone)),
    ("backup", Makers(shard=planted.EachDecidesAlone)),
    ("clip", Makers(shard=planted.ReadsOverwrittenGradients)),
    ("async", Makers(shard=planted.EachDecidesAlone)),
    ("ssp", Makers(shard=planted.EachDecidesAlone)),
    ("async", Makers(shard=planted.CommitsWithoutAll)),
    ("async", Makers(shard=planted.DropsWhatItSaidItHas)),
    ("ssp", Makers(shard=planted.CommitsTheLost)),
    ("async", Makers(shard=planted.ReadsOverwrittenGradients)),
    ("async", Makers(dispatcher=planted.NeverRepeats)),
    ("sync", Makers(dispatcher=planted.LateCopyTakesTheAnswer)),
    ("sync", Makers(dispatcher=planted.NeverRepeats)),
    ("async", Makers(dispatcher=planted.LeadsOverTheFirst)),
    ("async", Makers(dispatcher=planted.TakesReadyForClose)),
    ("sync", Makers(lanes=planted.WaitsInOrder)),
    ("backup", Makers(shard=planted.LoadsTwice)),
    ("async", Makers(shard=planted.WaitsForTheRetired)),
    ("ssp", Makers(shard=planted.AppliesWhatTheLostHadHeld)),
    ("async", Makers(shard=planted.CutsTooEarly)),
    ("async", Makers(shard=planted.ForgetsWhatWasConsumed)),
    ("async", Makers(shard=planted.RepeatsGoUnanswered)),
    ("async", Makers(shard=planted.AppliesWithoutCounting)),
    ("async", Makers(shard=planted.KeepsSequences)),
    ("async", Makers(shard=planted.AnswersForTheProcessBefore)),
    ("ssp", Makers(shard=planted.NewcomersAreAhead)),
    ("sync", Makers(shard=planted.ClosesAnotherRound)),
    ("backup", Makers(shard=planted.HearsOfOldRounds)),
    ("sync", Makers(shard=planted.RemembersTheRoundBefore)),
    ("ssp", Makers(lanes=planted.TakesAnyAnswer)),
    ("ssp", Makers(lanes=planted.NumbersNothing)),
    ("async", Makers(lanes=planted.NeverAsksAgain)),
    ("sync", Makers(lanes=planted.TakesAnyFence)),
    ("async", Makers(lanes=planted.NeverIsOut)),
    ("sync", Makers(lanes=planted.KeepsItsView)),
    ("async", Makers(lanes=planted.CountsRepeats)),
    ("async", Makers(protocol=planted.CountsTwice)),
    ("ssp", Makers(protocol=planted.AcknowledgesTooEarly)),
    ("sync", Makers(protocol=planted.KeepsSettingsOfTheOneBefore)),
    ("backup", Makers(protocol=planted.NeverLevels)),
    ("async", Makers(protocol=planted.AsksBeforeItSettles)),
    ("ssp", Makers(protocol=planted.LeasesWithOneNumber)),
    ("async", Makers(protocol=planted.JoinsTwoCopies)),
    ("grow", Makers(shard=planted.AddsAtOnce)),
    ("sync-grow", Makers(shard=planted.AnswersRequestsOfTheLost)),
    ("sync", Makers(membership=planted_membership.tells_newcomers_nothing)),
    ("async", Makers(membership=planted_membership.admits_the_lost_as_they_were)),
    ("sync", Makers(membership=planted_membership.numbers_views_alike)),
    ("sync", Makers(membership=planted_membership.never_loses_anybody)),
    ("async", Makers(member=planted_membership.KeepsItsIncarnation)),
    ("backup", Makers(member=planted_membership.TakesNoLaterView)),
    ("async", Makers(last_chief=planted_membership.LeavesBeforeTheChief)),
    ("sync", Makers(last_chief=planted_membership.NeverTakesOver)),
    ("rows", Makers(shard=planted.MovesNoRows)),
]


def of_servers(schedule: Schedule) -> bool:
    """Returns whether something happens to servers of which there are several copies."""
    kinds = {fault.kind for fault in schedule.faults}
    return schedule.replicas > 1 and bool(kinds & {"kill server", "stop server", "silence server"})


def of_the_replaced(schedule: Schedule) -> bool:
    """Returns whether a server that is replaced lives on."""
    kinds = {fault.kind for fault in schedule.faults}
    return schedule.replicas > 1 and bool(kinds & {"stop server", "silence server"})


def of_three_copies(schedule: Schedule) -> bool:
    """Returns whether there are three copies of each shard, and something happens to servers."""
    return schedule.replicas > 2 and of_servers(schedule)


def of_size(schedule: Schedule) -> bool:
    """Returns whether shards are moved."""
    kinds = {fault.kind for fault in schedule.faults}
    return bool(kinds & {"add server", "remove server"}) or of_servers(schedule)


def of_empty_pushes(schedule: Schedule) -> bool:
    """Returns whether some pushes weigh nothing."""
    return schedule.empty > 0


def of_coordinator(schedule: Schedule) -> bool:
    """Returns whether the coordinator is started again, and something happens to servers."""
    return any(fault.kind == "kill coordinator" for fault in schedule.faults)


REPLICATION_BUGS: list[tuple[str, planted_replication.Patch, Callable[[Schedule], bool]]] = [
    ("async", planted_replication.answers_before_its_backups_confirm, of_servers),
    ("counts", planted_replication.answers_before_its_backups_confirm, of_servers),
    ("async", planted_replication.gives_gradients_back_at_once, of_servers),
    ("sync", planted_replication.gives_gradients_back_at_once, of_servers),
    ("async", planted_replication.gives_gradients_back_before_its_backups_confirm, of_servers),
    ("sync", planted_replication.gives_gradients_back_before_its_backups_confirm, of_servers),
    ("async", planted_replication.promotes_without_the_table, of_servers),
    ("sync", planted_replication.drops_an_entry, of_servers),
    ("async", planted_replication.answers_when_its_backups_are_gone, of_servers),
    ("sync", planted_replication.goes_on_alone_after_it_was_replaced, of_the_replaced),
    ("async", planted_replication.forgets_one_shards_table, of_size),
    ("sync", planted_replication.restarts_without_its_view, of_coordinator),
    ("async", planted_replication.counts_the_ready_of_an_earlier_view, of_size),
    ("async", planted_replication.compares_only_positions, of_three_copies),
    ("async", planted_replication.waits_for_who_lacks_entries, of_three_copies),
    ("async", planted_replication.late_openers_count, of_servers),
    ("backup", planted_replication.forgets_that_it_has_stopped, of_size),
    ("async", planted_replication.answers_with_later_values, of_servers),
    ("rows", planted_replication.counts_on_who_lacks_rows, of_servers),
    ("sync-rows", planted_replication.counts_rows_of_the_empty, of_empty_pushes),
]


if "tables" in EXTENSIONS:
    from tests.simulation import planted_tables

    BUGS += [
        ("rows", Makers(shard=planted_tables.AnswersWithOldRows)),
        ("rows", Makers(shard=planted_tables.CopiesRowsLater)),
    ]
    REPLICATION_BUGS += [
        ("rows", planted_tables.waits_with_updates_until_it_is_filled, of_servers),
        ("rows", planted_tables.updates_rows_that_come_later, of_servers),
    ]


def of_pairs(schedule: Schedule) -> bool:
    """Returns whether servers with copies are cut from each other."""
    cut = any(fault.kind == "cut pair" for fault in schedule.faults)
    return cut and schedule.replicas > 1


def of_loops(schedule: Schedule) -> bool:
    """Returns whether a server's loop is stuck."""
    return any(fault.kind == "stick server" for fault in schedule.faults)


LINK_BUGS: list[tuple[str, planted_replication.Patch, Callable[[Schedule], bool]]] = [
    ("links", planted_links.reports_no_copy_without_progress, of_pairs),
    ("sync-links", planted_links.reports_no_copy_without_progress, of_pairs),
    ("links", planted_links.reports_no_missing_connection_to_shard_0, of_pairs),
    ("links", planted_links.hears_of_no_broken_link, of_pairs),
    ("links", planted_links.places_copies_there_at_once, of_pairs),
    ("sync-links", planted_links.takes_the_copies_alone, of_pairs),
    ("links", planted_links.takes_a_stuck_loop_for_live, of_loops),
    ("links", planted_links.joins_again_while_it_is_stuck, of_loops),
]


def bug_name(value: object) -> str:
    if callable(value) and not isinstance(value, Makers):
        return getattr(value, "__name__", str(value))
    if isinstance(value, Makers):
        made = set(vars(value).values()) - set(vars(Makers()).values())
        return next(iter(made)).__name__
    return str(value)


SEEN_AT = {
    "async-CommitsWithoutAll": 18,
    "async-CutsWithoutHold": 3,
    "async-DropsWhatItSaidItHas": 3,
    "async-EndsEarly": 26,
    "async-IgnoresFence": 13,
    "async-KeepsItsIncarnation": 39,
    "async-LeadsOverTheFirst": 28,
    "async-LeavesBeforeTheChief": 37,
    "async-NeverIsOut": 13,
    "async-NeverRepeats": 28,
    "async-ReadsOverwrittenGradients": 3,
    "async-RepeatsGoUnanswered": 118,
    "async-TakesReadyForClose": 28,
    "async-answers_when_its_backups_are_gone": 355,
    "async-answers_with_later_values": 222,
    "async-compares_only_positions": 87,
    "async-counts_the_ready_of_an_earlier_view": 148,
    "async-late_openers_count": 85,
    "async-promotes_without_the_table": 34,
    "async-waits_for_who_lacks_entries": 87,
    "backup-HearsOfOldRounds": 57,
    "backup-LoadsTwice": 77,
    "backup-forgets_that_it_has_stopped": 4,
    "clip-ReadsOverwrittenGradients": 37,
    "links-hears_of_no_broken_link": 17,
    "links-joins_again_while_it_is_stuck": 74,
    "links-places_copies_there_at_once": 17,
    "links-reports_no_copy_without_progress": 286,
    "links-reports_no_missing_connection_to_shard_0": 17,
    "links-takes_a_stuck_loop_for_live": 74,
    "rows-MovesNoRows": 3,
    "rows-counts_on_who_lacks_rows": 218,
    "rows-updates_rows_that_come_later": 24,
    "rows-waits_with_updates_until_it_is_filled": 24,
    "ssp-AppliesWhatTheLostHadHeld": 60,
    "ssp-CommitsTheLost": 141,
    "ssp-ForgetsVerdicts": 10,
    "ssp-LosesLeases": 36,
    "ssp-NewcomersAreAhead": 30,
    "sync-AnswersNobodyDropped": 6,
    "sync-ClosesAnotherRound": 11,
    "sync-CutsWithoutHold": 103,
    "sync-EachDecidesAlone": 15,
    "sync-KeepsItsView": 6,
    "sync-LateCopyTakesTheAnswer": 22,
    "sync-NeverRepeats": 5,
    "sync-NeverTakesOver": 95,
    "sync-RemembersTheRoundBefore": 4,
    "sync-WaitsInOrder": 22,
    "sync-gives_gradients_back_before_its_backups_confirm": 14,
    "sync-goes_on_alone_after_it_was_replaced": 489,
    "sync-grow-AnswersRequestsOfTheLost": 42,
    "sync-links-reports_no_copy_without_progress": 33,
    "sync-links-takes_the_copies_alone": 73,
    "sync-never_loses_anybody": 42,
    "sync-numbers_views_alike": 42,
    "sync-restarts_without_its_view": 45,
    "sync-rows-counts_rows_of_the_empty": 5,
}
"""Seeds that show bugs which few schedules show, or soon; a warning names one that moved."""


REPRESENTATIVES = (
    "async-AppliesRepeats",
    "backup-AppliesStale",
    "async-IgnoresFence",
    "ssp-RunsAhead",
    "sync-EachDecidesAlone",
    "async-CutsWithoutHold",
    "async-LeadsOverTheFirst",
    "ssp-AcknowledgesTooEarly",
    "backup-TakesNoLaterView",
    "sync-NeverTakesOver",
    *(["rows-AnswersWithOldRows"] if "tables" in EXTENSIONS else []),
)
"""One bug of each kind of part, in `make test`: does the simulation still notice anything?"""
REPLICATION_REPRESENTATIVES = (
    "sync-gives_gradients_back_at_once-of_servers",
    "async-forgets_one_shards_table-of_size",
    "links-hears_of_no_broken_link-of_pairs",
)


def seeds(mode: str, bug: object, count: int) -> Iterator[int]:
    """Yields the seed at which a bug was seen, and then all, if a change has made it another."""
    first = SEEN_AT.get(f"{mode}-{bug_name(bug)}")
    if first is not None:
        yield first
    yield from range(count)


def warn_if_it_took_many(mode: str, bug: object, seed: int) -> None:
    """Asks for a line in `SEEN_AT`: a search of many schedules takes minutes in all."""
    key = f"{mode}-{bug_name(bug)}"
    if seed > 10 and SEEN_AT.get(key) != seed:
        warnings.warn(f'put "{key}": {seed} into SEEN_AT', stacklevel=2)


@pytest.mark.slow(but=REPRESENTATIVES)
@pytest.mark.parametrize(("mode", "makers"), BUGS, ids=bug_name)
def test_a_planted_bug_is_found(mode: str, makers: Makers) -> None:
    for seed in seeds(mode, makers, PLENTY):
        try:
            simulate(draw(mode, seed), makers)
        except (AssertionError, KeyError):  # a violation, or the shard itself stumbles
            warn_if_it_took_many(mode, makers, seed)
            return
    pytest.fail(f"{PLENTY} schedules went by unnoticed")


@pytest.mark.slow(but=REPLICATION_REPRESENTATIVES)
@pytest.mark.parametrize(("mode", "bug", "shows"), [*REPLICATION_BUGS, *LINK_BUGS], ids=bug_name)
def test_a_planted_bug_of_replication_is_found(
    mode: str, bug: planted_replication.Patch, shows: Callable[[Schedule], bool]
) -> None:
    tried = 0
    for seed in seeds(mode, bug, 10 * PLENTY):
        schedule = draw(mode, seed)
        if shows(schedule):
            tried += 1
            try:
                simulate(schedule, Makers(patches=(bug,)))
            except (AssertionError, KeyError):
                warn_if_it_took_many(mode, bug, seed)
                return
        if tried == PLENTY:
            break
    pytest.fail(f"{tried} schedules went by unnoticed")


def test_settings_that_were_dropped_with_a_stale_update_are_sent_again() -> None:
    """That shows where a learning rate comes again that servers have heard of and forgotten."""
    makers = Makers(protocol=planted.KeepsSettingsOfTheStale)
    for seed in range(PLENTY):
        schedule = draw("backup", seed)
        schedule = replace(schedule, slower_from=schedule.faster_from + 1)
        try:
            simulate(schedule, makers)
        except Violation:
            simulate(schedule)
            return
    pytest.fail(f"{PLENTY} schedules went by unnoticed")


def test_a_seed_is_one_schedule_and_one_run() -> None:
    assert draw("sync", 7) == draw("sync", 7) != draw("sync", 8)
    first: list[str] = []
    second: list[str] = []
    assert simulate(draw("ssp", 8), note=first.append) == simulate(
        draw("ssp", 8), note=second.append
    )
    assert first == second
    assert len(first) > 100


@pytest.mark.thorough
def test_the_command_line_tells_of_each_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", f"0:{len(MODES)}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [[mode, "1", "schedules"] for mode in MODES]


def test_the_command_line_shows_a_failing_schedule(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Makers, "__init__", Makers.__init__)
    defaults = (planted.AnswersFirst, *list(vars(Makers()).values())[1:])
    monkeypatch.setattr(Makers.__init__, "__defaults__", defaults)
    assert main(["--seeds", "3", "--mode", "async"]) == 1
    told = capsys.readouterr().out
    assert "FAILED" in told
    assert "schedule async, seed 3:" in told
    assert "again: python -m tests.simulation --seeds 3 --mode async" in told
