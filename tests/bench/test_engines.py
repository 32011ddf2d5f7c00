"""Both engines in turns. No claims about time."""

import time

from click.testing import CliRunner

from tupe.bench import engines
from tupe.cli import main


def test_what_one_training_takes_longer_than_the_other_is_measured(data, monkeypatch):
    calls, clocks = [], set()

    def seconds(engine, data, updates, words, clock):
        clocks.add(clock)
        calls.append((engine, updates, words))
        return 3.0 + updates * (0.02 if engine == "fairseq" else 0.01)

    monkeypatch.setattr(engines, "seconds", seconds)
    words = ["--updates=100", "--rounds=2", "--arch=tupe_r_tiny"]
    result = CliRunner().invoke(main, ["bench", "engines", f"--data={data}", *words])
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.stdout.splitlines() if "|" in line]
    assert rows[2:] == [
        ["fairseq", "50", "50", "50"], ["transformers", "100", "100", "100"], ["transformers : fairseq", "2", "2", "2"]
    ]  # fmt: skip
    assert sorted(calls) == sorted(
        2 * [(engine, n, ("--arch=tupe_r_tiny",)) for engine in engines.ENGINES for n in (110, 10)]
    )
    assert CliRunner().invoke(main, ["bench", "engines", f"--data={data}", *words, "--cpu"]).exit_code == 0
    assert clocks == {time.perf_counter, engines.processor_time}


def test_a_training_that_fails_says_why(data):
    import pytest

    with pytest.raises(ValueError, match="--dropout is 3; valid: 0 to 0.99"):
        engines.seconds("transformers", data, 10, ["--dropout=3"])
