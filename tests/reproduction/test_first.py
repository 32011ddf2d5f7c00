"""The commands of the first protocol: what they train, score and write."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from evidence_runs import write_experiment, write_run

from reproduction import first
from reproduction.__main__ import main
from tupe.evaluation.minimal_pairs import Pair, Paradigm
from tupe.experiments import collect, training
from tupe.experiments.plan import PLAN, Trial
from tupe.experiments.training import conclude


def invoke(*words):
    return CliRunner().invoke(main, list(map(str, words)), prog_name="python -m reproduction")


def planned(place, *words):
    return invoke("evidence", "--data", place, "--output", place / "out", "--dry-run", *words)


def test_every_command_explains_itself():
    for name in main.commands:
        assert invoke(name, "--help").output.startswith(f"Usage: python -m reproduction {name} ")


def test_a_model_that_is_not_planned_is_refused(tmp_path):
    result = planned(tmp_path, "--models", "bert_b")
    assert result.exit_code == 2 and "'bert_b'; did you mean 'bert_" in result.output
    result = planned(tmp_path, "--models", "nopos", "--stages", "main")
    assert result.exit_code == 2 and "no stage of main has a model 'nopos'" in result.output


def test_stages_without_a_model_are_left_out(tmp_path):
    result = planned(tmp_path, "--models", "nopos", "--stages", "first,main")
    assert result.exit_code == 0 and len(result.output.splitlines()) == 3


def test_dry_run_prints_every_command(tmp_path):
    lines = planned(tmp_path, "--stages", "pilot", "--models", "cls_zero", "--cpu").output.splitlines()
    assert len(lines) == len(PLAN["learning_rates"])
    assert all("--cls=zero" in line and line.endswith("--cpu") for line in lines)
    assert not (tmp_path / "out").exists()
    write_experiment(tmp_path / "out", ["pilot"])
    (line,) = planned(tmp_path, "--stages", "main", "--models", "tupe_r", "--seeds", "2").output.splitlines()
    assert "--arch=tupe_r_mini" in line and "--lr=0.0005" in line  # half of the pilot's best


def test_runs_are_scored_along_training(pretrained, vocabulary, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SENTENCES", 10)
    monkeypatch.setattr(training, "TOKENS", 300)
    monkeypatch.setitem(first.CLAIMS, "scoring", {"sentences": 10, "pairs": 1, "pairs_after": [500]})
    trial = Trial("main", "tupe_r", "mini", 1500, 1e-3, 1)
    for name in ("checkpoint_1_500.pt", "checkpoint_1_1000.pt", "checkpoint_last.pt"):
        shutil.copy(pretrained, tmp_path / name)
    conclude(vocabulary, trial, tmp_path, "finished")
    paradigms = [Paradigm("order", "order", [Pair("the cat sat on a mat.", "cat the sat on a mat.")])]
    first.score(vocabulary, trial, tmp_path, paradigms)
    order = json.loads((tmp_path / "order.json").read_text())
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert list(order) == ["500", "1000", "1500"] and order["1500"] == content["order"]
    there = sorted(path.name for path in (tmp_path / "pairs").glob("*/*"))
    assert there == [collect.SCORED, collect.SCORED, "order.npz", "order.npz"]
    with np.load(tmp_path / "pairs" / "1500" / "order.npz") as arrays:
        assert arrays["same_words"].tolist() == [True]
    monkeypatch.setattr(first, "order_scores", None)  # nothing is computed again
    first.score(vocabulary, trial, tmp_path, paradigms)


@pytest.fixture
def root(tmp_path, monkeypatch, pretrained):
    """A clone's pages, and an experiment of which all has run. Figure 6 comes from the weights of a TUPE-A, here of
    another model with untied positions."""
    write_experiment(tmp_path / "out")
    trial = Trial("main", "tupe_a", "mini", 5000, 5e-4, 1)
    shutil.copy(pretrained, trial.folder(tmp_path / "out") / "model.pt")
    monkeypatch.setattr(first, "ROOT", tmp_path)
    monkeypatch.setattr(first, "EVIDENCE", tmp_path / "docs/evidence")
    (tmp_path / "docs").mkdir()
    for page in ("README.md", "docs/results.md"):
        (tmp_path / page).write_text(f"# Title\n{first.BEGIN}\nSTALE\n{first.END}\nrest\n")
    return tmp_path


def test_one_command_writes_pages_and_figures(root, vocabulary, monkeypatch):
    words = ["claims", "--evidence", root / "docs/evidence"]
    result = invoke(*words, "--runs", root / "out", "--data", vocabulary)
    assert result.exit_code == 0, result.output
    drawn = {path.name for path in (root / "docs/figures").iterdir()}
    assert drawn == {f"claims_{figure.__name__}.png" for figure in first.FIGURES}
    readme, page = ((root / name).read_text() for name in ("README.md", "docs/results.md"))
    for text in (readme, page):
        assert text.startswith("# Title\n") and text.endswith("rest\n") and "STALE" not in text
    every = (root / "docs/evidence/contrasts.md").read_text()
    assert all(f"(../figures/{name})" in every for name in drawn - {"claims_lasting.png"})
    assert "(figures/claims_lasting.png)" in page and "(two seeds" in readme
    assert "| tupe_a_tie_cls - bert_a | positions apart from words |" in every
    assert "| positions apart from words | `tupe_a_tie_cls` over `bert_a` |" in page
    assert {path.stem for path in (root / "docs/evidence").glob("*.md")} == {*first.PAGES}
    shutil.rmtree(root / "out")  # the tables alone give the same pages
    (root / "docs/evidence/main.md").unlink()
    monkeypatch.setattr(first, "FIGURES", ())
    assert invoke(*words).exit_code == 0
    assert (root / "docs/results.md").read_text() == page and (root / "docs/evidence/main.md").exists()
    (root / "README.md").write_text("no markers")
    result = invoke(*words)
    assert result.exit_code == 2 and "README.md needs the lines" in result.output


def test_tables_of_ones_own_leave_the_pages_of_the_project_alone(root, vocabulary, monkeypatch):
    monkeypatch.setattr(first, "FIGURES", ())
    result = invoke("claims", "--evidence", root / "mine", "--runs", root / "out", "--data", vocabulary)
    assert result.exit_code == 0, result.output
    assert "(figures/claims_lasting.png)" in (root / "mine/results.md").read_text()
    assert "(figures/claims_loss.png)" in (root / "mine/contrasts.md").read_text()
    assert all("STALE" in (root / page).read_text() for page in ("README.md", "docs/results.md"))
    assert invoke("claims", "--runs", root / "nowhere").exit_code == 2


def test_of_a_part_of_the_runs_there_are_tables_only(tmp_path):
    """... for `tupe compare --position` on other text."""
    for number, lr in enumerate(PLAN["learning_rates"]):
        write_run(tmp_path / "out", Trial("pilot", "nopos", "tiny", 5000, lr, 101), 7 + number)
    result = invoke("claims", "--evidence", tmp_path / "mine", "--runs", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "no pages yet; missing: first (bert_a, " in result.output and "longer (bert_a, bert_r" in result.output
    assert {path.suffix for path in (tmp_path / "mine").iterdir()} == {".gz"}
    result = invoke("claims", "--evidence", tmp_path / "empty")
    assert result.exit_code == 2 and "no table of finished runs" in result.output
