"""What a run says of the time that it takes, and which losses end it."""

import math
import time

import pytest
from helpers import wait_until

from tupe.run import progress
from tupe.run.progress import IN_A_ROW, Progress

DAY = 24 * 3600


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.034, "0.034 s"), (42, "42 s"), (90, "1 min 30 s"), (3599.9, "1 h 0 min"), (12000, "3 h 20 min"),
        (DAY, "24 h 0 min"), (2 * DAY, "2 days"), (400 * DAY, "400 days"), (8.8 * 365 * DAY, "8.8 years"),
    ],
)  # fmt: skip
def test_a_time_in_words(seconds, words):
    assert progress.in_words(seconds) == words


class Clock:
    now = 1000.0

    def pass_of(self, run, seconds):
        self.now += seconds
        run.passed()


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


def test_the_time_is_said_after_the_first_pass_and_after_five_updates(clock, begin, caplog):
    run = begin(1000, True)
    assert run.time_left(0) is None
    for update in range(7):
        run.begin(update, 4)
        for _ in range(4):
            clock.pass_of(run, 3 if update else 5)
    assert lines(caplog) == [
        "after the first pass of 4: 20 s an update, about 5 h 33 min on this machine for the 1,000 left",
        "after 5 updates: 12 s an update, about 3 h 19 min on this machine for the 995 left",
    ]
    assert (run.time_left(10), run.time_left(2000)) == ("3:18:00", "0:00:00")


def test_a_gpu_has_to_warm_up_and_a_run_may_have_no_known_end(clock, begin, caplog, monkeypatch):
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    for updates, cpu in ((100_000_000, False), (0, True)):
        run = begin(updates, cpu)
        run.begin(0, 1)
        clock.pass_of(run, 2)
    assert lines(caplog) == [
        "after the first pass: 2 s an update, at most 6.3 years on this machine for the 100,000,000 left",
        "after the first pass: about 2 s an update on this machine",
    ]


@pytest.mark.parametrize(("yes", "start", "seconds", "refused"), [
    (False, 0, 0.61, True), (False, 0, 0.60, False), (True, 0, 60, False), (False, 10, 60, False),
])  # fmt: skip
def test_a_cpu_asks_before_it_begins_what_takes_more_than_a_week(yes, start, seconds, refused, clock, begin):
    message = "^1,000,000 updates would take about 7 days on this CPU: name fewer .--max-update N.*, or add --yes$"
    run = begin(1_000_000, True, yes=yes)
    run.begin(start, 1)
    if refused:
        with pytest.raises(ValueError, match=message):
            clock.pass_of(run, seconds)
    else:
        clock.pass_of(run, seconds)


def test_silence_is_broken(begin, caplog, monkeypatch):
    """In the middle of whatever the process does, if it is one that tells."""
    monkeypatch.setattr(progress, "SILENCE", 0.01)
    begin(50, True, tells=False).begin(7, 1)
    run = begin(50, True)
    wait_until(lambda: "preparing the first update" in lines(caplog))
    run.begin(0, 8)
    wait_until(lambda: "update 1/50, pass 1 of 8" in lines(caplog))
    run.passed()
    run.passed()
    wait_until(lambda: any(line.startswith("update 1/50, pass 3 of 8: ") for line in lines(caplog)))
    assert not any("update 8" in line for line in lines(caplog))


def test_the_thread_that_looks_sleeps():
    """Also where there is no timeout: fairseq's own default is -1."""
    assert [progress.seconds_between_looks(timeout) for timeout in (-1, 0, 20, 600)] == [10, 10, 2, 10]


def test_losses_that_end_a_run(begin):
    def follow(losses):
        """The number of losses that are taken, and the message with which they end."""
        run = begin(0, True)
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
