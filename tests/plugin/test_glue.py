"""GLUE: official files, scores, the task in training through both launchers."""

import fcntl
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, data_utils
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask
from fairseq.trainer import Trainer
from helpers import HEADERS, ROWS, official_folder, scores_of, train_recipe, write_lines
from omegaconf import OmegaConf

from tupe.evaluation.predict import predict_glue, zip_submission
from tupe.experiments.runner import read_failure
from tupe.plugin import glue
from tupe.plugin.compat import compose
from tupe.plugin.electra import ElectraConfig
from tupe.plugin.finetune import PolynomialDecayRatio, PolynomialDecayRatioConfig, end_of_process
from tupe.plugin.glue import TASKS, Pairs, glue_name, prepare, read_split, score
from tupe.plugin.launch import fairseq_arguments
from tupe.plugin.model import FREE
from tupe.plugin.pretrained import structure
from tupe.text import TextEncoder

ROOT = Path(__file__).parents[2]
# ---------------------------------------------------------------------------------------------------- official files


@pytest.mark.parametrize("name", list(HEADERS))
def test_official_layout(name, tmp_path):
    folder = official_folder(tmp_path)
    rows, dropped = read_split(name, "train", folder / name / "train.tsv")
    assert not dropped and len(rows) == 2
    assert all(len(texts) == len(TASKS[name].text) for texts, _ in rows)
    expected = {
        "CoLA": [(("The cat sat .",), "1"), (("Cat the sat .",), "0")],
        "SST-2": [(("the cat sang ",), "1"), (("dogs ",), "0")],
        "MRPC": [(('The "cat" sat', '"The cat sang .'), "1"), (("Dogs ran .", "Birds sang ."), "0")],
        "STS-B": [(("A cat sat .", "A cat ran ."), 1.0), (("Dogs ran .", "Birds sang ."), 0.76)],
        "QQP": [(("Why did the cat sing ?", "What did dogs do ?"), "0"), (("Why ?", "How ?"), "1")],
        "QNLI": [
            (("Who sang ?", "The birds sang ."), "entailment"),
            (("Who ran ?", "The cat sat ."), "not_entailment"),
        ],
        "RTE": [(("The cat sat .", "A cat ran ."), "not_entailment"), (("Dogs ran .", "Dogs ran ."), "entailment")],
        "WNLI": [(("The cat sat .", "A cat ran ."), "1"), (("Dogs ran .", "Dogs sang ."), "0")],
    }
    assert rows == expected[name]


def test_mnli_layouts_and_rows_without_gold_label(tmp_path):
    folder = official_folder(tmp_path) / "MNLI"
    assert read_split("MNLI", "train", folder / "train.tsv")[0][1] == (("The cat sat .", "Dogs ran ."), "entailment")
    rows, dropped = read_split("MNLI", "valid", folder / "dev_matched.tsv")
    assert rows == [(("The cat sat .", "Dogs ran ."), "contradiction")] and dropped == {"no label": 1}
    assert read_split("MNLI", "test", folder / "test_matched.tsv")[0] == [(("The cat sat .", "Dogs ran ."), None)]


def test_label_order_is_the_official_one():
    # The order in which GLUE's own files and converters number the classes: alphabetical.
    for name, task in TASKS.items():
        assert list(task.labels) == sorted(task.labels), name
    assert {name for name, task in TASKS.items() if not task.labels} == {"STS-B"}
    assert TASKS["MNLI"].outputs == 3 and TASKS["STS-B"].outputs == 1


def test_malformed_qqp_rows_are_dropped_and_counted(tmp_path):
    write_lines(
        tmp_path / "train.tsv", [HEADERS["QQP"], *ROWS["QQP"], "7\t8\t9\tbroken", "stray end\t0", "1\t2\t3\ta\tb\tn/a"]
    )
    rows, dropped = read_split("QQP", "train", tmp_path / "train.tsv")
    assert len(rows) == 2 and dropped == {"not 6 columns": 2, "no label": 1}


def test_only_line_feeds_end_a_row(tmp_path):
    write_lines(tmp_path / "train.tsv", ["gj04\t1\t\tA\u2028cat\x0bsat\x85.\r"])
    assert read_split("CoLA", "train", tmp_path / "train.tsv")[0] == [(("A\u2028cat\x0bsat\x85.",), "1")]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("RTE", b"index\tsentence1\tlabel\n0\ta\tentailment\n", "line 1: no column sentence2; the columns are: index"),
        ("RTE", b"index\tsentence1\tsentence2\tlabel\n0\ta\tentailment\n", "line 2: 3 columns, expected 4"),
        ("RTE", b"index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n", "line 2: unknown label 'maybe', expected"),
        ("CoLA", b"gj04\t1\t\tfine .\ngj04\t2\t\tA cat .\n", "line 2: unknown label '2', expected one of 0, 1"),
        ("CoLA", b"gj04\t1\t\tfine .\ngj04\t1\t\tA \xff cat .\n", "line 2: not UTF-8"),
        ("CoLA", b"gj04\t1\tfine .\n", "line 1: 3 columns, expected 4"),
        ("CoLA", b"", "no usable row"),
        ("SST-2", b"", "the file is empty"),
        ("STS-B", (HEADERS["STS-B"] + "\n" + ROWS["STS-B"][0][:-5] + "5.2\n").encode(), "line 2: unknown score '5.2'"),
        ("STS-B", (HEADERS["STS-B"] + "\n" + ROWS["STS-B"][0][:-5] + "high\n").encode(), "a number from 0 to 5"),
        ("STS-B", (HEADERS["STS-B"] + "\n" + ROWS["STS-B"][0][:-5] + "nan\n").encode(), "unknown score 'nan'"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_with_file_and_line(name, content, message, tmp_path):
    (tmp_path / "train.tsv").write_bytes(content)
    with pytest.raises(ValueError) as error:
        read_split(name, "train", tmp_path / "train.tsv")
    assert str(tmp_path / "train.tsv") in str(error.value) and message in str(error.value)


def test_task_names():
    assert [glue_name(x) for x in ("stsb", "STS-B", "sts_b", "cola", "sst2")] == ["STS-B"] * 3 + ["CoLA", "SST-2"]
    with pytest.raises(ValueError, match="unknown GLUE task 'squad'; valid: CoLA, SST-2"):
        glue_name("squad")


# --------------------------------------------------------------------------------------------------------- preparing


@pytest.fixture(scope="session")
def prepared(vocabulary, tmp_path_factory):
    folder = tmp_path_factory.mktemp("glue")
    manifests = dict(prepare(official_folder(folder / "official"), vocabulary, folder / "bin", workers=2))
    return folder / "bin", manifests


def test_every_task_is_prepared(prepared, vocabulary):
    folder, manifests = prepared
    assert set(manifests) == set(TASKS)
    assert list(manifests["MNLI"]["splits"]) == ["train", "valid", "valid1", "test", "ax"]
    assert manifests["MNLI"]["splits"]["valid"]["dropped"] == {"no label": 1}
    assert (folder / "dict.txt").read_bytes() == (vocabulary / "dict.txt").read_bytes()
    encoder = TextEncoder(vocabulary)
    dictionary = Dictionary.load(str(folder / "RTE" / "input1" / "dict.txt"))
    items = data_utils.load_indexed_dataset(str(folder / "RTE" / "input1" / "train"), dictionary)
    assert items[0].tolist() == [*encoder.encode("A cat ran ."), dictionary.eos()]
    assert (folder / "STS-B" / "label" / "train.label").read_text() == "1.0\n0.76\n"


@pytest.mark.parametrize("name", ["CoLA", "QNLI", "STS-B"])
def test_fairseqs_own_task_reads_the_data_alike(prepared, name):
    """Same tokens and targets as `sentence_prediction` with init token 0 and separator 2."""
    folder, _ = prepared
    regression = not TASKS[name].labels
    stock = SentencePredictionTask.setup_task(
        SentencePredictionConfig(
            data=str(folder / name), num_classes=TASKS[name].outputs, init_token=0, separator_token=2, seed=1,
            regression_target=regression,
        )
    )  # fmt: skip
    stock.load_dataset("train")
    mine = glue_task(folder, name)
    mine.load_dataset("train")
    for i in range(2):
        a, b = stock.dataset("train")[i], mine.dataset("train")[i]
        assert a["net_input.src_tokens"].tolist() == b["net_input.src_tokens"].tolist()
        assert float(np.ravel(a["target"])[0]) == float(np.ravel(b["target"])[0])


def glue_task(folder, name, max_positions=64):
    cfg = glue.GlueConfig(
        data=str(folder), glue_task=name, seed=1, save_dir="", finetune_from_model=None, classification_head_name="head"
    )
    task = glue.GlueTask.setup_task(cfg)
    task._max_positions = max_positions
    return task


def test_an_output_in_the_way_is_refused(prepared, vocabulary, tmp_path):
    official = official_folder(tmp_path / "official")
    list(prepare(official, vocabulary, tmp_path / "bin", ["cola"]))
    with pytest.raises(ValueError, match="CoLA exists already; pass --overwrite"):
        list(prepare(official, vocabulary, tmp_path / "bin", ["CoLA", "RTE"]))
    assert not (tmp_path / "bin" / "RTE").exists()
    list(prepare(official, vocabulary, tmp_path / "bin", ["CoLA", "RTE"], overwrite=True))
    other = tmp_path / "other"
    other.mkdir()
    for name in ("sentencepiece.bpe.model", "dict.txt"):
        (other / name).write_bytes((vocabulary / name).read_bytes())
    with (other / "dict.txt").open("a") as file:
        file.write("more 1\n")
    with pytest.raises(ValueError, match="holds CoLA prepared with another vocabulary"):
        list(prepare(official, other, tmp_path / "bin", ["RTE"], overwrite=True))


def test_no_file_of_an_earlier_vocabulary_stays(vocabulary, tmp_path):
    """A list of kept words that the new vocabulary lacks would still make <unk> of the others."""
    official, old = official_folder(tmp_path / "official"), tmp_path / "old"
    old.mkdir()
    for name in ("sentencepiece.bpe.model", "dict.txt"):
        (old / name).write_bytes((vocabulary / name).read_bytes())
    (old / "words.txt").write_text("cat\n")
    list(prepare(official, old, tmp_path / "bin", ["CoLA", "RTE"]))
    for other in (vocabulary, old):
        with pytest.raises(ValueError, match=r"holds CoLA prepared with another vocabulary \(words.txt differ"):
            list(prepare(official, other, tmp_path / "bin", ["RTE"], overwrite=True))
        list(prepare(official, other, tmp_path / "bin", ["CoLA", "RTE"], overwrite=True))
        assert (tmp_path / "bin" / "words.txt").exists() == (other == old)
        assert TextEncoder(tmp_path / "bin").encode("dogs") == TextEncoder(other).encode("dogs")


def test_missing_inputs_are_refused(vocabulary, tmp_path):
    with pytest.raises(ValueError, match="has none of the folders CoLA"):
        list(prepare(tmp_path, vocabulary, tmp_path / "bin"))
    write_lines(tmp_path / "CoLA" / "train.tsv", ROWS["CoLA"])
    with pytest.raises(ValueError, match=r"dev\.tsv is missing"):
        list(prepare(tmp_path, vocabulary, tmp_path / "bin"))
    with pytest.raises(ValueError, match="has no folder RTE"):
        list(prepare(tmp_path, vocabulary, tmp_path / "bin", ["rte"]))
    assert not (tmp_path / "bin" / "CoLA").exists()


class Items:
    """An indexed dataset of sequences that each end in </s> = 2."""

    def __init__(self, lengths, first):
        self.items = [torch.arange(first, first + n + 1) for n in lengths]
        for item in self.items:
            item[-1] = 2
        self.sizes = np.array([len(item) for item in self.items])

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def test_long_pairs_lose_tokens_of_the_longer_sentence():
    dictionary = Dictionary()
    a, b = [3, 10, 2, 10, 9], [3, 2, 10, 10, 0]
    pairs = Pairs(Items(a, 10), Items(b, 50), dictionary, limit=12)  # 4 special tokens, 8 others
    kept = [pairs[i].tolist() for i in range(5)]
    assert kept[0] == [0, 10, 11, 12, 2, 2, 50, 51, 52, 2]  # as sentence_prediction builds it
    assert [len(tokens) for tokens in kept] == pairs.sizes.tolist() == [10, 12, 12, 12, 12]
    assert kept[1] == [0, 10, 11, 12, 13, 14, 15, 2, 2, 50, 51, 2]
    assert kept[2] == [0, 10, 11, 2, 2, 50, 51, 52, 53, 54, 55, 2]
    assert kept[3] == [0, 10, 11, 12, 13, 2, 2, 50, 51, 52, 53, 2]
    assert kept[4] == [0, *range(10, 18), 2, 2, 2] and pairs.shortened == 4
    single = Pairs(Items([3, 10], 10), None, dictionary, limit=6)
    assert single[0].tolist() == [0, 10, 11, 12, 2] and single[1].tolist() == [0, 10, 11, 12, 13, 2]


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


# ---------------------------------------------------------------------------------------------------------- schedule


class FakeOptimizer:
    def set_lr(self, lr):
        self.lr = lr

    def get_lr(self):
        return self.lr


@pytest.fixture
def any_optimizer(monkeypatch):
    monkeypatch.setattr("fairseq.optim.lr_scheduler.fairseq_lr_scheduler.FairseqOptimizer", FakeOptimizer)
    return FakeOptimizer()


def schedule(**values):
    return OmegaConf.structured(PolynomialDecayRatioConfig(lr=[1.0], **values))


def test_schedule_warms_up_and_ends_at_zero(any_optimizer):
    scheduler = PolynomialDecayRatio(schedule(total_num_update=100, warmup_ratio=0.06), any_optimizer)
    scheduler.step_begin_epoch(1)
    lrs = [scheduler.step_update(update) for update in range(1, 101)]
    assert lrs[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert lrs[6:] == pytest.approx([1 - (u - 6) / 94 for u in range(7, 101)])
    assert lrs[-1] == 0


@pytest.mark.parametrize(
    "values, message",
    [
        ({"total_num_update": 0}, "needs total_num_update"),
        ({"total_num_update": 10, "warmup_ratio": 1.0}, r"must be in \[0, 1\), got 1.0"),
        ({"total_num_update": 10, "warmup_updates": 5}, "takes warmup_ratio, not warmup_updates"),
    ],
)
def test_schedule_refuses(values, message, any_optimizer):
    with pytest.raises(ValueError, match=message):
        PolynomialDecayRatio(schedule(**values), any_optimizer)


# ---------------------------------------------------------------------------------------------------------- training


def finetune(data, checkpoint, save_dir, *overrides):
    return train_recipe(
        "finetune", "model._name=tupe_r_tiny", "+model.encoder_embed_dim=32", "+model.encoder_ffn_embed_dim=32",
        f"task.data={data}", f"checkpoint.finetune_from_model={checkpoint}", f"checkpoint.save_dir={save_dir}",
        "dataset.num_workers=0", "dataset.batch_size=12", *overrides,
    )  # fmt: skip


def table(path):
    return [line.split("\t") for line in path.read_text().splitlines()[1:]]


def test_training_records_unrounded_scores_and_predictions(learnable, pretrained, tmp_path):
    cfg = finetune(learnable, pretrained, tmp_path, "glue=mnli", "optimization.max_epoch=3", "optimization.lr=[0.01]")
    assert cfg.model.max_positions == 20  # the checkpoint's, not the 512 of a fresh configuration
    assert cfg.lr_scheduler.total_num_update == 3 * 4  # 41 examples in batches of 12
    result = scores_of(tmp_path)
    assert result["task"] == "MNLI" and result["lr"] == 0.01 and result["seed"] == 1
    records = result["records"]
    assert [(r["epoch"], r["split"], r["num_updates"]) for r in records] == [
        (1, "valid", 4), (1, "valid1", 4), (2, "valid", 8), (2, "valid1", 8), (3, "valid", 12), (3, "valid1", 12),
    ]  # fmt: skip
    for split, count in (("valid", 41), ("valid1", 19)):
        rows = table(tmp_path / "predictions" / f"{split}_last.tsv")
        assert [int(row[0]) for row in rows] == list(range(count))
        right = sum(row[1] == row[2] for row in rows)
        last = next(r for r in records[::-1] if r["split"] == split)
        assert last["accuracy"] == pytest.approx(100 * right / count, rel=1e-12)
        targets = [
            row.split("\t")[-1] for row in (learnable.parent / "official/MNLI/dev_matched.tsv").read_text().split("\n")
        ]
        assert [row[2] for row in rows] == targets[1 : count + 1]
    best = max(r["accuracy"] for r in records if r["split"] == "valid")
    rows = table(tmp_path / "predictions" / "valid_best.tsv")
    assert best == pytest.approx(100 * sum(row[1] == row[2] for row in rows) / 41, rel=1e-12)
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert state["extra_state"]["best"] == best and type(state["extra_state"]["best"]) is float
    schedule = state["optimizer_history"][-1]
    assert schedule["num_updates"] == 12
    assert state["last_optimizer_state"]["param_groups"][0]["lr"] == 0


def test_regression(learnable, pretrained, tmp_path):
    finetune(learnable, pretrained, tmp_path, "glue=stsb", "optimization.max_epoch=2")
    record = scores_of(tmp_path)["records"][-1]
    rows = np.array(table(tmp_path / "predictions" / "valid_last.tsv"), dtype=float)
    assert set(rows[:, 2]) == {0.0, 0.5, 1.0}
    assert record["pearson"] == pytest.approx(100 * np.corrcoef(rows[:, 1], rows[:, 2])[0, 1], abs=1e-6)
    assert record["loss"] == pytest.approx(((rows[:, 1] - rows[:, 2]) ** 2).mean(), rel=1e-5)
    assert "spearman" in record and "accuracy" not in record


def test_a_killed_run_resumes_with_the_same_scores(learnable, pretrained, tmp_path, monkeypatch):
    options = ["glue=cola", "optimization.max_epoch=3", "optimization.lr=[0.003]"]
    finetune(learnable, pretrained, tmp_path / "whole", *options)
    step = Trainer.train_step

    def killed_in_epoch_2(trainer, samples, **kwargs):
        if trainer.get_num_updates() == 6:
            raise KeyboardInterrupt
        return step(trainer, samples, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "train_step", killed_in_epoch_2)
        finetune(learnable, pretrained, tmp_path / "killed", *options)
    assert len(scores_of(tmp_path / "killed")["records"]) == 1
    finetune(learnable, pretrained, tmp_path / "killed", *options)
    whole, resumed = scores_of(tmp_path / "whole")["records"], scores_of(tmp_path / "killed")["records"]
    assert [r["num_updates"] for r in whole] == [4, 8, 12] and resumed == whole


def test_out_of_memory_ends_a_run(learnable, pretrained, tmp_path, monkeypatch):
    """fairseq alone would leave the batch out. What the run was is written down all the same, from its start on."""
    forward = glue.GlueCriterion.forward

    def fails_in_training(criterion, model, sample, *args):
        if model.training:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return forward(criterion, model, sample, *args)

    monkeypatch.setattr(glue.GlueCriterion, "forward", fails_in_training)
    with pytest.raises(MemoryError, match="out of memory: CUDA"):
        finetune(learnable, pretrained, tmp_path, "glue=cola", "optimization.max_epoch=1")
    scores = scores_of(tmp_path)
    assert scores["records"] == [] and scores["task"] == "CoLA" and scores["commit"] and scores["command"]


@pytest.mark.parametrize("option", ["dataset.validate_interval_updates", "checkpoint.save_interval_updates"])
def test_scores_within_an_epoch_are_refused(learnable, pretrained, tmp_path, option):
    """They would make an unfinished last epoch look finished."""
    with pytest.raises(ValueError, match=f"{option.split('.')[1]}=2: fine-tuning is scored at the end of each epoch"):
        finetune(learnable, pretrained, tmp_path, "glue=cola", f"{option}=2")


def test_an_unreadable_result_starts_over(learnable, pretrained, tmp_path):
    (tmp_path / "scores.json").write_text('{"records": [')
    finetune(learnable, pretrained, tmp_path, "glue=cola", "optimization.max_epoch=1")
    assert len(scores_of(tmp_path)["records"]) == 1


def test_a_damaged_last_checkpoint_is_replaced(learnable, pretrained, tmp_path):
    finetune(learnable, pretrained, tmp_path, "glue=cola", "optimization.max_epoch=1")
    last, whole = tmp_path / "checkpoint_last.pt", (tmp_path / "checkpoint_best.pt").read_bytes()
    last.write_bytes(whole[:5000])
    env = {**os.environ, "DRY_RUN": "1", "GPUS": "0", "PYTHON": sys.executable}
    command = ["bash", "scripts/finetune.sh", "CoLA", learnable, pretrained, tmp_path]
    said = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert "is damaged" in said.stderr and "restore-file" not in said.stdout
    assert last.read_bytes() == whole[:5000]  # a dry run changes nothing
    arguments = [str(learnable), f"--finetune-from-model={pretrained}", f"--save-dir={tmp_path}"]
    arguments = fairseq_arguments(ROOT / "configs", "finetune", ["glue=cola"], arguments, cuda=False)
    assert last.read_bytes() == whole
    assert not any(word.startswith("--restore-file") for word in arguments)


def test_a_run_without_checkpoints_starts_over(learnable, pretrained, tmp_path):
    options = ["glue=cola", "checkpoint.no_save=true", "optimization.max_epoch=2"]
    finetune(learnable, pretrained, tmp_path, *options)
    whole = scores_of(tmp_path)
    cut = {**whole, "records": [{**whole["records"][0], "accuracy": -1.0}]}
    (tmp_path / "scores.json").write_text(json.dumps(cut))
    finetune(learnable, pretrained, tmp_path, *options)
    assert scores_of(tmp_path)["records"] == whole["records"]
    # Now it is finished: nothing is trained again, nothing is written.
    before = (tmp_path / "scores.json").stat().st_mtime_ns
    finetune(learnable, pretrained, tmp_path, *options)
    assert (tmp_path / "scores.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "override, said",
    [
        ("optimization.max_update=3", "max_update=3: fine-tuning ends with its last epoch"),
        ("optimization.stop_time_hours=1", "stop_time_hours=1"),
        ("checkpoint.patience=1", "patience=1"),
        ("optimization.max_epoch=0", "needs optimization.max_epoch"),
    ],
)
def test_a_run_that_would_never_be_finished_is_refused(override, said, learnable, pretrained, tmp_path):
    with pytest.raises(ValueError, match=said):
        finetune(learnable, pretrained, tmp_path, "glue=cola", override)


def test_a_run_without_updates_has_diverged(learnable, pretrained, tmp_path, monkeypatch):
    """fairseq skips updates whose fp16 gradients are not finite, for ever: that is no score of a trained model."""
    step = Trainer.train_step

    def overflow(self, *args):
        if self.get_num_updates() < 4:  # those of the first epoch
            return step(self, *args)

    monkeypatch.setattr(Trainer, "train_step", overflow)
    with pytest.raises(FloatingPointError, match="diverged: loss .*, 4 updates so far"):
        finetune(learnable, pretrained, tmp_path, "glue=cola", "checkpoint.no_save=true", "optimization.max_epoch=3")
    assert len(scores_of(tmp_path)["records"]) == 1
    (tmp_path / "crash.pt").touch()
    end_of_process(tmp_path, True, 0)
    assert "last epoch" in read_failure(tmp_path)["reason"] and not (tmp_path / "crash.pt").exists()
    monkeypatch.undo()  # started again, it comes to its end
    finetune(learnable, pretrained, tmp_path, "glue=cola", "checkpoint.no_save=true", "optimization.max_epoch=3")
    end_of_process(tmp_path, True, 0)
    assert read_failure(tmp_path) is None


@pytest.mark.parametrize(
    "code, reason",
    [
        ("raise FloatingPointError('gradients are Nan/Inf')", "diverged"),
        ("raise ValueError('no such file')", "ValueError: no such file"),
        ("raise KeyboardInterrupt", None),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", None),
    ],
    ids=["diverged", "error", "interrupted", "killed"],
)
def test_what_is_left_of_a_run_that_ended_early(code, reason, tmp_path):
    """Whatever started it: only a failure is one, what was stopped goes on later."""
    begin = "import atexit, pathlib, time; from tupe.plugin.finetune import end_of_process as end"
    register = f"atexit.register(end, pathlib.Path({str(tmp_path)!r}), True, time.time())"
    script = f"{begin}; {register}\n{code}"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True).returncode != 0
    assert (read_failure(tmp_path) or {"reason": None})["reason"] == reason


def test_a_folder_of_another_run_is_refused(learnable, pretrained, tmp_path):
    finetune(learnable, pretrained, tmp_path, "glue=cola", "checkpoint.no_save=true", "optimization.max_epoch=1")
    with pytest.raises(ValueError, match="holds another run .*max_epoch 1 there, 2 here; seed 1 there, 3 here"):
        finetune(learnable, pretrained, tmp_path, "glue=cola", "common.seed=3", "optimization.max_epoch=2")


def test_a_folder_in_use_is_refused(learnable, pretrained, tmp_path):
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another process would
        with pytest.raises(BlockingIOError, match="another process is training in"):
            finetune(learnable, pretrained, tmp_path, "glue=cola", "optimization.max_epoch=1")


def test_a_contradicting_model_is_refused(learnable, pretrained, tmp_path):
    with pytest.raises(ValueError, match=r"position=untied\+t5 in the checkpoint, untied here") as error:
        finetune(learnable, pretrained, tmp_path, "model._name=tupe_a_tiny")
    assert "cls" not in str(error.value)
    with pytest.raises(ValueError, match="cls=untied in the checkpoint, tied here"):
        finetune(learnable, pretrained, tmp_path, "+model.cls=tied")
    with pytest.raises(ValueError, match="encoder_layers=2 in the checkpoint, 4 here"):
        finetune(learnable, pretrained, tmp_path, "model._name=tupe_r_mini")
    with pytest.raises(ValueError, match="there is no checkpoint"):
        finetune(learnable, tmp_path / "none.pt", tmp_path)


def test_every_model_option_is_either_structure_or_free():
    """A new option fails here until somebody has decided: may fine-tuning change it?"""
    fields = {key for key in ElectraConfig.__dataclass_fields__ if not key.startswith("_")}
    assert set(structure(dict.fromkeys(fields))) == fields - set(FREE) == {
        "position", "cls", "normaliser", "layer", "layer_norm_eps", "encoder_layers", "encoder_embed_dim",
        "encoder_ffn_embed_dim", "encoder_attention_heads", "generator_fraction", "segments",
    }  # fmt: skip
    assert set(FREE) <= fields


def test_another_dictionary_is_refused(learnable, pretrained, tmp_path):
    """Longer by a word, and of the same length with two words swapped."""
    lines = (learnable / "dict.txt").read_text().splitlines()
    longer = [*lines, "more 1"], "makes .* take the dict.txt of its own pre-training data"
    swapped = [lines[1], lines[0], *lines[2:]], "has as many types as the model's dictionary, but other ones"
    for changed, message in (longer, swapped):
        data = tmp_path / str(len(changed))
        data.mkdir()
        (data / "CoLA").symlink_to(learnable / "CoLA")
        (data / "dict.txt").write_text("\n".join(changed) + "\n")
        with pytest.raises(ValueError, match=f"dict.txt {message}"):
            finetune(data, pretrained, tmp_path / "run")


def test_shell_recipe_and_hydra_train_the_same(learnable, pretrained, tmp_path):
    """The same tiny model through scripts/finetune.sh and through fairseq-hydra-train: same losses, same scores."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "GPUS": "0"}
    common = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": env, "cwd": ROOT}
    small = ["--lr", "0.003", "--max-epoch", "2", "--num-workers", "0"]
    shell = ["bash", "scripts/finetune.sh", "CoLA", learnable, pretrained, tmp_path / "shell", *small]
    hydra = [
        sys.executable, "-m", "fairseq_cli.hydra_train", "--config-dir", ROOT / "configs", "--config-name", "finetune",
        "glue=cola", "model=tupe_r", "model._name=tupe_r_tiny", "+model.encoder_embed_dim=32",
        "+model.encoder_ffn_embed_dim=32", f"task.data={learnable}", f"checkpoint.finetune_from_model={pretrained}",
        f"checkpoint.save_dir={tmp_path / 'hydra'}", "optimization.lr=[0.003]", "optimization.max_epoch=2",
        "dataset.num_workers=0", "common.fp16=false", "common.cpu=true", f"hydra.run.dir={tmp_path / 'cwd'}",
    ]  # fmt: skip
    started = [subprocess.Popen([str(word) for word in command], **common) for command in (shell, hydra)]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    shell, hydra = scores_of(tmp_path / "shell"), scores_of(tmp_path / "hydra")
    assert len(shell["records"]) == 2 and shell["records"] == hydra["records"]
    for key in ("architecture", "lr", "seed", "max_epoch", "pretrained_updates", "metrics"):
        assert shell[key] == hydra[key], key


# fairseq gathers the predictions of several processes through the memory of GPUs; main memory stands in for it.
WITHOUT_GPU = """
import torch
torch.cuda.ByteTensor = torch.ByteTensor
torch.Tensor.pin_memory = lambda tensor: tensor
from fairseq_cli.train import cli_main
cli_main()
"""


def test_two_processes_score_what_one_does(learnable, pretrained, tmp_path):
    """Training and validation on two processes: every development example once, and the scores of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank, processes in ((0, 1), (0, 2), (1, 2)):  # two runs at the same time
        folder = tmp_path / str(processes)
        arguments = fairseq_arguments(
            ROOT / "configs", "finetune",
            ["glue=mnli", "model._name=tupe_r_tiny", "dataset.batch_size=6", "dataset.num_workers=0"],
            [
                str(learnable), f"--user-dir={ROOT / 'tupe'}", f"--finetune-from-model={pretrained}",
                f"--save-dir={folder}", "--encoder-embed-dim=32", "--encoder-ffn-embed-dim=32", "--lr=0.01",
                "--max-epoch=2", f"--update-freq={2 // processes}", "--no-save", "--dropout=0",
                "--attention-dropout=0", "--pooler-dropout=0",
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
    one, two = scores_of(tmp_path / "1"), scores_of(tmp_path / "2")
    assert len(one["records"]) == len(two["records"]) == 4
    for a, b in zip(one["records"], two["records"], strict=True):
        assert (a["split"], a["num_updates"], a["accuracy"]) == (b["split"], b["num_updates"], b["accuracy"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
    for split in ("valid", "valid1"):
        name = f"predictions/{split}_last.tsv"
        assert (tmp_path / "1" / name).read_text() == (tmp_path / "2" / name).read_text()


def test_predictions_for_the_server(learnable, pretrained, tmp_path):
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
    for name in ("CoLA", "MNLI", "STS-B"):
        group = name.lower().replace("-", "")
        finetune(
            data, pretrained, tmp_path / name, f"glue={group}", "optimization.max_epoch=2", "optimization.lr=[0.01]"
        )
        found = predict_glue(group, tmp_path / name / "checkpoint_last.pt", data, tmp_path / "out", batch_size=7)
        written += [path for path, _ in found]
    files = ["CoLA.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv", "STS-B.tsv"]
    for count in (1, 5):  # what is in the folder from another run stays out
        with zipfile.ZipFile(zip_submission(tmp_path / "out", written[:count])) as archive:
            assert archive.namelist() == files[:count]
    for file, run, split in (("CoLA", "CoLA", "valid"), ("MNLI-m", "MNLI", "valid"), ("AX", "MNLI", "valid1")):
        lines = (tmp_path / "out" / f"{file}.tsv").read_text().splitlines()
        assert lines[0] == "index\tprediction"
        stored = table(tmp_path / run / "predictions" / f"{split}_last.tsv")
        assert [line.split("\t") for line in lines[1:]] == [row[:2] for row in stored]
    stored = [float(row[1]) for row in table(tmp_path / "STS-B" / "predictions" / "valid_last.tsv")]
    written = [float(line.split("\t")[1]) for line in (tmp_path / "out/STS-B.tsv").read_text().splitlines()[1:]]
    assert written == pytest.approx([5 * min(max(value, 0), 1) for value in stored], abs=1e-3)
    with pytest.raises(ValueError, match="was not fine-tuned on CoLA, but on MNLI"):
        list(predict_glue("cola", tmp_path / "MNLI" / "checkpoint_last.pt", data, tmp_path / "out"))
    with pytest.raises(ValueError, match="holds no test set of CoLA"):
        list(predict_glue("cola", tmp_path / "CoLA" / "checkpoint_last.pt", learnable, tmp_path / "out"))


def test_every_glue_group_names_its_task():
    files = sorted((ROOT / "configs" / "glue").glob("*.yaml"))
    tasks = {path.stem: compose(ROOT / "configs", "finetune", [f"glue={path.stem}"]) for path in files}
    assert {cfg.task.glue_task for cfg in tasks.values()} == set(TASKS)
    for stem, cfg in tasks.items():
        assert glue_name(stem) == cfg.task.glue_task
        assert cfg.optimization.max_epoch == (5 if stem in ("mnli", "qnli", "qqp") else 10)
        subsets = cfg.dataset.get("valid_subset", "valid").split(",")
        assert subsets == [split for split, _ in TASKS[cfg.task.glue_task].files if split.startswith("valid")]
