"""The experiment on TUPE's claims: what is trained, at which rate, and that every command can be said."""

import pytest
from click.testing import CliRunner

from tupe import record
from tupe.encoder import Encoder
from tupe.experiments.evidence import CLAIMS, Trial, best_rates, command, final_losses, trials

RATES = dict.fromkeys(CLAIMS["models"], 1e-3)


def finish(output, model, lr, loss, seed=101, stage="pilot", state="finished"):
    folder = Trial(stage, model, "tiny", 5000, lr, seed).folder(output)
    folder.mkdir(parents=True)
    scores = [{"epoch": 1, "num_updates": n, "split": "valid", "loss": 5000 - n + loss} for n in (2500, 5000)]
    record.Record(
        "masked_lm", "bert_a_tiny", "", seed, lr, {"max_update": 5000}, ["valid"], scores=scores, state=state
    ).save(folder)


@pytest.mark.parametrize("name", CLAIMS["models"])
def test_models_can_be_built(name):
    from tupe.architectures import ARCHITECTURES

    model = CLAIMS["models"][name]
    position, cls = ARCHITECTURES[model["arch"]]
    options = {"position": model.get("position", position), "cls": model.get("cls", cls)}
    encoder = Encoder(20, 1, layers=2, width=8, ffn=16, heads=2, max_positions=6, **options)
    assert encoder.positions.name == options["position"]


def test_stages_are_planned_in_whole_blocks():
    main = trials("main", RATES)
    block = CLAIMS["stages"]["main"]["models"]
    assert [trial.model for trial in main] == block * 5
    assert [trial.seed for trial in main[:: len(block)]] == [1, 2, 3, 4, 5]
    assert {trial.size for trial in main} == {"mini"}
    pilot = trials("pilot", {}, models=["bert_a"])
    assert [trial.lr for trial in pilot] == CLAIMS["learning_rates"]
    assert len(trials("share", RATES, seeds=[1])) == 8
    with pytest.raises(ValueError, match="no learning rate for bert_r"):
        trials("main", {"bert_a": 1e-3, **{name: 1e-3 for name in block if name != "bert_r"}})


@pytest.mark.parametrize(("stage", "models"), [("mian", None), ("main", ["nopos"])])
def test_what_is_not_planned_is_refused(stage, models):
    with pytest.raises(ValueError, match=r"mian.*main|nopos"):
        trials(stage, RATES, models=models)


def test_rates_come_from_the_pilot_and_the_search_widens_at_its_edge(tmp_path):
    for lr, inside, edge in zip((5e-4, 1e-3, 2e-3, 4e-3), (6.0, 5.0, 5.5, 7.0), (8.0, 7.0, 6.5, 6.0), strict=True):
        finish(tmp_path, "tupe_r", lr, inside)
        finish(tmp_path, "bert_a", lr, edge)
    finish(tmp_path, "nopos", 5e-4, 9.0)
    finish(tmp_path, "factored", 5e-4, 1.0, state="failed")
    rates, needed = best_rates(tmp_path)
    assert rates == {"tupe_r": 1e-3, "bert_a": 4e-3, "nopos": 5e-4}
    assert needed == [Trial("pilot", "bert_a", "tiny", 5000, 8e-3, 101)]  # nopos has not tried all of them yet
    finish(tmp_path, "bert_a", 8e-3, 6.2)
    assert best_rates(tmp_path) == (rates, [])
    assert final_losses(tmp_path, "pilot")[Trial("pilot", "bert_a", "tiny", 5000, 8e-3, 101)] == 6.2


def test_dry_run_prints_every_command(tmp_path):
    words = ["--data", tmp_path, "--output", tmp_path / "out", "--stages", "pilot", "--models", "cls_zero", "--dry-run"]
    result = CliRunner().invoke(command, [*map(str, words), "--cpu"])
    lines = result.output.splitlines()
    assert result.exit_code == 0 and len(lines) == 4
    assert all("--cls=zero" in line and line.endswith("--cpu") for line in lines)
    assert not (tmp_path / "out").exists()
