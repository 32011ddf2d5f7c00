"""Contenders take turns, all once in each. No claims about time."""

from tupe.bench.turns import take_turns, timed


def test_every_contender_has_one_step_in_every_turn():
    calls, lines = [], []

    def step(name):
        return lambda turn: calls.append((turn, name)) or [float(turn), 1.0]

    kept = take_turns({name: step(name) for name in "abc"}, 5, warmup=2, say=lines.append)
    turns = [calls[i : i + 3] for i in range(0, 21, 3)]
    assert [{*names} for names in turns] == [{(turn, name) for name in "abc"} for turn in range(7)]
    assert len({tuple(name for _, name in names) for names in turns}) > 1  # the order changes
    assert {*kept} == {*"abc"} and kept["b"].tolist() == [[float(turn), 1.0] for turn in range(2, 7)]
    assert len(lines) == 7 and lines[0].startswith("warm-up: a 1.00 s  b 1.00 s")
    assert lines[6].startswith("turn 5/5: a 7.00 s") and lines[6].endswith("; 0.0 minutes left for these turns")


def test_parts_of_a_step_are_called_in_order():
    calls = []
    seconds = timed("cpu", lambda: calls.append("forward"), lambda: calls.append("backward"))(0)
    assert calls == ["forward", "backward"] and len(seconds) == 2 and min(seconds) >= 0
