"""GLUE: the table of tasks, inputs, scores, and training through both launchers."""

import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import compose, fairseq_arguments, finetune, free_port, official_folder, table

from tupe.checkpoints.export import export
from tupe.common.record import read
from tupe.corpus import tasks as glue_data
from tupe.data.examples import Examples, collate
from tupe.data.glue import TASKS, check_glue, glue_name, score
from tupe.data.splits import write_split
from tupe.evaluate.predict import predict_glue, zip_submission
from tupe.modeling_tupe import TupeForSequenceClassification

ROOT = Path(__file__).parents[2]

# ------------------------------------------------------------------------------------------------------ tasks, inputs


def test_label_order_is_the_official_one():
    # The order in which GLUE's own files and converters number the classes: alphabetical.
    for name, task in TASKS.items():
        assert list(task.labels) == sorted(task.labels), name
    assert {name for name, task in TASKS.items() if not task.labels} == {"STS-B"}
    assert TASKS["MNLI"].outputs == 3 and TASKS["STS-B"].outputs == 1


def test_labels_in_another_order_are_refused(vocabulary, tmp_path):
    list(glue_data.prepare(official_folder(tmp_path / "glue"), vocabulary, tmp_path / "bin", ["MNLI"]))
    order = tmp_path / "bin" / "MNLI" / "label" / "dict.txt"
    check_glue(tmp_path / "bin" / "MNLI", "valid")
    order.write_text("".join(reversed(order.read_text().splitlines(keepends=True))))
    with pytest.raises(ValueError, match="labels neutral, entailment, contradiction, not contradiction, entailment, n"):
        check_glue(tmp_path / "bin" / "MNLI", "valid")


def test_task_names():
    assert [glue_name(x) for x in ("stsb", "STS-B", "sts_b", "cola", "sst2")] == ["STS-B"] * 3 + ["CoLA", "SST-2"]
    with pytest.raises(ValueError, match="unknown GLUE task 'squad'; valid: CoLA, SST-2"):
        glue_name("squad")


def test_long_pairs_lose_tokens_of_the_longer_sentence(tmp_path):
    def examples(limit, **lengths):
        folder = tmp_path / f"{limit}" / "SST-2" if len(lengths) == 1 else tmp_path / f"{limit}" / "RTE"
        for number, (first, counts) in enumerate(lengths.values()):
            (folder / f"input{number}").mkdir(parents=True)
            rows = [[*range(first, first + n), 2] for n in counts]
            write_split(folder / f"input{number}" / "test", rows, 100)
        (folder.parent / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(95)))
        return Examples(folder, "test", limit)

    pairs = examples(12, a=(10, [3, 10, 2, 10, 9]), b=(50, [3, 2, 10, 10, 0]))  # 4 special tokens, 8 others
    kept = [pairs[1, i][1] for i in range(5)]
    assert kept[0] == [0, 10, 11, 12, 2, 2, 50, 51, 52, 2]  # as sentence_prediction builds it
    assert [len(tokens) for tokens in kept] == pairs.sizes.tolist() == [10, 12, 12, 12, 12]
    assert kept[1] == [0, 10, 11, 12, 13, 14, 15, 2, 2, 50, 51, 2]
    assert kept[2] == [0, 10, 11, 2, 2, 50, 51, 52, 53, 54, 55, 2]
    assert kept[3] == [0, 10, 11, 12, 13, 2, 2, 50, 51, 52, 53, 2]
    assert kept[4] == [0, *range(10, 18), 2, 2, 2] and pairs.shortened == 4
    single = examples(6, a=(10, [3, 10]))
    assert single[1, 0] == (0, [0, 10, 11, 12, 2], None) and single[1, 1] == (1, [0, 10, 11, 12, 13, 2], None)


# ------------------------------------------------------------------------------------------------------------ scores


def test_scores_by_hand():
    targets, predictions = (
        [1, 1, 1, 0, 0, 1],
        [1, 0, 1, 0, 1, 1],
    )  # 3 true positives, 1 false, 1 true negative, 1 missed
    scores = score(["accuracy", "f1", "matthews"], predictions, targets)
    assert scores["accuracy"] == pytest.approx(100 * 4 / 6, abs=1e-12)
    assert scores["f1"] == pytest.approx(100 * 2 * 3 / (2 * 3 + 1 + 1), abs=1e-12)
    assert scores["matthews"] == pytest.approx(100 * (3 * 1 - 1 * 1) / math.sqrt(4 * 4 * 2 * 2), abs=1e-12)
    x, y = [1.0, 2.0, 3.0, 10.0], [0.1, 0.4, 0.3, 0.2]
    scores = score(["pearson", "spearman"], x, y)
    assert scores["pearson"] == pytest.approx(100 * np.corrcoef(x, y)[0, 1], abs=1e-9)
    assert scores["spearman"] == pytest.approx(100 * np.corrcoef([1, 2, 3, 4], [1, 4, 3, 2])[0, 1], abs=1e-9)
    assert all(type(value) is float for value in scores.values())


def test_constant_predictions_score_zero_and_infinite_ones_are_an_error():
    assert score(["pearson", "spearman"], [0.5, 0.5], [0.1, 0.9]) == {"pearson": 0.0, "spearman": 0.0}
    assert score(["matthews", "f1"], [0, 0], [0, 1]) == {"matthews": 0.0, "f1": 0.0}
    with pytest.raises(FloatingPointError, match="not finite"):
        score(["pearson"], [math.nan, 0.5], [0.1, 0.9])


# ---------------------------------------------------------------------------------------------------------- training


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


def test_a_regression_answers_in_the_units_of_its_labels(learnable, fine_tuned, tmp_path):
    """An export, and what is exported of that: between 0 and 5, not between 0 and 1.
    An earlier export, whose config.json says nothing of a range, answers as it did."""
    checkpoint, valid = fine_tuned["STS-B"][1] / "checkpoint_last.pt", Examples(learnable / "STS-B", "valid", 20)
    rows = np.array(table(checkpoint.parent / "predictions" / "valid_last.tsv"), dtype=float)[:8]
    assert np.ptp(rows[:, 1]) > 0.01  # they are told apart
    export(checkpoint, tmp_path / "one", learnable, code=False)
    export(tmp_path / "one", tmp_path / "two", code=False)
    batch = {name: value for name, value in collate([valid[1, n] for n in range(8)]).items() if name != "num_tokens"}
    ids, targets = batch["input_ids"], torch.tensor(rows[:, 2])
    for folder in (tmp_path / "one", tmp_path / "two"):
        model = TupeForSequenceClassification.from_pretrained(folder).eval()
        assert model.config.label_range == [0.0, 5.0] and "numbers from 0 to 5" in (folder / "README.md").read_text()
        out = model(ids, (ids != 1).long(), labels=targets)
        assert out.logits.squeeze(1).tolist() == pytest.approx(rows[:, 1], abs=1e-4)
        assert out.loss.item() == pytest.approx(((rows[:, 1] - rows[:, 2]) ** 2).mean(), abs=1e-3)
    earlier = TupeForSequenceClassification.from_pretrained(tmp_path / "one", label_range=None).eval()
    assert (5 * earlier(ids, (ids != 1).long()).logits).squeeze(1).tolist() == pytest.approx(rows[:, 1], abs=1e-4)
    classes = {"num_labels": 3, "ignore_mismatched_sizes": True}
    classes = TupeForSequenceClassification.from_pretrained(tmp_path / "one", **classes).eval()
    features = classes.features_of_cls(ids, (ids != 1).long(), {}).last_hidden_state
    assert torch.equal(classes(ids, (ids != 1).long()).logits, classes.classifier(features))  # of classes it is none


@pytest.mark.slow  # the same of pre-training, in every run: tests/plugin/test_resume.py
def test_both_launchers_train_the_same(learnable, pretrained, tmp_path):
    """The same tiny model through `tupe finetune` and through fairseq-hydra-train: same losses, same scores."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    common = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env, "cwd": ROOT}
    small = ["--lr", "0.003", "--max-epoch", "2", "--num-workers", "0"]
    tupe = [sys.executable, "-m", "tupe", "finetune", "--task=CoLA", f"--data={learnable}", "--gpus=0", *small]
    tupe += [f"--checkpoint={pretrained}", f"--output={tmp_path / 'tupe'}"]
    hydra = [
        sys.executable, "-m", "fairseq_cli.hydra_train", "--config-dir", ROOT / "configs", "--config-name", "finetune",
        "glue=cola", f"task.data={learnable}", f"checkpoint.finetune_from_model={pretrained}",
        f"checkpoint.save_dir={tmp_path / 'hydra'}", "optimization.lr=[0.003]", "optimization.max_epoch=2",
        "dataset.num_workers=0", "common.fp16=false", "common.cpu=true", f"hydra.run.dir={tmp_path / 'cwd'}",
    ]  # fmt: skip
    started = [subprocess.Popen([str(word) for word in command], **common) for command in (tupe, hydra)]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    tupe, hydra = read(tmp_path / "tupe"), read(tmp_path / "hydra")
    assert tupe.state == hydra.state == "finished" and not tupe.differences(hydra)
    assert len(tupe.scores) == 2 and tupe.scores == hydra.scores


# fairseq gathers the predictions of several processes through the memory of GPUs; main memory stands in for it.
WITHOUT_GPU = """
import torch
torch.cuda.ByteTensor = torch.ByteTensor
torch.Tensor.pin_memory = lambda tensor: tensor
from fairseq_cli.train import cli_main
cli_main()
"""


@pytest.mark.slow  # two processes in every run: tests/plugin/test_worker.py
def test_two_processes_score_what_one_does(learnable, pretrained, tmp_path):
    """Training and validation on two processes: every development example once, and the scores of one process."""
    port, started = free_port(), []
    for rank, processes in ((0, 1), (0, 2), (1, 2)):  # two runs at the same time
        folder = tmp_path / str(processes)
        arguments = fairseq_arguments(
            ROOT / "configs", "finetune",
            ["glue=mnli", "dataset.batch_size=6", "dataset.num_workers=0"],
            [
                str(learnable), f"--user-dir={ROOT / 'tupe'}", f"--finetune-from-model={pretrained}",
                f"--save-dir={folder}", "--lr=0.01", "--max-epoch=2", f"--update-freq={2 // processes}", "--no-save",
                "--dropout=0", "--attention-dropout=0", "--pooler-dropout=0",
            ],
            processes=processes, cuda=False,
        )  # fmt: skip
        if processes > 1:
            arguments += [
                "--distributed-backend=gloo", "--ddp-backend=legacy_ddp", "--distributed-no-spawn",
                f"--distributed-rank={rank}", f"--distributed-init-method=tcp://127.0.0.1:{port}",
            ]  # fmt: skip
        command = [sys.executable, "-c", WITHOUT_GPU, *arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], "\n".join(outputs)
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
    for name, copies in (("CoLA", {"test": "valid"}), ("MNLI", {"test": "valid", "test1": "valid1", "ax": "valid1"})):
        for part in (data / name).glob("input*"):
            for split, source in copies.items():
                for kind in ("bin", "idx"):
                    shutil.copy(part / f"{source}.{kind}", part / f"{split}.{kind}")
    for split in ("test.idx", "test.bin"):
        shutil.copy(data / "STS-B/input0" / split.replace("test", "valid"), data / "STS-B/input0" / split)
        shutil.copy(data / "STS-B/input1" / split.replace("test", "valid"), data / "STS-B/input1" / split)
    written = []
    for name, (_, folder) in fine_tuned.items():
        files = predict_glue(name, folder / "checkpoint_last.pt", data, tmp_path / "out", batch_size=7)
        written += [path for path, *_ in files]
    files = ["CoLA.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv", "STS-B.tsv"]
    for count in (1, 5):  # what is in the folder from another run stays out
        with zipfile.ZipFile(zip_submission(tmp_path / "out", written[:count])) as archive:
            assert archive.namelist() == files[:count]
    for file, run, split in (("CoLA", "CoLA", "valid"), ("MNLI-m", "MNLI", "valid"), ("AX", "MNLI", "valid1")):
        lines = (tmp_path / "out" / f"{file}.tsv").read_text().splitlines()
        assert lines[0] == "index\tprediction"
        stored = table(fine_tuned[run][1] / "predictions" / f"{split}_last.tsv")
        assert [line.split("\t") for line in lines[1:]] == [row[:2] for row in stored]
    stored = [float(row[1]) for row in table(fine_tuned["STS-B"][1] / "predictions" / "valid_last.tsv")]
    scores = [float(line.split("\t")[1]) for line in (tmp_path / "out/STS-B.tsv").read_text().splitlines()[1:]]
    assert scores == pytest.approx([min(max(value, 0), 5) for value in stored], abs=1e-3)
    export(fine_tuned["STS-B"][1] / "checkpoint_last.pt", tmp_path / "hf", learnable, code=False)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for known in ([0.0, 5.0], None):  # of an earlier export nothing is known, and the range is that of the task
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "label_range": known}))
        list(predict_glue("STS-B", tmp_path / "hf", data, tmp_path / "again"))
        again = [float(line.split("\t")[1]) for line in (tmp_path / "again/STS-B.tsv").read_text().splitlines()[1:]]
        assert again == pytest.approx(scores, abs=2e-3)
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
