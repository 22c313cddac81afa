"""The ledgers of all data sets, by name."""

from __future__ import annotations

import msgspec
import pytest

from trireme.ps.leader.example_ledgers import ExampleLedgers
from trireme.ps.messages import Lease, Leased, Span


def lease(
    worker: int, dataset: str = "a", *, batch: int = 4, count: int = 1, number: int = 0
) -> tuple[int, Lease]:
    return worker, Lease(1, dataset, 100, batch, count, number)


def book_of(*workers: int) -> ExampleLedgers:
    book = ExampleLedgers()
    book.members(workers)
    return book


def test_each_data_set_has_its_own_positions() -> None:
    book = book_of(0, 1)
    assert book.lease(*lease(0)).spans == (Span("a", 0, 4),)
    assert book.lease(*lease(0, "b", count=2)).spans == (Span("b", 0, 4), Span("b", 4, 8))
    assert book.lease(*lease(1)).spans == (Span("a", 4, 8),)


def test_a_repeated_request_gets_the_same_examples() -> None:
    book = book_of(0, 1)
    first = book.lease(*lease(0, number=1, count=2)).spans
    assert book.lease(*lease(0, number=1, count=2)).spans == first
    assert book.lease(*lease(1, number=1)).spans == (Span("a", 8, 12),)
    assert book.lease(*lease(0, number=2)).spans == (Span("a", 12, 16),)
    book.release(0)
    assert book.lease(*lease(0, number=1)).spans == (Span("a", 0, 4),), "a new process counts anew"


def test_a_request_that_comes_after_a_later_one_gets_nothing() -> None:
    book = book_of(0)
    book.lease(*lease(0, number=1))
    second = book.lease(*lease(0, number=2)).spans
    with pytest.raises(ValueError, match="worker:0 asks for its lease 1, and had lease 2 already"):
        book.lease(*lease(0, number=1))
    assert book.lease(*lease(0, number=2)).spans == second, "the late request changes nothing"
    assert book.lease(*lease(0, number=3)).spans == (Span("a", 8, 12),)


def test_without_numbers_each_request_is_a_new_one() -> None:
    book = book_of(0)
    assert book.lease(*lease(0)).spans != book.lease(*lease(0)).spans


def test_finished_examples_are_consumed_and_returned_ones_dealt_again() -> None:
    book = book_of(0, 1)
    (one,) = book.lease(*lease(0)).spans
    (two,) = book.lease(*lease(1)).spans
    book.finish(0, [one])
    book.give_back(1, [two])
    assert book.consumed() == (one,)
    assert book.lease(*lease(0)).spans == (two,)


def test_who_takes_part_no_longer_gives_back_what_it_held() -> None:
    book = book_of(0, 1)
    book.lease(*lease(1, "a"))
    book.lease(*lease(1, "b"))
    book.members((0,))
    assert book.lease(*lease(0, "a")).spans == (Span("a", 0, 4),)
    assert book.lease(*lease(0, "b")).spans == (Span("b", 0, 4),)


def test_a_snapshot_goes_on_where_it_was_before_and_after_the_first_lease() -> None:
    consumed = (Span("a", 0, 8), Span("a", 12, 20), Span("b", 0, 4))
    book = book_of(0)
    book.lease(*lease(0, "b", count=5))
    book.restore(consumed)
    assert book.consumed() == consumed
    assert book.lease(*lease(0, "a", count=2)).spans == (Span("a", 8, 12), Span("a", 20, 24))
    assert book.lease(*lease(0, "b")).spans == (Span("b", 4, 8),)
    assert book.consumed() == consumed


def test_what_nobody_leased_is_not_counted() -> None:
    book = book_of(0)
    book.finish(0, [Span("never", 0, 4)])
    book.give_back(0, [Span("never", 0, 4)])
    assert book.consumed() == ()


def test_only_what_was_dealt_can_be_an_updates_examples() -> None:
    book = book_of(0)
    book.lease(*lease(0))
    assert book.why_invalid([Span("a", 0, 4), Span("a", 2, 2), Span("b", 0, 900)]) is None
    for span in (Span("a", 0, 5), Span("b", 3, 2)):
        said = book.why_invalid([Span("a", 0, 4), span])
        assert said is not None and f"{span.start} to {span.stop} of {span.dataset!r}" in said


def test_when_there_are_too_many_data_sets_the_known_ones_are_dealt_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trireme.ps.leader.example_ledgers._MOST_DATASETS", 2)
    book = book_of(0)
    for dataset in ("a", "b"):
        book.lease(*lease(0, dataset))
    with pytest.raises(ValueError, match="at most 2 data sets"):
        book.lease(*lease(0, "c"))
    assert book.lease(*lease(0, "b")).spans == (Span("b", 4, 8),)


def test_everybody_must_have_the_same_data() -> None:
    book = book_of(0, 1)
    book.lease(*lease(0))
    with pytest.raises(ValueError, match="worker:1 has 7 examples of 'a' and others have 100"):
        book.lease(1, Lease(1, "a", 7, 4, 1))


def test_interleaved_dealing_is_the_ledgers() -> None:
    book = book_of(0, 1)
    book.interleave = True
    assert book.lease(*lease(1, count=2)).spans == (Span("a", 4, 8), Span("a", 12, 16))
    with pytest.raises(ValueError, match="same batch size everywhere"):
        book.lease(*lease(0, batch=5))


def test_a_data_set_of_another_size_is_refused_after_a_checkpoint() -> None:
    before = ExampleLedgers()
    before.members([0])
    before.lease(*lease(0, count=3))
    before.finish(0, [Span("a", 0, 12)])
    book = ExampleLedgers()
    book.members([0])
    book.restore(before.consumed(), before.sizes())
    request = msgspec.structs.replace(lease(0)[1], size=before.sizes()["a"] + 1)
    with pytest.raises(ValueError, match=r"'a' had \d+ examples in the checkpoint.*resized=True"):
        book.lease(0, request)
    assert book.consumed() == before.consumed()
    assert book.sizes() == before.sizes()
    assert book.lease(*lease(0)).spans == (Span("a", 12, 16),)


def test_a_data_set_that_is_meant_to_have_grown_goes_on_with_the_next_epoch() -> None:
    book = ExampleLedgers()
    book.members([0])
    book.restore([Span("a", 0, 110)], {"a": 100})  # in the second epoch
    request = msgspec.structs.replace(lease(0)[1], size=150, resized=True)
    assert book.lease(0, request).spans == (Span("a", 300, 304),)
    assert book.sizes() == {"a": 150}


@pytest.mark.parametrize("sizes", [{}, {"a": 0}, {"a": -5}, {"b": 7}])
def test_a_checkpoint_that_does_not_say_the_size_is_believed(sizes: dict[str, int]) -> None:
    book = ExampleLedgers()
    book.members([0])
    book.restore([Span("a", 0, 8)], sizes)
    assert book.lease(*lease(0)).spans == (Span("a", 8, 12),)


def in_order(order: int, **more: int | bool) -> Lease:
    return msgspec.structs.replace(lease(0, count=1)[1], order=order, **more)


def test_workers_with_different_orders_are_told() -> None:
    book = book_of(0, 1)
    book.lease(0, in_order(7))
    book.lease(1, in_order(7))
    with pytest.raises(ValueError, match=r"worker:1 and others deal.*'a' in different orders"):
        book.lease(1, in_order(8))
    assert book.lease(1, in_order(7)).spans == (Span("a", 8, 12),)


def test_an_order_may_change_between_epochs_only() -> None:
    book = book_of(0)
    book.lease(0, in_order(7, batch=100))
    with pytest.raises(ValueError, match="in different orders within an epoch"):
        book.lease(0, in_order(8))
    book.finish(0, [Span("a", 0, 100)])
    assert book.lease(0, in_order(8)).spans == (Span("a", 100, 104),)
    assert book.orders() == {"a": 8}


def test_who_asks_for_the_rest_of_the_order_before_hears_that_there_is_none() -> None:
    book = book_of(0, 1)
    book.lease(0, in_order(7, batch=100))
    assert not book.lease(1, in_order(7, until=100)).finished
    book.finish(0, [Span("a", 0, 100)])
    book.lease(0, in_order(8, until=200))
    assert book.lease(1, in_order(7, until=100)) == Leased((), finished=True, epoch=1)
    assert book.orders() == {"a": 8}
    with pytest.raises(ValueError, match="in different orders within an epoch"):
        book.lease(1, in_order(7, until=200))


def test_the_size_may_change_between_epochs_where_that_is_meant() -> None:
    book = book_of(0, 1)
    book.lease(0, in_order(7, batch=100))
    with pytest.raises(ValueError, match="worker:1 has 30 examples of 'a' and others have 100"):
        book.lease(1, in_order(8, size=30, resized=True))
    book.finish(0, [Span("a", 0, 100)])
    with pytest.raises(ValueError, match="with resized=True"):
        book.lease(1, in_order(8, size=30))
    assert book.lease(1, in_order(8, size=30, resized=True)).spans == (Span("a", 30, 34),)
    assert (book.sizes(), book.orders()) == ({"a": 30}, {"a": 8})
    assert book.consumed() == (Span("a", 0, 30),)
    assert book.lease(0, in_order(7, until=100)) == Leased((), finished=True, epoch=1)


def test_what_others_hold_counts_as_finished_in_a_process_of_a_group() -> None:
    book = book_of(0, 1)
    book.own = 1
    book.lease(0, in_order(7, batch=50))
    book.lease(1, in_order(7, batch=50))
    with pytest.raises(ValueError, match="in different orders within an epoch"):
        book.lease(0, in_order(8))
    book.finish(1, [Span("a", 50, 100)])
    assert book.lease(0, in_order(8)).spans == (Span("a", 100, 104),)


@pytest.mark.parametrize("end, then", [(100, 100), (110, 200)])
def test_a_checkpoint_within_an_epoch_is_of_one_order(end: int, then: int) -> None:
    def restored() -> ExampleLedgers:
        book = book_of(0)
        book.restore([Span("a", 0, end)], {"a": 100}, {"a": 7})
        return book

    assert restored().lease(0, in_order(7)).spans == (Span("a", end, end + 4),)
    assert restored().lease(0, in_order(0)).spans == (Span("a", end, end + 4),)
    assert restored().lease(0, in_order(8, resized=True)).spans == (Span("a", then, then + 4),)
    book = restored()
    assert ExampleLedgers().orders() == {} and book.orders() == {"a": 7}
    if end % 100:
        with pytest.raises(ValueError, match=r"within an epoch of the data set 'a'.*resized=True"):
            book.lease(0, in_order(8))
        assert book.orders() == {"a": 7} and book.consumed() == (Span("a", 0, end),)
    else:
        assert book.lease(0, in_order(8)).spans == (Span("a", end, end + 4),)


def test_ledgers_that_move_keep_their_orders() -> None:
    book = book_of(0)
    book.lease(0, in_order(7))
    moved = ExampleLedgers()
    moved.resume(book.export())
    assert moved.orders() == {"a": 7}
