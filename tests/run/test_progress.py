"""What a run says of the time that it takes, and which losses end it."""

import math
import time

import pytest

from tupe.run.progress import IN_A_ROW, Progress


class Clock:
    now = 1000.0


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes on when it is told to."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


@pytest.fixture
def begin(caplog):
    """Progress(*arguments), which ends with the test."""
    caplog.set_level("INFO")
    begun = []

    def begin(*arguments, **options):
        begun.append(Progress(*arguments, **options))
        return begun[-1]

    yield begin
    for run in begun:
        run.end()


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


def test_the_time_is_said_after_the_first_and_after_five_updates(clock, begin, caplog):
    run = begin(1000)
    assert run.time_left(0) is None
    for update in (0, 1, 1, 2, 3, 4, 5, 6):  # the second is skipped once
        run.begin(update)
        clock.now += 12 if update else 20
    assert lines(caplog) == [
        "after 1 update: 20 s an update, about 5:33:00 on this machine for the 999 left",
        "after 5 updates: 12 s an update, about 3:19:00 on this machine for the 995 left",
    ]
    assert (run.time_left(10), run.time_left(2000)) == ("3:18:00", "0:00:00")


def test_a_run_may_have_no_known_end(clock, begin, caplog):
    run = begin(0)
    for update in range(2):
        run.begin(update)
        clock.now += 2
    assert lines(caplog) == ["after 1 update: 2 s an update"]


def test_losses_that_end_a_run(begin):
    def follow(losses):
        """The number of losses that are taken, and the message with which they end."""
        run = begin(0)
        for n, loss in enumerate(losses):
            try:
                run.follow(loss)
            except FloatingPointError as error:
                return n, str(error)
        return len(losses), None

    falling = [10 - n / 100 for n in range(500)]
    assert follow([*falling, *[20.0] * 200]) == (700, None)
    assert follow([*falling, math.nan])[0] == 500 and "nan" in follow([*falling, math.nan])[1]
    assert follow([math.inf])[0] == 0
    assert follow([None] * (IN_A_ROW - 1) + [5.0] + [None] * (IN_A_ROW - 1)) == (2 * IN_A_ROW - 1, None)
    assert follow([5.0] + [None] * IN_A_ROW)[0] == IN_A_ROW
