"""What is found in folders of runs."""

import shutil
from collections import defaultdict
from pathlib import Path

import pytest
from helpers import write_run, write_runs

from tupe.common.architectures import architecture_of, plain_options
from tupe.common.recipes import read as read_recipe
from tupe.run import record
from tupe.run.folder import lock
from tupe.run.record import Record
from tupe.sweep.collection import FinishedRun, Model, collect, pretraining_record
from tupe.train.settle import differing, settle


def reasons(pairs):
    return {Path(folder).name: reason for folder, reason in pairs}


def models_of(collection):
    return sorted({run.model for run in collection.finished.values()})


def test_finished_failed_and_stopped_runs(tmp_path):
    write_run(tmp_path / "finished", "RTE", 2e-5, 1, 60.0)
    write_run(tmp_path / "failed", "RTE", 2e-5, 2, 60.0, state="failed")
    write_run(tmp_path / "stopped", "RTE", 2e-5, 3, 60.0, state="running")
    write_run(tmp_path / "running", "RTE", 2e-5, 4, 60.0, state="running")
    (tmp_path / "early").mkdir()
    record.note_failure(tmp_path / "early", "no such data", 2)  # before its run began
    lock(tmp_path / "running")
    collection = collect([tmp_path])
    assert [key[1:] for key in collection.finished] == [("RTE", 2e-5, 1)]
    assert reasons(collection.failed) == {"failed": "diverged", "early": "no such data"}
    assert reasons(collection.unfinished) == {"stopped": "stopped before its end", "running": "running"}
    assert not collection.left_out


def test_a_run_counts_once(tmp_path):
    write_run(tmp_path / "sweep" / "first", "RTE", 2e-5, 1, 60.0)
    shutil.copytree(tmp_path / "sweep" / "first", tmp_path / "copied")
    write_run(tmp_path / "repeated", "RTE", 2e-5, 1, 61.0)
    (tmp_path / "link").symlink_to(tmp_path / "sweep")
    folders = [tmp_path / "sweep", tmp_path / "link", tmp_path / "sweep" / "first", tmp_path]
    collection = collect(folders)
    assert [run.folder for run in collection.finished.values()] == [tmp_path / "sweep" / "first"]
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "runs").symlink_to(tmp_path / "sweep")
    assert len(collect([tmp_path / "linked"]).finished) == 1
    left_out = reasons(collection.left_out)
    assert set(left_out) == {"copied", "repeated"}
    assert "same scores" in left_out["copied"] and "OTHER scores" in left_out["repeated"]


@pytest.mark.parametrize("content", ["{", '{"state": "failed", "failure": null}'])
def test_damaged_and_foreign_records_are_left_out(tmp_path, content):
    write_run(tmp_path / "good", "RTE", 2e-5, 1, 60.0)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / record.NAME).write_text(content)
    collection = collect([tmp_path])
    assert len(collection.finished) == 1 and not collection.failed
    assert reasons(collection.left_out).keys() == {"bad"}


@pytest.mark.parametrize("lost", ["best", "metric", "split"])
def test_finished_runs_without_all_of_their_scores_are_left_out(tmp_path, lost):
    write_run(tmp_path / "good", "RTE", 2e-5, 1, 60.0)
    run = write_run(tmp_path / "bad", "MNLI", 2e-5, 1, 60.0)
    for entry in run.scores:
        if lost == "best":
            entry["best"] = False
        if lost == "metric":
            del entry["accuracy"]
    if lost == "split":
        run.scores = [entry for entry in run.scores if entry["split"] == "valid"]
    run.save(tmp_path / "bad")
    collection = collect([tmp_path])
    assert len(collection.finished) == 1 and set(reasons(collection.left_out)) == {"bad"}


def test_pretrainings_are_no_rows(tmp_path):
    write_run(tmp_path / "run", "RTE", 2e-5, 1, 60.0)
    for state in ("finished", "running", "failed"):
        folder = tmp_path / f"pretraining_{state}"
        folder.mkdir()
        failure = {"reason": "diverged", "status": 86} if state == "failed" else None
        Record("masked_lm", "tupe_r", state=state, started_at="today", splits=["valid"], failure=failure).save(folder)
    collection = collect([tmp_path])
    assert len(collection.finished) == 1 and not any(collection.of_no_score.values())


@pytest.mark.parametrize(
    "options, pretrained, fine_tuned",
    [
        (["--position=absolute+t5"], ("bert_a_tiny", "position absolute+t5"), ("bert_r_tiny", "")),
        (["--position=untied", "--cls=tied"], ("bert_a_tiny", "position untied"), ("tupe_a_tie_cls_tiny", "")),
        (["--position=rope"], ("bert_a_tiny", "position rope"), ("bert_a_tiny", "position rope")),
    ],
)
def test_a_pretraining_is_known_by_its_model_whatever_it_is_called(options, pretrained, fine_tuned, tmp_path):
    """A pre-training keeps the architecture that the user named, a fine-tuning takes the nearest one."""
    settled = settle(read_recipe("pretrain_small", ["--arch=bert_a_tiny", *options]), gpus=0)
    assert (settled.architecture, settled.variant) == pretrained
    architecture = architecture_of(settled.model)
    differs = differing(vars(settled.model), plain_options(architecture))
    assert (architecture, ", ".join(f"{name} {value}" for name, value in differs.items())) == fine_tuned
    Record("masked_lm", *pretrained, seed=3).save(tmp_path)
    model = Model(fine_tuned[0], 10, str(tmp_path / "checkpoint_last.pt"), fine_tuned[1])
    assert pretraining_record(model).seed == 3
    other = Model("tupe_r_tiny", 10, model.checkpoint)
    assert pretraining_record(other) is None


def test_folders_without_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no finished or failed run"):
        collect([tmp_path])
    with pytest.raises(ValueError, match="is not a folder"):
        collect([tmp_path / "nowhere"])


def test_models_of_one_name_are_told_apart_by_their_paths(tmp_path):
    for folder in ("a", "b"):
        for updates in (300_000, 1_000_000):
            pretrained = f"/runs/{folder}/x.pt"
            write_runs(tmp_path / folder / str(updates), ["RTE"], {2e-5: [50]}, updates=updates, pretrained=pretrained)
    models = models_of(collect([tmp_path]))
    assert {str(model) for model in models} == {
        f"tupe_r [{f}/x.pt] @ {updates}" for f in "ab" for updates in ("300k", "1M")
    }
    (model,) = models_of(collect([tmp_path / "a" / "300000"]))
    assert model.name == "tupe_r"


def test_runs_with_other_settings_are_models_of_their_own(tmp_path):
    """Whatever was typed: the default is the default, and what a recipe says is a setting."""
    typed, one = "tupe finetune model.dropout=0.1 --output ", {"common.fp16": True}
    for seed, (config, command) in enumerate([({}, ""), ({}, typed), ({"model.dropout": 0}, ""), (one, "")], 1):
        write_run(tmp_path / f"{seed}", "RTE", 2e-5, seed, 60.0, architecture="bert_a", config=config, command=command)
    config = {"common.fp16": True, "model.dropout": 0, "dataset.num_workers": 0, "checkpoint.no_save": True}
    write_run(tmp_path / "tupe_r", "RTE", 2e-5, 1, 60.0, config=config)
    collection = collect([tmp_path])
    assert len(collection.finished) == 5 and not collection.left_out
    names = {"bert_a", "bert_a (model.dropout 0)", "bert_a (common.fp16 True)"}
    names.add("tupe_r (common.fp16 True, model.dropout 0)")
    assert {model.name for model in models_of(collection)} == names
    (model,) = models_of(collect([tmp_path / "tupe_r"]))
    assert model.name == "tupe_r"  # where nothing differs, nothing is named


def test_a_batch_is_one_however_it_was_divided(tmp_path):
    for seed, (size, steps) in enumerate([(32, 1), (16, 2), (16, 1)], 1):
        config = {"dataset.batch_size": size, "optimization.update_freq": [steps]}
        write_run(tmp_path / f"{seed}", "RTE", 2e-5, seed, 60.0, config=config)
    names = {model.name for model in models_of(collect([tmp_path]))}
    assert names == {"tupe_r", "tupe_r (sequences an update 16)"}


def test_runs_on_other_data_are_models_of_their_own(tmp_path):
    for data in ("0123456789ab", "cdef01234567"):
        write_run(tmp_path / data, "RTE", 2e-5, 1, 60.0, config={}, data=data)
    assert {model.name for model in models_of(collect([tmp_path]))} == {
        "tupe_r (data 0123456789ab)", "tupe_r (data cdef01234567)"
    }  # fmt: skip


def test_a_checkpoint_that_held_other_weights_later_is_another_model(tmp_path):
    for seed, weights in ((1, "a" * 12), (2, "a" * 12), (2, "b" * 12)):
        write_run(tmp_path / f"{weights}{seed}", "RTE", 2e-5, seed, 60.0, config={}, pretrained_weights=weights)
    names = {model.name for model in models_of(collect([tmp_path]))}
    assert names == {f"tupe_r (weights {weights})" for weights in ("a" * 12, "b" * 12)}
    (model,) = models_of(collect([tmp_path / f"{'a' * 12}{seed}" for seed in (1, 2)]))
    assert model.name == "tupe_r"


def test_runs_of_another_length_are_models_of_their_own(tmp_path):
    """Lengths of one task: others of other tasks are usual, and need no name."""
    write_run(tmp_path / "a", "RTE", 2e-5, 1, 60.0, epochs=3, variant="position shaw")
    write_run(tmp_path / "b", "CoLA", 2e-5, 1, 60.0, epochs=10, variant="position shaw")
    assert [model.name for model in models_of(collect([tmp_path]))] == ["tupe_r (position shaw)"]
    write_run(tmp_path / "c", "RTE", 3e-5, 1, 60.0, epochs=10, variant="position shaw")
    runs = {(model.name, task) for model, task, *_ in collect([tmp_path]).finished}
    usual, three = "tupe_r (position shaw)", "tupe_r (position shaw, max_epoch 3)"  # 10 has more runs in all
    assert runs == {(three, "RTE"), (usual, "RTE"), (usual, "CoLA")}


def test_one_unusual_run_leaves_the_rows_of_the_others_whole(tmp_path):
    for architecture in ("bert_a", "tupe_a"):
        for task, epochs in (("CoLA", 10), ("RTE", 10), ("MNLI", 5)):
            write_run(tmp_path / architecture / task, task, 2e-5, 1, 60.0, epochs=epochs, architecture=architecture)
    write_run(tmp_path / "trial", "CoLA", 2e-5, 1, 60.0, epochs=3, architecture="tupe_a")
    tasks = defaultdict(set)
    for model, task, *_ in collect([tmp_path]).finished:
        tasks[model.name].add(task)
    assert tasks == {
        "bert_a": {"CoLA", "RTE", "MNLI"}, "tupe_a": {"CoLA", "RTE", "MNLI"}, "tupe_a (max_epoch 3)": {"CoLA"}
    }  # fmt: skip


def test_a_model_with_another_vocabulary_has_one_row(tmp_path):
    for architecture, vocabulary in (("bert_a", "ours"), ("tupe_a", "ours"), ("tupe_r", "another")):
        for task in ("CoLA", "RTE"):
            more = {"data": f"{vocabulary} {task}", "dictionary": vocabulary, "architecture": architecture}
            write_run(tmp_path / architecture / task, task, 2e-5, 1, 60.0, **more)
    names = [model.name for model in models_of(collect([tmp_path]))]
    assert names == ["bert_a", "tupe_a", "tupe_r (vocabulary another)"]


def test_settings_that_are_equally_frequent_are_all_named(tmp_path):
    for architecture, config in (("bert_a", {}), ("tupe_a", {"model.dropout": 0})):
        write_run(tmp_path / architecture, "RTE", 2e-5, 1, 60.0, architecture=architecture, config=config)
    names = [model.name for model in models_of(collect([tmp_path]))]
    assert names == ["bert_a (model.dropout default)", "tupe_a (model.dropout 0)"]


def test_scores_are_those_of_the_best_epoch(tmp_path):
    run = FinishedRun(None, write_run(tmp_path / "x", "MNLI", 2e-5, 1, 60.0, epochs=3), tmp_path)
    assert run.score("valid1", "accuracy") == 61.0  # of the first epoch; the last one has 60
