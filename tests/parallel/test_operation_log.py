from __future__ import annotations

from trireme.parallel.operation_log import OperationLog, StageOperation


def test_each_reader_has_what_was_computed_while_it_read() -> None:
    log = OperationLog()
    made = [StageOperation(0, 0, "forward", number, number, number + 0.5) for number in range(3)]

    def compute(number: int) -> None:
        assert log.operations is not None
        log.operations.append(made[number])

    assert log.operations is None
    first = log.begin()
    compute(0)
    second = log.begin()
    compute(1)
    assert log.end(first) == made[:2]
    compute(2)
    assert log.end(second) == made[1:]
    assert log.operations is None  # nobody reads: nothing is recorded
    again = log.begin()
    assert log.end(again) == []
