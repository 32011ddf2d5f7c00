"""Contenders take turns, all once in each; what is computed from their times. No claims about time."""

import json

from lab.bench.instrument import compared, ratios, table, take_turns, timed, write


def test_every_contender_has_one_step_in_every_turn(capsys):
    calls = []

    def step(name):
        return lambda turn: calls.append((turn, name)) or [float(turn), 1.0]

    kept = take_turns({name: step(name) for name in "abc"}, 5, "tiny,", warmup=2)
    turns = [calls[i : i + 3] for i in range(0, 21, 3)]
    assert [{*names} for names in turns] == [{(turn, name) for name in "abc"} for turn in range(7)]
    assert len({tuple(name for _, name in names) for names in turns}) > 1  # the order changes
    assert {*kept} == {*"abc"} and kept["b"].tolist() == [[float(turn), 1.0] for turn in range(2, 7)]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 7 and lines[0].startswith("tiny, warm-up: a 1.00 s  b 1.00 s")
    assert lines[6].startswith("tiny, turn 5/5: a 7.00 s") and lines[6].endswith("; 0.0 minutes left for these turns")


def test_parts_of_a_step_are_called_in_order():
    calls = []
    seconds = timed("cpu", lambda: calls.append("forward"), lambda: calls.append("backward"))(0)
    assert calls == ["forward", "backward"] and len(seconds) == 2 and min(seconds) >= 0


def rows(setting, **seconds):
    """Of contenders with these seconds [turns, parts]."""
    steps = {name: lambda turn, some=some: some[turn - 1] for name, some in seconds.items()}
    return compared(steps, 3, {"setting": setting})


def test_times_are_compared_within_a_turn(tmp_path):
    ours = [[1.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    made = rows("CoLA", ours=ours, hf=[[3.0, 0.0], [2.0, 2.0], [20.0, 20.0]]) + rows("RTE", hf=[[0.1, 0.2]] * 3)
    assert made[0]["steps"] == ours and made[0]["ms"] == [1000, 1000]
    assert ratios(made[1], made[0]).tolist() == [3, 2, 10]
    assert table(made, {"forward ms": "{ms[0]:.1f}"}).markdown().splitlines() == [
        "| setting | contender | forward ms | time, the first one's is 1 (range) |",
        "| --- | --- | ---: | ---: |",
        "| CoLA | ours | 1000.0 | 1.000 (1.00 to 1.00) |",
        "| CoLA | hf | 3000.0 | 3.000 (2.00 to 10.00) |",
        "| RTE | hf | 100.0 | 1.000 (1.00 to 1.00) |",
    ]
    page = write(tmp_path / "new" / "out", {"cpu": "this one", "gpu": None}, made, {}, "A note.")
    assert page.startswith("cpu this one\n\nA note.\n\n| setting |")
    assert (tmp_path / "new" / "out.md").read_text() == page
    assert json.loads((tmp_path / "new" / "out.json").read_text())["rows"] == made
