"""Fine-tuning by fairseq: training through its launchers, scores, resuming, failures, what is refused."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.trainer import Trainer
from helpers import compose, ended, fairseq_arguments, finetune, fork, free_port, load, table, unsealed
from omegaconf import OmegaConf

from tupe.checkpoints.export import export
from tupe.data.examples import Examples, collate
from tupe.data.glue import TASKS, glue_name
from tupe.data.splits import read_symbols, write_split
from tupe.evaluate.predict import predict_glue
from tupe.modeling_tupe import TupeForSequenceClassification
from tupe.plugin import classification
from tupe.plugin.classification import GlueCriterion
from tupe.run.record import Record, read, state_of

ROOT = Path(__file__).parents[2]
NO_SAVE = "checkpoint.no_save=true"


def epochs(count):
    return ["glue=cola", f"optimization.max_epoch={count}", "optimization.lr=[0.003]"]


@pytest.fixture(scope="module")
def fine_tuned(learnable, pretrained, tmp_path_factory):
    """Task -> (configuration, folder of the run)."""
    folder, runs = tmp_path_factory.mktemp("fine_tuned"), {}
    for task, epochs in (("CoLA", 2), ("MNLI", 3), ("STS-B", 2)):
        words = [f"glue={task.lower().replace('-', '')}", f"optimization.max_epoch={epochs}", "optimization.lr=[0.01]"]
        runs[task] = finetune(learnable, pretrained, folder / task, *words), folder / task
    return runs


def test_training_records_unrounded_scores_and_predictions(learnable, fine_tuned):
    cfg, folder = fine_tuned["MNLI"]
    assert cfg.model.max_positions == 20  # the checkpoint's, not the 512 of a fresh configuration
    assert cfg.lr_scheduler.total_num_update == 3 * 4  # 41 examples in batches of 12
    run = read(folder)
    assert (run.task, run.lr, run.seed, run.state) == ("MNLI", 0.01, 1, "finished")
    assert run.metrics == ["accuracy"] and run.budget == {"max_epoch": 3} and run.splits == ["valid", "valid1"]
    assert [(entry["epoch"], entry["split"], entry["num_updates"]) for entry in run.scores] == [
        (1, "valid", 4), (1, "valid1", 4), (2, "valid", 8), (2, "valid1", 8), (3, "valid", 12), (3, "valid1", 12),
    ]  # fmt: skip
    for split, count in (("valid", 41), ("valid1", 19)):
        rows = table(folder / "predictions" / f"{split}_last.tsv")
        assert [int(row[0]) for row in rows] == list(range(count))
        right = sum(row[1] == row[2] for row in rows)
        last = next(entry for entry in run.scores[::-1] if entry["split"] == split)
        assert last["accuracy"] == pytest.approx(100 * right / count, rel=1e-12)
        targets = [
            row.split("\t")[-1] for row in (learnable.parent / "official/MNLI/dev_matched.tsv").read_text().split("\n")
        ]
        assert [row[2] for row in rows] == targets[1 : count + 1]
    best = max(entry["accuracy"] for entry in run.scores if entry["split"] == "valid")
    assert run.best() == ("accuracy", best)
    rows = table(folder / "predictions" / "valid_best.tsv")
    assert best == pytest.approx(100 * sum(row[1] == row[2] for row in rows) / 41, rel=1e-12)
    state = torch.load(folder / "checkpoint_last.pt", weights_only=True)
    assert state["extra_state"]["best"] == best and type(state["extra_state"]["best"]) is float
    schedule = state["optimizer_history"][-1]
    assert schedule["num_updates"] == 12
    assert state["last_optimizer_state"]["param_groups"][0]["lr"] == 0


def test_regression(fine_tuned):
    _, folder = fine_tuned["STS-B"]
    last = read(folder).scores[-1]
    rows = np.array(table(folder / "predictions" / "valid_last.tsv"), dtype=float)
    assert set(rows[:, 2]) == {0.0, 2.5, 5.0}
    assert last["pearson"] == pytest.approx(100 * np.corrcoef(rows[:, 1], rows[:, 2])[0, 1], abs=1e-4)
    assert last["loss"] == pytest.approx((((rows[:, 1] - rows[:, 2]) / 5) ** 2).mean(), rel=1e-5)
    assert "spearman" in last and "accuracy" not in last


def test_half_precision_does_not_round_the_labels(learnable):
    """Of a batch that fairseq's trainer casts."""
    valid = Examples(learnable / "STS-B", "valid", 20)
    batch = classification.collate("valid", [(n, valid[1, n]) for n in range(8)])
    for precision in ("fp16", "bf16"):
        common = {"fp16": precision == "fp16", "bf16": precision == "bf16"}
        trainer = SimpleNamespace(cfg=OmegaConf.create({"common": common}))
        cast = Trainer._fp_convert_sample(trainer, batch)["target"].tolist()
        assert cast == batch["target"].tolist() == pytest.approx([valid[1, n][2] for n in range(8)], abs=1e-7)


def test_a_time_limit_leaves_a_fine_tuning_to_go_on(learnable, pretrained, tmp_path):
    """Here it is over after the first update."""
    finetune(learnable, pretrained, tmp_path, *epochs(2), "optimization.stop_time_hours=1e-9")
    run = read(tmp_path)
    assert (run.state, run.failure) == ("stopped", None)


def test_a_regression_answers_in_the_units_of_its_labels(learnable, fine_tuned, tmp_path):
    """An export: between 0 and 5, not between 0 and 1."""
    checkpoint, valid = fine_tuned["STS-B"][1] / "checkpoint_last.pt", Examples(learnable / "STS-B", "valid", 20)
    rows = np.array(table(checkpoint.parent / "predictions" / "valid_last.tsv"), dtype=float)[:8]
    assert np.ptp(rows[:, 1]) > 0.01  # they are told apart
    folder = tmp_path / "export"
    export(checkpoint, folder, learnable, code=False)
    batch = {name: value for name, value in collate([valid[1, n] for n in range(8)]).items() if name != "num_tokens"}
    ids, targets = batch["input_ids"], torch.tensor(rows[:, 2])
    model = TupeForSequenceClassification.from_pretrained(folder).eval()
    assert model.config.label_range == [0.0, 5.0] and "numbers from 0 to 5" in (folder / "README.md").read_text()
    out = model(ids, (ids != 1).long(), labels=targets)
    assert out.logits.squeeze(1).tolist() == pytest.approx(rows[:, 1], abs=1e-4)
    assert out.loss.item() == pytest.approx(((rows[:, 1] - rows[:, 2]) ** 2).mean(), abs=1e-3)


@pytest.mark.slow  # two processes in every run: tests/plugin/test_worker.py
def test_two_processes_score_what_one_does(learnable, pretrained, tmp_path):
    """Training and validation on two processes: every development example once, and the scores of one process."""

    def fairseq_train():
        from fairseq_cli.train import cli_main

        cli_main()

    port, started = free_port(), []
    for rank, processes in ((0, 1), (0, 2), (1, 2)):  # two runs at the same time
        words = [str(learnable), f"--finetune-from-model={pretrained}", f"--save-dir={tmp_path / str(processes)}"]
        words += ["--lr=0.01", "--max-epoch=2", "--no-save", "--num-workers=0", "--batch-size=12"]
        words += [f"--{name}=0" for name in ("dropout", "attention-dropout", "pooler-dropout")]
        arguments = fairseq_arguments("finetune", ["glue=mnli"], words, processes=processes, cuda=False)
        torchrun = {}
        if processes > 1:
            torchrun = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
            torchrun |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        started.append(fork(fairseq_train, "fairseq-train", *arguments, anew=True, **torchrun))
    assert [ended(process) for process in started] == [0, 0, 0]
    one, two = read(tmp_path / "1"), read(tmp_path / "2")
    assert one.state == two.state == "finished" and len(one.scores) == len(two.scores) == 4
    for a, b in zip(one.scores, two.scores, strict=True):
        assert (a["split"], a["num_updates"], a["accuracy"]) == (b["split"], b["num_updates"], b["accuracy"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    for split in ("valid", "valid1"):
        name = f"predictions/{split}_last.tsv"
        assert (tmp_path / "1" / name).read_text() == (tmp_path / "2" / name).read_text()


def test_predictions_for_the_server(learnable, fine_tuned, tmp_path):
    """Official file names and labels, in file order, the same as the predictions stored in training."""
    data = tmp_path / "bin"
    shutil.copytree(learnable, data)
    for name, copies in (
        ("CoLA", {"test": "valid"}),
        ("STS-B", {"test": "valid"}),
        ("MNLI", {"test": "valid", "test1": "valid1", "ax": "valid1"}),
    ):
        for part in (data / name).glob("input*"):
            for split, source in copies.items():
                for kind in ("bin", "idx"):
                    shutil.copy(part / f"{source}.{kind}", part / f"{split}.{kind}")
    written = []
    for name, (_, folder) in fine_tuned.items():
        files = predict_glue(name, folder / "checkpoint_last.pt", data, tmp_path / "out", batch_size=7)
        written += [path for path, *_ in files]
    assert [path.name for path in written] == ["CoLA.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv", "STS-B.tsv"]
    for file, run, split in (("CoLA", "CoLA", "valid"), ("MNLI-m", "MNLI", "valid"), ("AX", "MNLI", "valid1")):
        lines = (tmp_path / "out" / f"{file}.tsv").read_text().splitlines()
        assert lines[0] == "index\tprediction"
        stored = table(fine_tuned[run][1] / "predictions" / f"{split}_last.tsv")
        assert [line.split("\t") for line in lines[1:]] == [row[:2] for row in stored]
    stored = [float(row[1]) for row in table(fine_tuned["STS-B"][1] / "predictions" / "valid_last.tsv")]
    scores = [float(line.split("\t")[1]) for line in (tmp_path / "out/STS-B.tsv").read_text().splitlines()[1:]]
    assert scores == pytest.approx([min(max(value, 0), 5) for value in stored], abs=1e-3)
    with pytest.raises(ValueError, match="was not fine-tuned on CoLA, but on MNLI"):
        list(predict_glue("cola", fine_tuned["MNLI"][1] / "checkpoint_last.pt", data, tmp_path / "out"))
    with pytest.raises(ValueError, match="holds no test set of CoLA"):
        list(predict_glue("cola", fine_tuned["CoLA"][1] / "checkpoint_last.pt", learnable, tmp_path / "out"))


def test_every_glue_group_names_its_task():
    files = [path for path in (ROOT / "configs" / "glue").glob("*.yaml") if path.stem != "own"]  # see test_labels.py
    tasks = {path.stem: compose("finetune", [f"glue={path.stem}"]) for path in files}
    assert {cfg.task.glue_task for cfg in tasks.values()} == set(TASKS)
    for stem, cfg in tasks.items():
        assert glue_name(stem) == cfg.task.glue_task
        assert cfg.optimization.max_epoch == (5 if stem in ("mnli", "qnli", "qqp") else 10)
        subsets = cfg.dataset.get("valid_subset", "valid").split(",")
        assert subsets == [split for split, _ in TASKS[cfg.task.glue_task].files if split.startswith("valid")]


# -------------------------------------------------------------------------------- resuming, failures, what is refused


def test_a_fine_tuned_model_is_fine_tuned_again_with_a_new_head(learnable, fine_tuned, tmp_path):
    """Its classes may mean something else; and each seed has a head of its own, as with the other engine."""
    _, start = fine_tuned["CoLA"]
    still = ["optimization.lr=[1e-9]", "dataset.num_workers=0"]
    finetune(learnable, start / "checkpoint_last.pt", tmp_path / "run", *epochs(1), *still, "glue=cola")
    one, two = (load(path / "checkpoint_last.pt")["model"] for path in (start, tmp_path / "run"))
    apart = {key: float((one[key] - two[key]).abs().max()) for key in one if one[key].is_floating_point()}
    heads = {key for key in apart if key.startswith("classification_heads.")}
    assert max(apart[key] for key in apart if key not in heads) < 1e-6
    assert all(apart[key] > 1e-3 for key in heads if "out_proj.weight" in key) and heads


def test_a_killed_run_resumes_with_the_same_scores(learnable, pretrained, tmp_path, monkeypatch):
    options = epochs(3)
    finetune(learnable, pretrained, tmp_path / "whole", *options)
    step = Trainer.train_step

    def killed_in_epoch_2(trainer, samples, **kwargs):
        if trainer.get_num_updates() == 6:
            raise KeyboardInterrupt
        return step(trainer, samples, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "train_step", killed_in_epoch_2)
        finetune(learnable, pretrained, tmp_path / "killed", *options)
    killed = read(tmp_path / "killed")
    assert len(killed.scores) == 1 and killed.failure is None and state_of(tmp_path / "killed") == "open"
    finetune(learnable, pretrained, tmp_path / "killed", *options)
    whole, resumed = read(tmp_path / "whole"), read(tmp_path / "killed")
    assert [entry["num_updates"] for entry in whole.scores] == [4, 8, 12] and resumed.scores == whole.scores
    assert resumed.started_at == killed.started_at <= resumed.finished_at and resumed.state == "finished"


def test_a_run_without_checkpoints_starts_over(learnable, pretrained, tmp_path):
    finetune(learnable, pretrained, tmp_path, *epochs(2), NO_SAVE)
    whole = read(tmp_path)
    first = {**whole.scores[0], "matthews": -1.0}  # a run of which only the first epoch was done, with another score
    Record(**{**vars(whole), "state": "running", "scores": [first]}).save(tmp_path)
    finetune(learnable, pretrained, tmp_path, *epochs(2), NO_SAVE)
    assert read(tmp_path).scores == whole.scores
    # Now it is finished: nothing is trained again, nothing is written.
    before = (tmp_path / "record.json").stat().st_mtime_ns
    finetune(learnable, pretrained, tmp_path, *epochs(2), NO_SAVE)
    assert (tmp_path / "record.json").stat().st_mtime_ns == before


def test_out_of_memory_ends_a_run(learnable, pretrained, tmp_path, monkeypatch):
    """fairseq alone would leave the batch out. What the run was is written down all the same, from its start on."""
    forward = GlueCriterion.forward

    def fails_in_training(criterion, model, sample, *args):
        if model.training:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return forward(criterion, model, sample, *args)

    monkeypatch.setattr(GlueCriterion, "forward", fails_in_training)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        finetune(learnable, pretrained, tmp_path, *epochs(1))
    run = read(tmp_path)
    assert run.state == "failed" and run.failure["status"] == 1
    assert run.failure["reason"].startswith("OutOfMemoryError: CUDA out of memory")
    assert run.scores == [] and run.task == "CoLA" and run.command and run.versions["torch"]


def test_a_run_that_diverged_may_be_started_again(learnable, pretrained, tmp_path, monkeypatch):
    step = Trainer.train_step

    def overflow(self, *args):
        if self.get_num_updates() >= 4:  # after the first epoch
            raise FloatingPointError("4 updates so far")
        return step(self, *args)

    (tmp_path / "crash.pt").touch()  # fairseq's, of a run that diverged
    with monkeypatch.context() as patch, pytest.raises(FloatingPointError, match="4 updates so far"):
        patch.setattr(Trainer, "train_step", overflow)
        finetune(learnable, pretrained, tmp_path, *epochs(3), NO_SAVE)
    run = read(tmp_path)
    assert len(run.scores) == 1 and run.state == "failed" and run.failure["reason"].startswith("diverged: ")
    assert not (tmp_path / "crash.pt").exists()
    finetune(learnable, pretrained, tmp_path, *epochs(3), NO_SAVE)  # started again, it comes to its end
    run = read(tmp_path)
    assert run.state == "finished" and run.failure is None and len(run.scores) == 3


def test_a_run_that_stops_early_is_not_finished(learnable, pretrained, tmp_path):
    """fairseq ends at once where the learning rate is below the smallest: no score is that of a trained model."""
    finetune(learnable, pretrained, tmp_path, *epochs(2), NO_SAVE, "optimization.stop_min_lr=1")
    run = read(tmp_path)
    assert run.state == "failed" and "stopped before its last epoch" in run.failure["reason"]


def test_too_few_tokens_for_a_held_out_example_are_refused(learnable, pretrained, tmp_path):
    """Before the start, not at the first validation: the longest pair may be a held-out one."""
    data = unsealed(shutil.copytree(learnable, tmp_path / "data"))
    long = [[*range(5, 21), 2]] * 41
    write_split(data / "CoLA" / "input0" / "valid", long, len(read_symbols(data)))
    with pytest.raises(ValueError, match="max_tokens=16: a sequence has up to 18 tokens; valid: at least as many"):
        finetune(data, pretrained, tmp_path / "run", *epochs(1), "dataset.max_tokens=16")
    assert not (tmp_path / "run" / "record.json").exists()


def test_scores_are_of_whole_splits(learnable, pretrained, tmp_path):
    with pytest.raises(FloatingPointError, match="matthews of 'valid' is nan"):
        finetune(learnable, pretrained, tmp_path, *epochs(1), NO_SAVE, "dataset.max_valid_steps=1")
    assert json.loads((tmp_path / "record.json").read_text())["state"] == "failed"
