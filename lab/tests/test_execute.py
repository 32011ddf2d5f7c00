"""Runs of a plan: the rates that follow from earlier ones, and what is kept of each."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from lab import collect, execute
from lab.execute import evaluate_and_prune, save_half
from lab.plan import PLAN, Trial, best_rates, final_losses, trials
from tupe.checkpoints.gate import read_checkpoint
from tupe.evaluate.order import evaluate
from tupe.run import record
from tupe.text import TextEncoder

# The pilot's losses where every model's best rate is 1e-3, and half of it has run, too
PILOT = {
    Trial("pilot", model, "tiny", 5000, lr, 101): abs(lr - 1e-3)
    for model in PLAN["models"] for lr in (5e-4, *PLAN["learning_rates"])
}  # fmt: skip


def finish(output, model, lr, loss, seed=101, stage="pilot", reason="diverged: nan"):
    """loss: math.inf of a run that failed for that reason."""
    folder = Trial(stage, model, "tiny", 5000, lr, seed).folder(output)
    folder.mkdir(parents=True)
    scores = [{"epoch": 1, "num_updates": n, "split": "valid", "loss": 5000 - n} for n in (2500, 5000)]
    run = record.Record("masked_lm", "bert_a_tiny", "", seed, lr, {"max_update": 5000}, ["valid"], scores=scores)
    run.state = "finished" if math.isfinite(loss) else "failed"
    if run.state == "failed":
        run.failure = {"reason": reason, "status": 1}
    else:
        losses = {"mean": loss * math.log(2), "error": 0.01, "by_position": {}}
        order = {"sentences": 1, "accuracy": 1, "accuracy_error": 0, "margin": 1, "margin_error": 0}
        content = {"loss": losses, "order": order, "cls": {"ratio": []}}
        (folder / "evaluation.json").write_text(json.dumps(content))
    run.save(folder)


def test_stages_are_planned_in_whole_blocks():
    main = trials("main", PILOT)
    block = PLAN["stages"]["main"]["models"]
    assert [trial.model for trial in main] == block * 5
    assert [trial.seed for trial in main[:: len(block)]] == [1, 2, 3, 4, 5]
    assert {trial.size for trial in main} == {"mini"}
    pilot = trials("pilot", {}, models=["bert_a"])
    assert [trial.lr for trial in pilot] == PLAN["learning_rates"]
    assert len(trials("share", PILOT, seeds=[1])) == 8
    first = trials("first", {})  # needs no pilot
    assert {trial.lr for trial in first} == {2e-3} and {trial.updates for trial in first} == {1250}
    without = {trial: loss for trial, loss in PILOT.items() if trial.model != "bert_r"}
    assert {trial.model for trial in trials("main", without)} == {*block} - {"bert_r"}


def test_no_rate_where_every_one_diverged(tmp_path):
    for lr in (*PLAN["learning_rates"], 8e-3, 16e-3):
        finish(tmp_path, "bert_a", lr, math.inf)
    assert best_rates(final_losses(tmp_path))[0] == {}


def test_a_run_that_failed_is_tried_again_unless_it_diverged(tmp_path, monkeypatch):
    tried = []
    monkeypatch.setattr(execute.runner, "run", lambda jobs, *_, **__: tried.extend(
        job.folder.parts[-2] for job in jobs if record.state_of(job.folder) == "open") or {})  # fmt: skip
    monkeypatch.setattr(execute, "check_data", lambda *_: None)
    planned = [Trial("pilot", model, "tiny", 5000, 1e-3, 101) for model in ("bert_a", "tupe_r")]
    for trial, reason in zip(planned, ("no space left on device", "diverged: nan"), strict=True):
        finish(tmp_path, trial.model, trial.lr, math.inf, reason=reason)
    execute.train(tmp_path, tmp_path, planned, 1, (), Trial.job, {}.copy, 1)
    assert tried == ["bert_a"]


def test_a_folder_has_runs_on_one_data_set(vocabulary, tmp_path, monkeypatch):
    """... with held-out text enough for the evaluation, which is known before the first training, not after it."""

    def train(data, needed=300):
        planned = trials("first", {}, models=["nopos"])
        execute.train(data, tmp_path / "out", planned, 1, (), Trial.job, {}.copy, needed)

    monkeypatch.setattr(execute.runner, "run", lambda jobs, *_, **__: dict.fromkeys(jobs, "finished"))
    with pytest.raises(ValueError, match="fewer than the 400,000 of the evaluation"):
        train(vocabulary, 400_000)
    assert not (tmp_path / "out").exists()
    train(vocabulary)
    train(vocabulary)
    for name in ("dict.txt", "valid.bin", "valid.idx"):
        shutil.copy(vocabulary / name, tmp_path)
    (tmp_path / "train.bin").write_bytes(b"other text")
    with pytest.raises(ValueError, match="has runs on other data"):
        train(tmp_path)


def test_a_folder_that_holds_another_run_than_its_name_says(tmp_path):
    finish(tmp_path, "bert_a", 1e-3, 6.0)
    folder = Trial("pilot", "bert_a", "tiny", 5000, 1e-3, 101).folder(tmp_path)
    run = record.read(folder)
    run.budget = {"max_update": 20}
    run.save(folder)
    with pytest.raises(ValueError, match=r"pilot/bert_a/.* was trained for \{'max_update': 20\} at 0.001 with"):
        final_losses(tmp_path)


def test_no_half_precision_on_a_gpu():
    """... unless it is asked for: recipes have fp16."""
    job = Trial("controls", "bert_a", "tiny", 5000, 1e-3, 1).job("data", Path("out"))
    assert "--precision=float32" in job.command
    config = {"common": {"fp16": False}, "model": {"autocast": "bf16"}}
    assert collect.precision_of(config) == "bfloat16 autocast"
    assert collect.precision_of({**config, "common": {"fp16": True}}) == "--fp16"


def test_a_record_that_was_cut_off_is_left_out(tmp_path):
    for model in ("bert_a", "tupe_r"):
        finish(tmp_path, model, 1e-3, 6.0)
    path = Trial("pilot", "bert_a", "tiny", 5000, 1e-3, 101).folder(tmp_path) / record.NAME
    path.write_text(path.read_text()[:40])
    assert [trial.model for trial in final_losses(tmp_path)] == ["tupe_r"]


@pytest.mark.parametrize("widened", [6.2, math.inf])
def test_rates_come_from_the_pilot_and_the_search_widens_at_its_edge(widened, tmp_path):
    for lr, inside, edge in zip((5e-4, 1e-3, 2e-3, 4e-3), (6.0, 5.0, 5.5, 7.0), (8.0, 7.0, 6.5, 6.0), strict=True):
        finish(tmp_path, "tupe_r", lr, inside)
        finish(tmp_path, "bert_a", lr, edge)
    finish(tmp_path, "nopos", 5e-4, 9.0)
    finish(tmp_path, "factored", 5e-4, math.inf, reason="out of memory")
    rates, needed = best_rates(final_losses(tmp_path))
    assert rates == {"tupe_r": 1e-3}  # nopos has one rate of four, and bert_a's best one is at the edge
    assert needed == {"bert_a": [8e-3]}
    without = {trial: loss for trial, loss in final_losses(tmp_path).items() if trial.lr != 5e-4}
    assert best_rates(without)[1] == {"bert_a": [8e-3], "tupe_r": [5e-4]}
    finish(tmp_path, "bert_a", 8e-3, widened)
    losses = final_losses(tmp_path)
    assert best_rates(losses) == ({"tupe_r": 1e-3, "bert_a": 4e-3}, {})
    assert losses[Trial("pilot", "bert_a", "tiny", 5000, 8e-3, 101)] == pytest.approx(widened)
    assert Trial("pilot", "factored", "tiny", 5000, 5e-4, 101) not in losses  # it may be run again
    rates = best_rates(losses)[0]
    del losses[Trial("pilot", "tupe_r", "tiny", 5000, 4e-3, 101)]
    assert best_rates(losses)[0] == rates  # half and twice the best rate have run
    del losses[Trial("pilot", "tupe_r", "tiny", 5000, 2e-3, 101)]
    assert set(best_rates(losses)[0]) == {"bert_a"}


def test_the_pilot_ends_where_the_best_rate_lies_between_two_others():
    """... whatever another model still needs: bert_a's best rate lies at the edge, tupe_r's is followed to 0.016."""
    losses = {Trial("pilot", "bert_a", "tiny", 5000, lr, 101): lr for lr in PLAN["learning_rates"]}
    rounds = []

    def train(new):
        rounds.append(new)
        assert len(rounds) < 10, "the pilot does not end"
        losses.update({trial: abs(trial.lr - 0.016) for trial in new})

    execute.train_stage(lambda: trials("pilot", losses, models=["tupe_r"]), train)
    assert {trial.model for new in rounds for trial in new} == {"tupe_r"}
    assert [max(trial.lr for trial in new) for new in rounds] == [4e-3, 8e-3, 16e-3, 32e-3]


def test_weights_are_kept_in_half_precision(pretrained, tmp_path):
    save_half(pretrained, tmp_path / "model.pt")
    full, half = (read_checkpoint(path) for path in (pretrained, tmp_path / "model.pt"))
    assert half["last_optimizer_state"] is None
    for name, value in full["model"].items():
        expected = value.half() if value.is_floating_point() else value
        assert torch.equal(half["model"][name], expected) and half["model"][name].dtype == expected.dtype


def test_finished_runs_are_evaluated(pretrained, vocabulary, tmp_path):
    def evaluation(model, task, data):
        return evaluate(model, task, TextEncoder(data), 10, 300)

    for name in ("checkpoint_1_500.pt", "checkpoint_last.pt"):
        shutil.copy(pretrained, tmp_path / name)
    evaluate_and_prune(vocabulary, tmp_path, "finished", evaluation)
    assert not list(tmp_path.glob("checkpoint*"))
    content = json.loads((tmp_path / "evaluation.json").read_text())
    (tmp_path / "evaluation.json").unlink()
    evaluate_and_prune(vocabulary, tmp_path, "finished", evaluation)  # again, of the weights that were kept
    assert json.loads((tmp_path / "evaluation.json").read_text()) == content
