"""A trained model leaves the project: half precision, loadable, with a card whose numbers are those of the tables."""

import shutil

import pytest
import torch
from click.testing import CliRunner
from evidence_runs import write_experiment, write_run

from tupe.evaluation.probes import load_model
from tupe.experiments import collect
from tupe.experiments.evidence import save_half
from tupe.experiments.plan import Trial
from tupe.experiments.release import command

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("own_module_cache")


@pytest.fixture
def place(tmp_path, pretrained):
    """An experiment in which the run of TUPE-R with seed 1 has real weights."""
    write_experiment(tmp_path / "runs", ["main"], seeds=2)
    trial = Trial("main", "tupe_r", "mini", 5000, 1e-3, 1)
    shutil.rmtree(trial.folder(tmp_path / "runs"))
    write_run(tmp_path / "runs", trial, 5.4321, along=(5000,))
    save_half(pretrained, trial.folder(tmp_path / "runs") / "model.pt")
    collect.write(collect.collect(tmp_path / "runs", collect.read(tmp_path)), tmp_path / "tables")
    return tmp_path


def run(place, data, *words):
    given = ["--runs", place / "runs", "--evidence", place / "tables", "--data", data, "--output", place / "out"]
    return CliRunner().invoke(command, [*map(str, given), *words])


def test_the_folder_computes_what_the_weights_do(place, vocabulary, pretrained):
    result = run(place, vocabulary)
    assert result.exit_code == 0, result.output
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(place / "out", trust_remote_code=True).eval()
    assert {weight.dtype for weight in theirs.parameters()} == {torch.float32}
    model, _ = load_model(pretrained, vocabulary)
    ids = torch.tensor([[0, *range(5, 17), 2]])
    with torch.no_grad():
        difference = (theirs(ids).logits - model(ids)[0]).abs().max()
    assert 0 < difference < 0.01  # of half precision
    card = (place / "out" / "README.md").read_text()
    assert "| validation loss, bits per masked token | 5.432 |" in card and "{{" not in card
    assert "learning rate\n0.001 " in card


def test_runs_that_are_not_there_are_refused(place, vocabulary):
    result = run(place, vocabulary, "--seed=9")
    assert result.exit_code == 2 and "no finished run of tupe_r, seed 9" in result.output
    result = run(place, vocabulary, "--model=bert_a")
    assert result.exit_code == 2 and "model.pt" in result.output and not (place / "out").exists()
