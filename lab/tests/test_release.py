"""A trained model leaves the project: half precision, loadable, with a card whose numbers are those of the tables."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from evidence_runs import write_experiment, write_run

from lab import collect
from lab.plan import Trial
from lab.release import command, of_both_protocols, renewed
from lab.training import save_half
from tupe.checkpoints.convert import convert
from tupe.evaluation.loading import load_model
from tupe.plugin.model import TupeModel

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"

from tupe.modeling_tupe import TupeForMaskedLM  # noqa: E402  (needs transformers)
from tupe.tokenization_tupe import TupeTokenizer  # noqa: E402


@pytest.fixture
def place(tmp_path, pretrained):
    """An experiment in which the run of TUPE-R with seed 1 has real weights."""
    write_experiment(tmp_path / "runs", ["main"], seeds=2)
    trial = Trial("main", "tupe_r", "mini", 5000, 5e-4, 1)
    shutil.rmtree(trial.folder(tmp_path / "runs"))
    write_run(tmp_path / "runs", trial, 5.4321)
    save_half(pretrained, trial.folder(tmp_path / "runs") / "model.pt")
    collect.write(collect.collect(tmp_path / "runs"), tmp_path / "tables")
    return tmp_path


def run(place, data, name="main/tupe_r/mini_5000_lr0.0005_seed1"):
    given = ["--runs", place / "runs", "--evidence", place / "tables", "--data", data, "--output", place / "out"]
    return CliRunner().invoke(command, [*map(str, given), "--run", name])


def test_the_folder_computes_what_the_weights_do(place, vocabulary, pretrained):
    result = run(place, vocabulary)
    assert result.exit_code == 0, result.output
    assert not list((place / "out").glob("*.py"))
    theirs = TupeForMaskedLM.from_pretrained(place / "out").eval()
    assert {weight.dtype for weight in theirs.parameters()} == {torch.float32}
    model, _ = load_model(pretrained, vocabulary)
    ids = torch.tensor([[0, *range(5, 17), 2]])
    with torch.no_grad():
        difference = (theirs(ids).logits - model(ids).logits).abs().max()
    assert 0 < difference < 0.01  # of half precision
    card = (place / "out" / "README.md").read_text()
    assert "| held-out loss, bits per masked token | 5.432 |" in card and "{{" not in card
    assert "learning rate\n0.0005, warm-up" in card


def test_runs_that_are_not_there_are_refused(place, vocabulary):
    result = run(place, vocabulary, "main/tupe_r/mini_5000_lr0.0005_seed9")
    assert result.exit_code == 2 and "no finished run 'main/tupe_r/mini_5000_lr0.0005_seed9'" in result.output
    result = run(place, vocabulary, "tupe_r")
    assert result.exit_code == 2 and "'tupe_r' is no run of the experiment" in result.output
    result = run(place, vocabulary, "main/bert_a/mini_5000_lr0.0005_seed1")
    assert result.exit_code == 2 and "model.pt" in result.output and not (place / "out").exists()


@pytest.mark.parametrize("folder", sorted(MODELS.glob("*")), ids=lambda folder: folder.name)
class TestReleased:
    """The models in models/."""

    def test_the_card_has_the_numbers_of_the_tables(self, folder):
        text = (folder / "README.md").read_text()
        trial = Trial.parse(re.search(r"one run, `(.*)`", text).group(1))
        assert text == renewed(of_both_protocols(), text) and folder.name == f"{trial.model}_{trial.size}"

    def test_they_are_small_and_compute_what_fairseqs_model_computes_from_their_weights(self, folder, tmp_path):
        assert sum(path.stat().st_size for path in folder.iterdir()) < 12e6 and not list(folder.glob("*.py"))
        theirs = TupeForMaskedLM.from_pretrained(folder).eval()
        convert(folder, "tupe", None, tmp_path)
        ours = TupeModel.from_pretrained(tmp_path, "checkpoint.pt")
        ids = torch.randint(5, 8000, (3, 40), generator=torch.Generator().manual_seed(1))
        ids[:, 0], ids[:, -1] = 0, 2
        with torch.no_grad():
            torch.testing.assert_close(theirs(ids).logits, ours(ids)[0], rtol=0, atol=1e-4)

    def test_they_fill_a_mask(self, folder):
        parts = {"model": TupeForMaskedLM.from_pretrained(folder), "tokenizer": TupeTokenizer.from_pretrained(folder)}
        fill = transformers.pipeline("fill-mask", **parts)
        assert "window" in {answer["token_str"].strip("▁ ") for answer in fill("she looked out of the <mask> .")}
