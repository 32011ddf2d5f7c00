"""Training end to end on a tiny data set: resuming, masks, processes, launchers, damaged checkpoints."""

import logging
import math
import shutil
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from fairseq.trainer import Trainer
from helpers import CONFIGS, fork, load, pretrain_arguments, train

from tupe.cli.train import pretrain
from tupe.data.batches import Epoch
from tupe.data.blocks import Blocks
from tupe.data.splits import read_symbols

EPOCH = 9  # updates per epoch of the tiny data set


@pytest.fixture(scope="module")
def full_run(data, tmp_path_factory):
    """14 updates in 2 epochs with two data workers and dropout, a checkpoint after every fourth update."""
    save_dir = tmp_path_factory.mktemp("full")
    often = ["--save-interval-updates=4", "--keep-interval-updates=-1", "--save-interval=1"]
    losses = train(pretrain_arguments(data, save_dir, *often))
    assert len(losses) == 14 and not (save_dir / "checkpoint_3_14.pt").exists()
    return save_dir, losses


# Which together fill in every hook of a scheme, and another softmax.
SOME = [
    ["--position=absolute"], ["--position=deberta", "--normaliser=l2"], ["--position=rope_values", "--block=modern"],
    ["--position=shaw+shaw_values"], ["--position=t5:layer+urpe"], ["--block=gau", "--normaliser=relu2"],
]  # fmt: skip


@pytest.mark.parametrize("options", SOME, ids=" ".join)
def test_every_scheme_trains_through_fairseq_train(data, tmp_path, options):
    more = ["--max-update=2", "--no-save", "--disable-validation", "--num-workers=0", "--encoder-layers=1"]
    losses = train(pretrain_arguments(data, tmp_path, *more, "--position=t5", *options, arch="bert_a_tiny"))
    assert len(losses) == 2 and all(0 < loss < 10 and 0 < norm < math.inf for loss, norm in losses)


@pytest.mark.parametrize(
    "done", [4, pytest.param(EPOCH, marks=pytest.mark.thorough), EPOCH + 3], ids=["middle", "boundary", "second epoch"]
)
def test_resuming_is_exact(data, full_run, tmp_path, done):
    save_dir, losses = full_run
    if done == EPOCH:  # stop at the end of the epoch, in the way a time limit does
        stop = [f"--max-update={EPOCH}", "--total-num-update=14"]
        assert train(pretrain_arguments(data, tmp_path, *stop)) == losses[:EPOCH]
        restore = []
    else:
        restore = [f"--continue-once={save_dir}/checkpoint_{1 + done // EPOCH}_{done}.pt"]
    assert train(pretrain_arguments(data, tmp_path, *restore)) == losses[done:]


@pytest.mark.thorough
def test_a_run_that_began_with_a_file_goes_on_from_its_own_checkpoints(data, full_run, tmp_path):
    words = [f"--continue-once={full_run[0]}/checkpoint_1_4.pt", "--num-workers=0"]
    short = ["--max-update=6", "--total-num-update=14"]
    assert train(pretrain_arguments(data, tmp_path, *words, *short)) == full_run[1][4:6]
    assert train(pretrain_arguments(data, tmp_path, *words)) == full_run[1][6:]
    assert train(pretrain_arguments(data, tmp_path, *words)) == []
    with pytest.raises(ValueError, match="checkpoint.continue_once .*checkpoint_1_4.pt there, none here"):
        train(pretrain_arguments(data, tmp_path, words[1], "--max-update=15"))


def test_checkpoints_of_an_interval_are_there_at_the_end_of_an_epoch(data, tmp_path):
    words = [f"--save-interval-updates={EPOCH // 3}", "--keep-interval-updates=2", "--num-workers=0", "--max-update=9"]
    train(pretrain_arguments(data, tmp_path, *words, "--no-epoch-checkpoints", "--total-num-update=14"))
    assert {path.name for path in tmp_path.glob("checkpoint_*_*.pt")} == {"checkpoint_1_6.pt", "checkpoint_1_9.pt"}
    train(pretrain_arguments(data, tmp_path, words[2], "--max-update=10", "--total-num-update=14"))  # it goes on


def test_settings_that_do_not_work_are_refused(data, tmp_path):
    for words, message in (
        (["--store-ema"], "ema.store_ema: fairseq cannot average this model; valid: tupe checkpoint average"),
        (["--patience=2"], "checkpoint.patience: a run is as long as it is told"),
        (["--max-epoch=2", "--save-interval=2"], "checkpoint.save_interval: fairseq would not save the last epoch"),
        (["--no-last-checkpoints"], "checkpoint.no_last_checkpoints: a run is finished"),
        (["--valid-subset=valid,train"], "train is the split to train on; valid: other splits"),
    ):
        with pytest.raises(ValueError, match=message):
            train(pretrain_arguments(data, tmp_path, *words))


def test_without_validation_no_text_need_be_held_out(data, tmp_path):
    shutil.copytree(data, tmp_path / "data", ignore=shutil.ignore_patterns("valid.*", "checksums.json"))
    words = ["--disable-validation", "--max-update=2", "--num-workers=0"]
    assert len(train(pretrain_arguments(tmp_path / "data", tmp_path / "run", *words))) == 2


def masks_of_epochs(data, save_dir, *more):
    """What is to be predicted of every block, {id: ids}, in each of three epochs and in the validation after each, with
    one data worker, which is fairseq's default."""
    seen, valid_step = {"train": [], "valid": []}, Trainer.valid_step

    def remember(split, samples):
        for sample in samples:
            seen[split] += zip(sample["id"].tolist(), sample["target"].tolist(), strict=True)

    def validated(trainer, sample, *args, **kwargs):
        remember("valid", [sample])
        return valid_step(trainer, sample, *args, **kwargs)

    words = ["--num-workers=1", "--batch-size=16", "--max-epoch=3", "--max-update=99", "--no-save", *more]
    with mock.patch.object(Trainer, "valid_step", validated):
        train(pretrain_arguments(data, save_dir, *words), lambda samples: remember("train", samples))
    epochs = {}
    for split, found in seen.items():
        size = len(found) // 3
        epochs[split] = [dict(found[start : start + size]) for start in range(0, len(found), size)]
        assert size > 2 and [len(epoch) for epoch in epochs[split]] == [size] * 3
    return epochs


@pytest.mark.parametrize(
    "words",
    [[], ["--task=masked_lm"], ["--arch=electra_tupe_r_tiny", "--criterion=electra"]],
    ids=" ".join,
)  # fmt: skip
def test_masks_change_from_epoch_to_epoch_and_held_out_ones_do_not(words, data, tmp_path):
    epochs = masks_of_epochs(data, tmp_path / "run", *words)
    one, two, three = epochs["train"]
    assert one.keys() == two.keys() == three.keys()
    assert [key for key in one if one[key] == two[key] == three[key]] == []
    one, two, three = epochs["valid"]
    assert one == two == three


@pytest.mark.thorough
def test_fairseqs_own_task_resumes_exactly_at_a_border_and_within_an_epoch(data, tmp_path):
    words = ["--task=masked_lm", "--num-workers=1", "--batch-size=16", "--total-num-update=8", "--disable-validation"]

    def train_to(updates, folder):
        return train(pretrain_arguments(data, tmp_path / folder, *words, f"--max-update={updates}"))

    whole = train_to(8, "whole")
    assert len(whole) == 8 and train_to(3, "parts") + train_to(5, "parts") + train_to(8, "parts") == whole
    one, two = (load(tmp_path / folder / "checkpoint_last.pt") for folder in ("whole", "parts"))
    assert one["extra_state"]["train_iterator"]["epoch"] == 3  # of three updates
    assert all(torch.equal(one["model"][key], two["model"][key]) for key in one["model"])


def test_other_batches_go_on_at_the_same_place(data, full_run, tmp_path):
    seen, restore = [], f"--continue-once={full_run[0]}/checkpoint_1_4.pt"
    more = [restore, "--batch-size=2", "--max-update=6", "--num-workers=0"]
    train(pretrain_arguments(data, tmp_path / "here", *more), lambda batches: seen.extend(batches))
    count = len(Blocks(data / "train", 24, read_symbols(data)))
    expected = [Epoch(count, 1, 2, 1)[number] for number in (8, 9)]
    assert [[(1, i) for i in batch["id"].tolist()] for batch in seen] == expected
    more = [restore, "--tokens-per-sample=20", "--max-positions=24", "--num-workers=0"]
    with pytest.raises(ValueError, match="cannot go on. Resume with the old"):
        train(pretrain_arguments(data, tmp_path / "other", *more))
    more += ["--reset-dataloader", "--max-update=5"]
    assert len(train(pretrain_arguments(data, tmp_path / "anew", *more))) == 1


def test_damaged_last_checkpoint(data, full_run, tmp_path, caplog):
    save_dir, losses = full_run
    for name in ("checkpoint_1_4.pt", "checkpoint_1_8.pt", "checkpoint_2_12.pt", "checkpoint_last.pt"):
        shutil.copy(save_dir / name, tmp_path)
    for damaged in (tmp_path / "checkpoint_last.pt", tmp_path / "checkpoint_2_12.pt"):
        damaged.write_bytes(damaged.read_bytes()[:-1000])
    arguments = pretrain_arguments(data, tmp_path, "--num-workers=0")
    with caplog.at_level(logging.WARNING):
        assert train(arguments) == losses[8:]
    newest = f"resuming from {tmp_path}/checkpoint_1_8.pt (8 updates)"
    assert f"checkpoint_last.pt is damaged (File is not a zip file): {newest}" in caplog.text
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="no other there can be loaded"):
        train(arguments)


MISSING_LAST = {  # {file: that of the whole run with its content}, more words, updates done
    "best": ({"checkpoint_1_4": "1_4", "checkpoint_best": "1_8"}, [], 8),
    "end of an epoch": ({"checkpoint1": "1_8", "checkpoint_1_4": "1_4", "checkpoint_average": "2_12"}, [], 8),
    "nothing saved": ({"checkpoint_1_4": "1_4"}, ["--no-save"], 0),
}


@pytest.mark.parametrize("case", MISSING_LAST)
def test_a_missing_last_checkpoint_is_that_of_the_newest(data, full_run, tmp_path, case, caplog):
    """A full disk ends the first save of a run like this. It is then neither started over nor pruned."""
    (save_dir, losses), (files, words, done) = full_run, MISSING_LAST[case]
    for name, source in files.items():
        shutil.copy(save_dir / f"checkpoint_{source}.pt", tmp_path / f"{name}.pt")
    words = ["--num-workers=0", *words]
    with caplog.at_level(logging.WARNING):
        assert train(pretrain_arguments(data, tmp_path, *words)) == losses[done:]
    assert ("is missing: resuming from" in caplog.text) == (case in list(MISSING_LAST)[:2])
    assert (tmp_path / "checkpoint_last.pt").exists() == (case != "nothing saved")


def test_a_checkpoint_to_begin_with_that_is_missing_is_refused(data, tmp_path):
    begin = f"checkpoint.continue_once={tmp_path}/none.pt"
    words = [f"--data={data}", f"--output={tmp_path / 'run'}", begin, "--gpus=0"]
    result = CliRunner().invoke(pretrain, words)
    assert result.exit_code == 2 and not (tmp_path / "run").exists()
    assert f"{begin}: no such file" in result.stderr and result.stderr.count("\n") == 1
    arguments = pretrain_arguments(data, tmp_path)
    with pytest.raises(ValueError, match="continue_once.*no such file"):  # through fairseq-train
        train([*arguments, f"--continue-once={tmp_path}/none.pt"])
    with pytest.raises(ValueError, match="give checkpoint.continue_once=FILE"):
        train([*arguments, f"--restore-file={tmp_path}/none.pt"])


def hydra_train():
    from fairseq_cli.hydra_train import cli_main

    cli_main()


@pytest.mark.parametrize(
    "recipe, arch",
    [
        ("pretrain", "tupe_r_tiny"), pytest.param("pretrain_electra", "electra_tupe_r_tiny", marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.thorough
def test_both_launchers_train_the_same_model(recipe, arch, data, tmp_path):
    words = [f"--recipe={recipe}", f"--arch={arch}", f"--data={data}", f"--output={tmp_path / 'tupe'}", "--gpus=0"]
    words += ["--max-update=3", "--lr=[0.003]", "--tokens-per-sample=24", "--warmup-updates=1", "--batch-size=4"]
    result = CliRunner().invoke(pretrain, [*words, "--update-freq=2", "--num-workers=0"])
    assert result.exit_code == 0, result.output
    hydra = [
        "--config-dir", str(CONFIGS), "--config-name", recipe,
        f"model._name={arch}", f"task.data={data}", f"checkpoint.save_dir={tmp_path}/hydra",
        "common.fp16=false", "common.cpu=true", "dataset.num_workers=0", "dataset.batch_size=4",
        "optimization.update_freq=[2]", "optimization.lr=[0.003]", "optimization.max_update=3",
        "lr_scheduler.warmup_updates=1", "task.tokens_per_sample=24", f"hydra.run.dir={tmp_path}/hydra_log",
    ]  # fmt: skip
    process = fork(hydra_train, "fairseq-hydra-train", *hydra, anew=True)
    process.join()
    assert process.exitcode == 0
    checkpoints = [load(tmp_path / name / "checkpoint_last.pt") for name in ("tupe", "hydra")]
    assert [checkpoint["optimizer_history"][-1]["num_updates"] for checkpoint in checkpoints] == [3, 3]
    # The trained weights are the same to the last bit, and so are the configurations.
    first, second = (checkpoint["model"] for checkpoint in checkpoints)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    for section in ("model", "task", "criterion", "optimizer", "lr_scheduler", "optimization", "dataset"):
        assert checkpoints[0]["cfg"][section] == checkpoints[1]["cfg"][section], section
    model, criterion = (checkpoints[0]["cfg"][section] for section in ("model", "criterion"))
    assert model["_name"] == arch and model["encoder_layers"] == 2 and model["position"] == "untied+t5"
    if recipe == "pretrain_electra":
        assert (criterion["_name"], criterion["discriminator_weight"], model["generator_fraction"]) == (
            "electra",
            50,
            3,
        )
        assert "generator.project.weight" in first and "discriminator.out.weight" in first
    else:
        assert criterion["_name"] == "masked_lm"
