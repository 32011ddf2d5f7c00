"""What a run says before it begins, and the precision it takes, through every launcher."""

import json
import sys

import pytest
import torch
from helpers import CONFIGS, fairseq_arguments, fork, parsed, pretrain_arguments, train, train_recipe
from hydra.types import RunMode
from omegaconf import OmegaConf

from tupe.common.recipes import read as read_recipe
from tupe.plugin.launch import training_options
from tupe.plugin.recorded import Refused, choose_precision, refuse_jobs_in_one_process, split_over_processes


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
    assert said.splitlines()[-1].startswith("fp16 needs a GPU; valid here: --precision float32, autocast or bf16")


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


def test_a_batch_is_split_into_steps(data, tmp_path):
    words = [str(data), f"--save-dir={tmp_path / 'run'}", "--arch=tupe_r_tiny", "--tokens-per-sample=24", "--no-save"]
    words += ["--max-update=3", "--warmup-updates=3", "--num-workers=0", "--lr=0.5", "--batch-size=8"]
    arguments = fairseq_arguments("pretrain_small", [], words, cuda=False, micro_batch_size=4)
    sizes = []
    train(arguments, lambda samples: sizes.append([sample["nsentences"] for sample in samples]))
    assert sizes[0] == [4, 4]


def test_bf16_is_no_tpu(data, tmp_path):
    """fairseq's parser says so in four sections; then several GPUs need its library, and one computes all logits."""
    config = parsed([*pretrain_arguments(data, tmp_path), "--bf16"])
    assert config.common.bf16 and config.optimizer.lr
    for section in ("common", "distributed_training", "criterion", "optimizer"):
        assert config[section].tpu is False


def test_the_task_is_for_our_models(data, tmp_path):
    words = [str(data), "--task=tupe_masked_lm", "--arch=roberta_base", "--criterion=masked_lm", "--lr=0.1", "--cpu"]
    words += [f"--save-dir={tmp_path}", "--tokens-per-sample=24", "--max-update=1", "--optimizer=adam"]
    with pytest.raises(Refused, match="--arch: tupe_masked_lm trains models of this package"):
        train([*words, "--batch-size=4"])


def test_half_precision_with_a_gpu_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = OmegaConf.create(
        {"common": {"fp16": True, "cpu": False, "amp": False, "bf16": False}, "model": {"normaliser": "softmax"}}
    )
    choose_precision(config)
    assert config.common.fp16
    config.model.normaliser = "exp"
    with pytest.raises(ValueError, match="exp overflows in fp16; valid: --precision bf16"):
        choose_precision(config)
    config.common.cpu = True
    with pytest.raises(ValueError, match="fp16 needs a GPU"):
        choose_precision(config)
    config.common.amp = True
    with pytest.raises(Refused, match="common.amp: .* valid: --fp16, --bf16"):
        choose_precision(config)


# ------------------------------------------------------------------------------------------ the batch of a recipe


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


@pytest.mark.parametrize("processes", [1, 2, 8, 32])
@pytest.mark.parametrize("recipe", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_processes_share_the_batch_of_a_recipe_as_in_tupe(recipe, processes, monkeypatch):
    values = training_options(read_recipe(recipe, []), "A:B", processes, dry_run=True)
    size, steps, held_out = split(monkeypatch, recipe, processes)
    assert (size, steps) == (values["dataset.batch_size"], values["optimization.update_freq"])
    assert size * steps[0] * processes == (32 if recipe in ("finetune", "pretrain_small") else 256)
    assert held_out == int(values.get("dataset.batch_size_valid") or size)


@pytest.mark.parametrize("typed, found", [
    (["dataset.batch_size=16", "optimization.update_freq=[2]"], (16, [2], 16)),
    (["++dataset.batch_size=3", "optimization.update_freq=[1]"], (3, [1], 3)),
    (["dataset.max_tokens=99", "optimization.update_freq=[3]"], (32, [3], 32)),
    (["dataset.batch_size_valid=5"], (32, [1], 5)),
])  # fmt: skip
def test_batches_that_are_typed_are_those_of_a_process(typed, found, monkeypatch):
    assert split(monkeypatch, "pretrain", 8, *typed) == found


@pytest.mark.parametrize("recipe, processes, typed, message", [
    ("pretrain", 8, ["dataset.batch_size=16"], "dataset.batch_size is typed, and the rest of the recipe's batch is for "
     "one process: type dataset.batch_size=N and optimization.update_freq=.M., which are of a process"),
    ("pretrain", 8, ["optimization.update_freq=[2]"], "optimization.update_freq is typed, and the rest"),
    ("finetune", 2, ["dataset.max_tokens=99"], "dataset.max_tokens is typed, and the rest"),
    ("pretrain", 6, [], "256 sequences cannot be split evenly over 6 processes; use one of .1, 2, 4, .* processes, or "
     "type dataset.batch_size=N and optimization.update_freq=.M., which are of a process"),
])  # fmt: skip
def test_another_batch_than_the_recipes_is_refused(recipe, processes, typed, message, monkeypatch):
    with pytest.raises(Refused, match=message):
        split(monkeypatch, recipe, processes, *typed)


def test_processes_of_torchrun_that_would_train_alone_are_refused(data, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="torchrun's 2 processes would train on its own: --distributed-world.* give 2"):
        train(pretrain_arguments(data, tmp_path / "run"))
    assert not (tmp_path / "run" / "record.json").exists()


def test_the_split_reaches_the_run(data, tmp_path, monkeypatch):
    """As it is when the run begins: afterwards fairseq makes batches of it."""
    begun = []

    def begin(record, config, updates):
        begun.append((config.dataset.batch_size, list(config.optimization.update_freq)))
        raise SystemExit

    monkeypatch.setattr("tupe.plugin.recorded.begin", begin)
    monkeypatch.setattr("tupe.plugin.recorded.HydraConfig.initialized", lambda: True)
    hydra = OmegaConf.create({"mode": None, "overrides": {"task": []}})
    monkeypatch.setattr("tupe.plugin.recorded.HydraConfig.get", lambda: hydra)
    two = "distributed_training.distributed_world_size=2"
    with pytest.raises(SystemExit):
        train_recipe("pretrain", "model._name=tupe_r_tiny", f"task.data={data}", f"checkpoint.save_dir={tmp_path}", two)
    assert begun == [(32, [4])]


def test_jobs_of_hydra_in_one_process_are_refused(monkeypatch):
    hydra = {
        "mode": RunMode.MULTIRUN,
        "launcher": {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"},
    }
    monkeypatch.setattr("tupe.plugin.recorded.HydraConfig.initialized", lambda: True)
    monkeypatch.setattr("tupe.plugin.recorded.HydraConfig.get", lambda: OmegaConf.create(hydra))
    with pytest.raises(Refused, match="jobs need processes of their own: `tupe sweep`, or hydra/launcher=slurm"):
        refuse_jobs_in_one_process()
    hydra["launcher"]["_target_"] = "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher"
    refuse_jobs_in_one_process()


def test_a_batch_of_fewer_tokens_than_a_sequence_is_refused(data, tmp_path):
    """Which fairseq begins with, and ends in an AssertionError."""
    with pytest.raises(ValueError, match="max_tokens=10: a sequence has up to 24 tokens; valid: at least as many"):
        train([*pretrain_arguments(data, tmp_path / "run"), "--max-tokens=10"])
