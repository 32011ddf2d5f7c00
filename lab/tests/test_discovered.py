"""Curves of all encodings: exits, delays and offsets from made-up runs whose values are known."""

import csv
import gzip
import math

import numpy as np
import pytest

from lab import discover, discovered
from lab.discover import LENGTHS, UPDATES, Run

UPDATE = np.arange(50, UPDATES + 1, 50)


def falling(exit, above=0.0):
    """A loss that crosses 8.5 at `exit` on its way from 9 to 6, and is `above` RoPE's from there on."""
    return np.interp(UPDATE, [exit - 100, exit, exit + 100], [9.0, 8.5, 7.0 + above])


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.setattr(discover, "TABLES", tmp_path)
    monkeypatch.setattr(discovered, "TABLES", tmp_path)
    curves = {Run("nopos", 0.001, 1): np.full(60, 9.0), Run("nopos", 0.002, 1): np.full(60, 9.5)}
    for seed in (1, 2, 3):
        curves[Run("rope", 0.001, seed)] = falling(500)
        curves[Run("t5", 0.001, seed)] = falling(900 + 10 * seed, 0.25)
    curves[Run("fire", 0.001, 1)] = falling(2600)
    curves[Run("rope", 0.002, 1)], curves[Run("late", 0.002, 1)] = falling(400), falling(700, 0.75)
    rows = []
    for run, curve in curves.items():
        changes = {f"change_{n}": "" if run.encoding == "t5" else 0.5 for n in LENGTHS[1:]}
        rows.append({**run._asdict(), "loss": curve[-1], "order": 0.9, "parameters": 66, **changes})
    with (tmp_path / "runs.csv").open("w") as file:
        writer = csv.DictWriter(file, discovered.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    lines = [",".join(map(str, [*run, *curve])) for run, curve in curves.items()]
    (tmp_path / "curves.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))


def test_exits_delays_and_offsets_are_those_of_the_curves(tables):
    found = {entry.encoding: entry for entry in discovered.entries()}
    assert found["nopos"].rate == 0.001 and found["nopos"].exits == [None]
    assert found["rope"].delays == pytest.approx([0, 0, 0]) and found["rope"].offsets == pytest.approx([0, 0, 0])
    assert found["t5"].exits == pytest.approx([910, 920, 930], abs=15)  # between points that are 50 updates apart
    assert found["t5"].delays == pytest.approx([410, 420, 430], abs=15)
    assert found["t5"].offsets == pytest.approx([0.25, 0.25, 0.25])
    assert found["late"].delays == pytest.approx([300], abs=15)  # from RoPE at the same rate
    assert found["fire"].delays == pytest.approx([2100], abs=15) and found["fire"].offsets == [None]  # too late


def test_the_page_has_a_row_for_each_and_names_what_has_not_run(tables):
    text = discovered.results(discovered.entries())
    row = next(line for line in text.splitlines() if line.startswith("| T5"))
    assert "| 3 | 0.001 |" in row and "refused" in row and "0.25 [0.25, 0.25]" in row
    assert "never" in next(line for line in text.splitlines() if line.startswith("| no positions"))
    assert (
        "`kerple`" in text.rpartition("Have not run yet")[2] and "`rope`" not in text.rpartition("Have not run yet")[2]
    )
    named = {text.get_text() for text in discovered.draw(discovered.entries()).axes[0].texts}
    assert named == {"no positions", "RoPE", "T5", "fire"}  # a grey line, which ends lowest


def test_needs_are_sorted_best_first_and_mark_single_runs(tables):
    rows = {cells[0]: cells[2] for _, cells in discovered.needs(discovered.entries()).rows}
    assert rows["a short training"] == "RoPE 500, `late`* 700, T5 911, `fire`* 2,600"
    assert rows["a long training"] == "RoPE 0.00, T5 0.25, `late`* 0.75"  # FIRE exits too late
    assert rows["inputs of 1,024 tokens"].startswith("`fire`* 7.5") and "T5" not in rows["inputs of 1,024 tokens"]


def test_the_csv_has_numbers_alone(tables):
    header, *rows = csv.reader(discovered.means(discovered.entries()).csv().splitlines())
    found = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert float(found["t5"]["exit"]) == pytest.approx(911, abs=1) and float(found["t5"]["offset"]) == 0.25
    assert found["nopos"]["exit"] == found["fire"]["offset"] == found["t5"]["change_1024"] == ""
    assert found["rope"]["step"] and found["rope"]["parameters"] == "66"


def test_predictions_are_judged_by_the_tables(tables, monkeypatch):
    monkeypatch.setattr(discover, "TABLES", discovered.DOCS / "evidence" / "discovery")
    found = {cells[0]: cells[2] for _, cells in discovered.predictions(discovered.entries()).rows}
    assert found["RoPE and TUPE-R exit first"] == "no"  # DeBERTa and RoPE do
    assert found["No positions never exits"] == "yes" and set(found.values()) == {"yes", "no"}
    assert not discovered.complete() or "### The predictions" in discovered.results(discovered.entries())


def test_runs_of_the_committed_tables_are_over(tables, tmp_path):
    """So that a fresh folder goes on where the tables are. Others follow once the ten are complete."""
    left = [run for run, loss in discover.planned(tmp_path / "fresh").items() if loss is None]
    assert Run("rope", 0.001, 3) not in left and Run("rope", 0.002, 3) in left and len(left) == 60 - 9
    named = discover.planned(tmp_path / "fresh", ["fire"])
    assert len(named) == 6 and [run for run, loss in named.items() if loss] == [Run("fire", 0.001, 1)]


def test_the_pages_first_words_are_those_of_the_tables(monkeypatch):
    """The summary of docs/discovery.md, and what README says for those who cannot see the picture."""
    monkeypatch.setattr(discover, "TABLES", discovered.DOCS / "evidence" / "discovery")
    of = {entry.encoding: entry for entry in discovered.entries() if entry.encoding in discover.TEN}
    early = [of[name] for name in ("deberta", "rope", "shaw", "tupe_r", "tupe_a", "t5")]
    assert all(400 <= one.exit <= 900 for one in early)
    offsets = [one.offset for one in early]
    assert max(offsets) - min(offsets) < 0.1 and min(of["sinusoidal"].exit, of["alibi"].exit) > 2400
    tens = {name: f"{10 * round(entry.exit / 10):,}" for name, entry in of.items() if entry.exit < math.inf}
    assert f"Absolute positions take {tens['absolute']} updates" in discovered.PAGE.read_text(encoding="utf-8")
    said = (
        f"after about {tens['deberta']} to {tens['tupe_a']} updates, T5 after {tens['t5']}, absolute positions after "
        f"{tens['absolute']}, sinusoids after {tens['sinusoidal']}, ALiBi after {tens['alibi']}]"
    )
    assert said in (discovered.DOCS.parent / "README.md").read_text(encoding="utf-8")
