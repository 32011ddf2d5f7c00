"""What a run says of the time that it takes."""

import time

import pytest
from helpers import wait_until

from tupe.common import pace

DAY = 24 * 3600


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.034, "0.034 s"), (42, "42 s"), (90, "1 min 30 s"), (3599.9, "1 h 0 min"), (12000, "3 h 20 min"),
        (DAY, "24 h 0 min"), (2 * DAY, "2 days"), (400 * DAY, "400 days"), (8.8 * 365 * DAY, "8.8 years"),
    ],
)  # fmt: skip
def test_a_time_in_words(seconds, words):
    assert pace.in_words(seconds) == words


class Clock:
    """A clock that goes on when it is told to; pass_of(s): a pass of so many seconds."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def pass_of(self, seconds):
        self.now += seconds
        pace.passed()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(pace, "SILENCE", 1e9)
    return Clock(monkeypatch)


def lines(caplog):
    return [record.getMessage() for record in caplog.records]


def test_the_time_is_said_after_the_first_pass_and_after_five_updates(clock, caplog):
    caplog.set_level("INFO")
    with pace.told(yes=False):
        pace.expect(1000, True)
        for update in range(7):
            pace.begin(update, 4)
            for _ in range(4):
                clock.pass_of(3 if update else 5)
    assert lines(caplog) == [
        "after the first pass of 4: 20 s an update, about 5 h 33 min on this machine for the 1,000 left",
        "after 5 updates: 12 s an update, about 3 h 19 min on this machine for the 995 left",
    ]


def test_a_gpu_has_to_warm_up_and_a_run_may_have_no_known_end(clock, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    for updates, cpu in ((100_000_000, False), (0, True)):
        with pace.told(yes=False):
            pace.expect(updates, cpu)
            pace.begin(0, 1)
            clock.pass_of(2)
    assert lines(caplog) == [
        "after the first pass: 2 s an update, at most 6.3 years on this machine for the 100,000,000 left",
        "after the first pass: about 2 s an update on this machine",
    ]


@pytest.mark.parametrize(("yes", "start", "seconds", "refused"), [
    (False, 0, 0.61, True), (False, 0, 0.60, False), (True, 0, 60, False), (False, 10, 60, False),
])  # fmt: skip
def test_a_cpu_asks_before_it_begins_what_takes_more_than_a_week(yes, start, seconds, refused, clock):
    message = "^1,000,000 updates would take about 7 days on this CPU: name fewer .--max-update N.*, or add --yes$"
    with pace.told(yes):
        pace.expect(1_000_000, True)
        pace.begin(start, 1)
        if refused:
            with pytest.raises(ValueError, match=message):
                clock.pass_of(seconds)
        else:
            clock.pass_of(seconds)


def test_silence_is_broken(caplog, monkeypatch):
    """In the middle of whatever the process does."""
    monkeypatch.setattr(pace, "SILENCE", 0.01)
    caplog.set_level("INFO")
    with pace.told(yes=False):
        pace.expect(50, True)
        wait_until(lambda: "preparing the first update" in lines(caplog))
        pace.begin(0, 8)
        wait_until(lambda: "update 1/50, pass 1 of 8" in lines(caplog))
        pace.passed()
        pace.passed()
        wait_until(lambda: any(line.startswith("update 1/50, pass 3 of 8: ") for line in lines(caplog)))


def test_a_process_that_tells_nothing(caplog):
    caplog.set_level("INFO")
    with pace.told(yes=False):
        pace.begin(0, 1)
        pace.passed()
        pace.spoke()
    pace.begin(0, 1)
    assert not lines(caplog)
