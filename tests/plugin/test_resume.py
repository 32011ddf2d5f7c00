"""Training end to end on a tiny data set: resuming, masks, processes, launchers, damaged checkpoints."""

import inspect
import logging
import math
import os
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from fairseq.trainer import Trainer
from helpers import CONFIGS, PLUGIN, fork, free_port, load, pretrain_arguments, train

from tupe.attention import NORMALISERS
from tupe.cli.train import pretrain
from tupe.data.batches import Epoch
from tupe.data.blocks import Blocks
from tupe.data.splits import read_symbols
from tupe.plugin import saving
from tupe.plugin.resume import position_in_epoch
from tupe.plugin.saving import resume_from_newest
from tupe.schemes import SCHEMES

EPOCH = 9  # updates per epoch of the tiny data set


@pytest.fixture(scope="module")
def full_run(data, tmp_path_factory):
    """14 updates in 2 epochs with two data workers and dropout, a checkpoint after every fourth update."""
    save_dir = tmp_path_factory.mktemp("full")
    often = ["--save-interval-updates=4", "--keep-interval-updates=-1", "--save-interval=1"]
    losses = train(pretrain_arguments(data, save_dir, *often))
    assert len(losses) == 14 and not (save_dir / "checkpoint_3_14.pt").exists()
    return save_dir, losses


# Which together fill in every hook of a scheme (the others train on what all models have), and another softmax.
SOME = [
    ["--position=absolute"], ["--position=deberta", "--normaliser=l2"], ["--position=rope_values", "--block=modern"],
    ["--position=shaw+shaw_values"], ["--position=t5:layer+urpe"], ["--block=gau", "--normaliser=relu2"],
]  # fmt: skip
OTHERS = [
    *([f"--position={name}"] for name in SCHEMES),
    *([f"--normaliser={name}"] for name in NORMALISERS if name != "softmax"),
    *(["--block=gau", f"--normaliser={name}"] for name in ("softmax", "l2")),
    ["--block=modern"],
]


@pytest.mark.parametrize(
    "options",
    [*SOME, *(pytest.param(words, marks=pytest.mark.slow) for words in OTHERS if words not in SOME)],
    ids=" ".join,
)
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
        restore = [f"--restore-file={save_dir}/checkpoint_{1 + done // EPOCH}_{done}.pt"]
    assert train(pretrain_arguments(data, tmp_path, *restore)) == losses[done:]


def test_a_run_that_began_with_a_file_goes_on_from_its_own_checkpoints(data, full_run, tmp_path):
    words = [f"--restore-file={full_run[0]}/checkpoint_1_4.pt", "--num-workers=0"]
    short = ["--max-update=6", "--total-num-update=14"]
    assert train(pretrain_arguments(data, tmp_path, *words, *short)) == full_run[1][4:6]
    assert train(pretrain_arguments(data, tmp_path, *words)) == full_run[1][6:]
    assert train(pretrain_arguments(data, tmp_path, *words)) == []


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
    [[], ["--arch=electra_tupe_r_tiny", "--criterion=electra"],
     pytest.param(["--num-workers=0"], marks=pytest.mark.thorough)],
    ids=" ".join,
)  # fmt: skip
def test_masks_change_from_epoch_to_epoch_and_held_out_ones_do_not(words, data, tmp_path):
    epochs = masks_of_epochs(data, tmp_path / "run", *words)
    one, two, three = epochs["train"]
    assert one.keys() == two.keys() == three.keys()
    assert [key for key in one if one[key] == two[key] == three[key]] == []
    one, two, three = epochs["valid"]
    assert one == two == three


def state(position, shards, batches=12):
    return {"iterations_in_epoch": position, "num_shards": shards, "num_batches": batches}


def test_position_follows_the_number_of_processes(caplog):
    assert position_in_epoch(state(3, 2), 2, 12, False) == 3
    assert not caplog.records
    assert position_in_epoch(state(3, 2), 1, 12, False) == 6
    assert position_in_epoch(state(4, 1), 2, 12, False) == 2
    assert "resuming on 2 processes a run of 1" in caplog.text
    assert position_in_epoch(state(0, 1), 5, 12, False) == 0  # between two epochs anything goes
    with pytest.raises(ValueError, match="after 3 batches .* 2 processes cannot continue .*--reset-dataloader"):
        position_in_epoch(state(3, 1), 2, 12, False)
    with pytest.raises(ValueError, match="cannot continue"):
        position_in_epoch(state(4, 1), 2, 12, True)
    with pytest.raises(ValueError, match="an epoch of 12 batches, now an epoch has 24"):
        position_in_epoch(state(4, 1), 1, 24, False)


def test_other_batches_go_on_at_the_same_place(data, full_run, tmp_path):
    seen, restore = [], f"--restore-file={full_run[0]}/checkpoint_1_4.pt"
    more = [restore, "--batch-size=2", "--max-update=6", "--num-workers=0"]
    train(pretrain_arguments(data, tmp_path / "here", *more), lambda batches: seen.extend(batches))
    count = len(Blocks(data / "train", 24, read_symbols(data)))
    expected = [Epoch(count, 1, 2, 1)[number] for number in (8, 9)]
    assert [[(1, i) for i in batch["id"].tolist()] for batch in seen] == expected
    more = [restore, "--tokens-per-sample=20", "--max-positions=24", "--num-workers=0"]
    with pytest.raises(ValueError, match="the position in the data is lost"):
        train(pretrain_arguments(data, tmp_path / "other", *more))
    more += ["--reset-dataloader", "--max-update=5"]
    assert len(train(pretrain_arguments(data, tmp_path / "anew", *more))) == 1


def test_iterator_continues_on_another_number_of_processes():
    from fairseq.data.iterators import EpochBatchIterator

    class Numbers(torch.utils.data.Dataset):
        def __getitem__(self, index):
            return index

        def __len__(self):
            return 24

    def iterator(shards, shard):
        batches = [[2 * i, 2 * i + 1] for i in range(12)]
        return EpochBatchIterator(Numbers(), lambda items: items, batches, num_shards=shards, shard_id=shard)

    everything = list(iterator(1, 0).next_epoch_itr())
    pair = [iterator(2, shard) for shard in range(2)]
    running = [half.next_epoch_itr() for half in pair]
    consumed = [next(running[shard]) for _ in range(3) for shard in range(2)]
    assert consumed == everything[:6]
    resumed = iterator(1, 0)
    resumed.load_state_dict(pair[0].state_dict())
    assert list(resumed.next_epoch_itr()) == everything[6:]


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
    with pytest.raises(ValueError, match="no other checkpoint there can be loaded"):
        train(arguments)


MISSING_LAST = {  # {file: that of the whole run with its content}, more words, updates done
    "best": ({"checkpoint_1_4": "1_4", "checkpoint_best": "1_8"}, [], 8),
    "end of an epoch": ({"checkpoint1": "1_8", "checkpoint_1_4": "1_4", "checkpoint_average": "2_12"}, [], 8),
    "another suffix": ({"checkpoint_1_4": "1_4", "checkpoint_1_8_b": "1_8"}, ["--checkpoint-suffix=_b"], 8),
    "none wanted": ({"checkpoint_1_4": "1_4", "checkpoint_1_8": "1_8"}, ["--no-last-checkpoints"], 8),
    "nothing saved": ({"checkpoint_1_4": "1_4"}, ["--no-save"], 0),
    "a file to restore": ({"checkpoint_1_8": "1_8"}, ["--restore-file={}/checkpoint_1_4.pt"], 4),
}


@pytest.mark.parametrize("case", MISSING_LAST)
def test_a_missing_last_checkpoint_is_that_of_the_newest(data, full_run, tmp_path, case, caplog):
    """A full disk ends the first save of a run like this. It is then neither started over nor pruned."""
    (save_dir, losses), (files, words, done) = full_run, MISSING_LAST[case]
    for name, source in files.items():
        shutil.copy(save_dir / f"checkpoint_{source}.pt", tmp_path / f"{name}.pt")
    words = ["--num-workers=0", *(word.format(save_dir) for word in words)]
    with caplog.at_level(logging.WARNING):
        assert train(pretrain_arguments(data, tmp_path, *words)) == losses[done:]
    assert ("is missing: resuming from" in caplog.text) == (case in list(MISSING_LAST)[:3])
    assert (tmp_path / "checkpoint_last.pt").exists() == (case not in list(MISSING_LAST)[2:5])


@pytest.mark.slow
def test_two_processes_resume_without_a_last_checkpoint(data, tmp_path):
    """The first of them chooses the newest; the other one takes the same, or both wait for each other for ever."""

    def start(updates):
        words = [f"--data={data}", f"--output={tmp_path / 'run'}", "--gpus=0", "--nodes=2", "--arch=tupe_r_tiny"]
        words += ["--tokens-per-sample=24", "--batch-size=2", f"--max-update={updates}", "--save-interval-updates=2"]
        words += ["checkpoint.no_last_checkpoints=true", "--num-workers=0", "--warmup-updates=1"]
        words += [f"--master-port={free_port()}"]
        command = [sys.executable, "-m", "tupe", "pretrain", *words]
        both = [subprocess.Popen([*command, f"--node-rank={rank}"], cwd=PLUGIN.parent) for rank in range(2)]
        return [process.wait(240) for process in both]

    assert start(2) == [0, 0] and start(4) == [0, 0]
    assert load(tmp_path / "run" / "checkpoint_1_4.pt")["optimizer_history"][-1]["num_updates"] == 4


def test_a_checkpoint_without_the_optimizer_starts_nothing(data, full_run, tmp_path, caplog):
    state = load(full_run[0] / "checkpoint_1_8.pt")
    torch.save({**state, "last_optimizer_state": None}, tmp_path / "checkpoint_best.pt")
    with caplog.at_level(logging.WARNING):
        short = ["--max-update=1", "--no-epoch-checkpoints", "--num-workers=0"]
        assert len(train(pretrain_arguments(data, tmp_path, *short))) == 1
    assert "no checkpoint there has the optimizer's state: the run starts over" in caplog.text


def test_all_shards_of_a_checkpoint_are_needed(full_run, tmp_path):
    from omegaconf import OmegaConf

    def mend():
        parallel = {"use_sharded_state": True, "ddp_backend": "fully_sharded", "distributed_world_size": 2}
        config = {"checkpoint": checkpoint, "distributed_training": parallel, "model": {"_name": "tupe_r_tiny"}}
        resume_from_newest(OmegaConf.create(config))
        return sorted(path.name for path in tmp_path.glob("checkpoint_last*"))

    checkpoint = {"save_dir": str(tmp_path), "restore_file": "checkpoint_last.pt", "checkpoint_suffix": ""}
    checkpoint |= {"no_save": False, "no_last_checkpoints": False, "continue_once": None}
    shards = ["checkpoint_1_4-shard0.pt", "checkpoint_1_4-shard1.pt", "checkpoint_1_8-shard0.pt"]
    assert mend() == []
    for name in shards:
        shutil.copy(full_run[0] / f"{name.partition('-')[0]}.pt", tmp_path / name)
    assert mend() == ["checkpoint_last-shard0.pt", "checkpoint_last-shard1.pt"]
    assert load(tmp_path / "checkpoint_last-shard0.pt")["optimizer_history"][-1]["num_updates"] == 4


@pytest.mark.parametrize("option", ["restore-file"])
def test_a_checkpoint_to_restore_that_is_missing_is_refused(option, data, tmp_path):
    words = [f"--data={data}", f"--output={tmp_path / 'run'}", f"--{option}={tmp_path}/none.pt", "--gpus=0"]
    result = CliRunner().invoke(pretrain, words)
    assert result.exit_code == 2 and not (tmp_path / "run").exists()
    assert f"--{option} {tmp_path}/none.pt: no such file" in result.stderr and result.stderr.count("\n") == 1
    arguments = pretrain_arguments(data, tmp_path)
    with pytest.raises(ValueError, match=f"--{option} .*no such file"):  # through fairseq-train
        train([*arguments, f"--{option}={tmp_path}/none.pt"])


def test_training_without_asserts_is_refused(data, tmp_path, monkeypatch):
    """fairseq writes checkpoint_last.pt in one of its own. The check is compiled as `python -O` compiles all."""
    optimized = {}
    exec(compile(inspect.getsource(saving.check_asserts), "saving.py", "exec", optimize=1), optimized)
    monkeypatch.setattr("tupe.plugin.launch.check_asserts", optimized["check_asserts"])
    result = CliRunner().invoke(pretrain, [f"--data={data}", f"--output={tmp_path / 'run'}", "--gpus=0"])
    assert result.exit_code == 2 and not (tmp_path / "run").exists(), result.output
    assert "PYTHONOPTIMIZE" in result.output and result.output.count("\n") == 1


def test_checkpoint_is_not_executed(tmp_path):
    """Loading a checkpoint runs no code from it, under any supported torch."""

    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    import numpy as np
    from fairseq.checkpoint_utils import load_checkpoint_to_cpu

    torch.save({"model": {}, "cfg": Bomb()}, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="refused"):
        load_checkpoint_to_cpu(str(tmp_path / "bad.pt"))
    assert not (tmp_path / "exploded").exists()
    # A numpy number as the best metric is harmless and has to load.
    good = {"extra_state": {"best": np.float64(0.5), "val": np.float32(2)}, "order": np.dtype("int64")}
    torch.save(good, tmp_path / "good.pt")
    assert torch.load(tmp_path / "good.pt") == good


def hydra_train():
    from fairseq_cli.hydra_train import cli_main

    cli_main()


@pytest.mark.parametrize(
    "recipe, arch, new",
    [
        ("pretrain", "tupe_r_tiny", False), pytest.param("pretrain", "tupe_r_tiny", True, marks=pytest.mark.slow),
        pytest.param("pretrain_electra", "electra_tupe_r_tiny", True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.thorough
def test_both_launchers_train_the_same_model(recipe, arch, new, data, tmp_path):
    """new: fairseq-hydra-train is a new interpreter, not a copy of this one."""
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
    if new:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "fairseq_cli.hydra_train", *hydra]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=PLUGIN.parent)
        assert done.returncode == 0, done.stderr
    else:
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
