"""What a run says before it begins, and the precision it takes, through every launcher."""

import json
import logging
import sys

import pytest
import torch
from helpers import (
    CONFIGS,
    ended,
    fairseq_arguments,
    finetune,
    fork,
    fork_tupe,
    free_port,
    load,
    pretrain_arguments,
    train,
    train_recipe,
)
from omegaconf import OmegaConf

from tupe.common.recipes import read as read_recipe
from tupe.common.record import read
from tupe.plugin import start
from tupe.plugin.launch import training_options
from tupe.plugin.start import Refused, choose_precision, split_over_processes


def fairseq_train():
    from fairseq_cli.train import cli_main

    cli_main()


def fairseq_hydra_train():
    from fairseq_cli.hydra_train import cli_main

    cli_main()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is the point")
@pytest.mark.thorough
def test_half_precision_without_a_gpu_is_one_line_of_fairseq_train(data, tmp_path, capfd):
    words = [word for word in pretrain_arguments(data, tmp_path / "run") if word != "--cpu"]
    process = fork(fairseq_train, "fairseq-train", *words, "--fp16", anew=True)
    process.join()
    said = capfd.readouterr().err
    assert process.exitcode and "Traceback" not in said and not (tmp_path / "run" / "record.json").exists()
    assert said.splitlines()[-1].startswith("--fp16 needs a GPU; valid here: float32 without --fp16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine without a GPU is the point")
@pytest.mark.thorough
def test_recipes_choose_float32_without_a_gpu_through_hydra(data, tmp_path):
    """The line of the README, at a small size."""
    words = ["--config-dir", str(CONFIGS), "--config-name", "pretrain", "model=tupe_r", "model._name=tupe_r_tiny"]
    words += [f"task.data={data}", f"checkpoint.save_dir={tmp_path}/run", "dataset.num_workers=0"]
    words += ["task.tokens_per_sample=24", "dataset.batch_size=4", "optimization.update_freq=[1]"]
    words += ["optimization.max_update=2", "lr_scheduler.warmup_updates=1", f"hydra.run.dir={tmp_path}/log"]
    process = fork(fairseq_hydra_train, "fairseq-hydra-train", *words, anew=True)
    process.join()
    assert process.exitcode == 0
    state = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=True)
    assert not state["cfg"]["common"]["fp16"] and {v.dtype for v in state["model"].values()} >= {torch.float32}
    assert torch.float16 not in {v.dtype for v in state["model"].values()}


def test_what_an_update_trains_on_is_said(data, tmp_path, caplog):
    words = [str(data), f"--save-dir={tmp_path / 'run'}", "--arch=tupe_r_tiny", "--tokens-per-sample=24", "--no-save"]
    words += ["--max-update=3", "--warmup-updates=3", "--num-workers=0", "--lr=0.5", "--batch-size=8"]
    arguments = fairseq_arguments("pretrain_small", [], words, cuda=False, micro_batch_size=4)
    sizes = []
    with caplog.at_level(logging.INFO, "tupe.launch"):
        train(arguments, lambda samples: sizes.append([sample["nsentences"] for sample in samples]))
    assert "an update: 8 sequences = 4 x 2 steps x 1 process" in caplog.text and sizes[0] == [4, 4]
    assert "a warm-up of 3 updates in a run of 3: the learning rate only rises, to 0.5; --warmup" in caplog.text
    assert "the rate falls until" not in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "tupe.launch"):
        train([*arguments, "--warmup-updates=2", "--max-tokens=40", f"--save-dir={tmp_path / 'other'}"])
    assert "an update: at most 40 tokens and 4 sequences x 2 steps x 1 process" in caplog.text
    assert "only rises" not in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tupe.launch"):
        train([*arguments, "--warmup-updates=2", "--max-epoch=1", f"--save-dir={tmp_path / 'third'}"])
    assert "the rate falls until update 3, whatever --max-epoch 1 is; --max-update chooses the end" in caplog.text


def test_half_precision_with_a_gpu_is_left_alone(monkeypatch):
    from omegaconf import OmegaConf

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = OmegaConf.create({"common": {"fp16": True, "cpu": False}, "model": {"normaliser": "softmax"}})
    choose_precision(config)
    assert config.common.fp16
    config.model.normaliser = "exp"
    with pytest.raises(ValueError, match="exp overflows under --fp16; valid: --autocast bf16"):
        choose_precision(config)
    config.common.cpu = True
    with pytest.raises(ValueError, match="--fp16 needs a GPU"):
        choose_precision(config)


# ------------------------------------------------------------------------------------------ the batch of a recipe

ALL_RECIPES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def split(monkeypatch, recipe, processes, *typed):
    """What fairseq-hydra-train with a recipe and what is typed beside it makes of batches on several processes."""
    values = json.loads((CONFIGS.parent / "tests" / "recipes.json").read_text())[recipe]
    sections = {"dataset": {"max_tokens": None, "max_valid_steps": None}, "optimization": {}}
    for section, found in sections.items():
        found |= {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{section}.")}
    sections["dataset"]["batch_size_valid"] = "${dataset.batch_size}"
    sections["distributed_training"] = {"distributed_world_size": processes, "distributed_rank": 0}
    config = OmegaConf.merge(sections, OmegaConf.from_dotlist([word.lstrip("+") for word in typed]))
    config = OmegaConf.create({**OmegaConf.to_container(config, resolve=True), "job_logging_cfg": {}})
    monkeypatch.setattr(sys, "argv", ["fairseq-hydra-train", "--config-dir", "configs", "-cn", recipe, *typed])
    split_over_processes(config)
    data = config.dataset
    return data.batch_size, list(config.optimization.update_freq), data.batch_size_valid


@pytest.mark.parametrize("processes", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("recipe", ALL_RECIPES)
def test_processes_share_the_batch_of_a_recipe_as_in_tupe(recipe, processes, monkeypatch):
    values = training_options(read_recipe(recipe, []), "A:B", processes, dry_run=True)
    size, steps, held_out = split(monkeypatch, recipe, processes)
    assert (size, steps) == (values["dataset.batch_size"], values["optimization.update_freq"])
    assert size * steps[0] * processes == (32 if recipe in ("finetune", "pretrain_small") else 256)
    assert held_out == int(values.get("dataset.batch_size_valid") or size)


@pytest.mark.parametrize("typed, found", [
    (["dataset.batch_size=16", "optimization.update_freq=[2]"], (16, [2], 16)),  # 256, as in the recipe ...
    (["++dataset.batch_size=3", "optimization.update_freq=[1]"], (3, [1], 3)),  # ... or not: of a process
    (["optimization.update_freq=[1]"], (32, [1], 32)), (["dataset.batch_size=4"], (4, [8], 4)),
    (["dataset.max_tokens=99", "optimization.update_freq=[3]"], (32, [3], 32)),
    (["dataset.batch_size_valid=5"], (32, [1], 5)),
])  # fmt: skip
def test_batches_that_are_typed_are_those_of_a_process(typed, found, monkeypatch):
    assert split(monkeypatch, "pretrain", 8, *typed) == found


@pytest.mark.parametrize("recipe, processes, typed, message", [
    ("pretrain", 8, ["dataset.batch_size=16"], "dataset.batch_size is typed, and optimization.update_freq is the "
     "recipe's, for one process: on 8, type both; 16 x 8 x 8 = 1024 sequences an update, in pretrain 256: "
     "optimization.update_freq=[2]"),
    ("pretrain", 8, ["optimization.update_freq=[2]"], "on 8, type both; 32 x 2 x 8 = 512 sequences an update, in "
     "pretrain 256: dataset.batch_size=16"),
    ("pretrain", 8, ["dataset.batch_size=5"], "type both; 5 x 8 x 8 = 320 sequences an update, in pretrain 256"),
    ("finetune", 2, ["dataset.max_tokens=99"], "dataset.max_tokens is typed, and optimization.* type both"),
    ("pretrain", 6, [], "256 sequences cannot be split evenly over 6 processes; use one of .1, 2, 4, .* processes, or "
     "type dataset.batch_size=N and optimization.update_freq=.M., which are of a process"),
    ("finetune", 3, [], "32 sequences cannot be split evenly over 3 processes"),
])  # fmt: skip
def test_another_batch_than_the_recipes_is_refused(recipe, processes, typed, message, monkeypatch, caplog):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")) as refused:
        split(monkeypatch, recipe, processes, *typed)
    assert refused.value.code == 2 and caplog.messages == [str(refused.value)] and "\n" not in caplog.text.strip()


def test_processes_of_torchrun_that_would_train_alone_are_refused(data, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="torchrun's 2 processes would train on its own: --distributed-world.* give 2"):
        train(pretrain_arguments(data, tmp_path / "run"))
    assert not (tmp_path / "run" / "record.json").exists()


def test_the_split_reaches_the_run_and_pools_of_fine_tuning(data, learnable, pretrained, tmp_path, monkeypatch):
    """As it is when the run begins: afterwards fairseq makes batches of it."""
    begun = []

    def begin(record, config, task):
        begun.append((config.dataset.batch_size, list(config.optimization.update_freq)))
        raise SystemExit

    monkeypatch.setattr("tupe.plugin.run.begin", begin)
    monkeypatch.setattr(start, "under_hydra", lambda config: True)
    monkeypatch.setattr(start, "words_of_hydra", lambda: (None, set()))
    two = "distributed_training.distributed_world_size=2"
    with pytest.raises(SystemExit):
        train_recipe("pretrain", "model._name=tupe_r_tiny", f"task.data={data}", f"checkpoint.save_dir={tmp_path}", two)
    with pytest.raises(SystemExit):
        finetune(learnable, pretrained, tmp_path / "x", "glue=cola", two)
    assert begun == [(32, [4]), (6, [1])]


@pytest.mark.thorough
def test_two_processes_of_hydra_train_as_two_of_tupe(data, tmp_path):
    """Their batch is the recipe's, and their weights are equal to the bit."""
    words = ["--config-dir", str(CONFIGS), "--config-name", "pretrain_small", "model._name=tupe_r_tiny"]
    words += [f"task.data={data}", f"checkpoint.save_dir={tmp_path}/hydra", "task.tokens_per_sample=24"]
    words += ["dataset.num_workers=0", "lr_scheduler.warmup_updates=1"]
    words += ["common.fp16=false", "common.cpu=true", f"hydra.run.dir={tmp_path}/log"]
    parallel = {
        "distributed_world_size": 2, "distributed_no_spawn": True, "distributed_backend": "gloo",
        "ddp_backend": "legacy_ddp", "distributed_init_method": f"tcp://127.0.0.1:{free_port()}",
    }  # fmt: skip
    parallel = [f"distributed_training.{name}={value}" for name, value in parallel.items()]
    ranks = [[*parallel, f"distributed_training.distributed_rank={rank}"] for rank in range(2)]

    def hydra(*more):
        return fork(fairseq_hydra_train, "fairseq-hydra-train", *words, *more, anew=True)

    both = [hydra("optimization.max_update=3", *rank) for rank in ranks]
    assert [ended(process) for process in both] == [0, 0]
    tupe = ["pretrain", f"--data={data}", f"--output={tmp_path}/tupe", "--recipe=pretrain_small", "--gpus=0"]
    tupe += ["--arch=tupe_r_tiny", "--tokens-per-sample=24", "--num-workers=0", "--warmup-updates=1"]
    nodes = ["--max-update=3", "--nodes=2", f"--master-port={free_port()}", "--allocator=none"]
    both = [fork_tupe(*tupe, *nodes, f"--node-rank={rank}") for rank in range(2)]
    assert [ended(process) for process in both] == [0, 0]
    one, two = (load(tmp_path / name / "checkpoint_last.pt") for name in ("hydra", "tupe"))
    assert one["cfg"]["dataset"] == two["cfg"]["dataset"] and one["cfg"]["dataset"]["batch_size"] == 16
    assert one["cfg"]["optimization"] == two["cfg"]["optimization"]
    assert all(torch.equal(one["model"][key], two["model"][key]) for key in one["model"])
    assert read(tmp_path / "hydra").scores == read(tmp_path / "tupe").scores

    # One process goes on with either run.
    same = ["dataset.batch_size=16", "optimization.update_freq=[2]", "dataset.batch_size_valid=32"]
    assert ended(hydra("optimization.max_update=4", *same)) == 0
    assert ended(fork_tupe(*tupe, "--max-update=4", "--allocator=none", "--micro-batch-size=16")) == 0
    one, two = (load(tmp_path / name / "checkpoint_last.pt")["model"] for name in ("hydra", "tupe"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_batch_of_fewer_tokens_than_a_sequence_is_refused(data, tmp_path):
    """Which fairseq begins with, and ends in an AssertionError."""
    with pytest.raises(Refused, match="--max-tokens is 10: a sequence has 24; valid: at least 24"):
        train([*pretrain_arguments(data, tmp_path / "run"), "--max-tokens=10"])
    assert not (tmp_path / "run" / "record.json").exists()
