"""What a run says before it begins, and the precision it takes, through every launcher."""

import logging

import pytest
import torch
from helpers import CONFIGS, fairseq_arguments, fork, pretrain_arguments, train
from omegaconf import OmegaConf

from tupe.plugin import start
from tupe.plugin.start import choose_precision


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
    caplog.clear()
    with caplog.at_level(logging.INFO, "tupe.launch"):
        train([*arguments, "--warmup-updates=2", "--max-tokens=40", f"--save-dir={tmp_path / 'other'}"])
    assert "an update: at most 40 tokens and 4 sequences x 2 steps x 1 process" in caplog.text
    assert "only rises" not in caplog.text


def test_half_precision_with_a_gpu_is_left_alone(monkeypatch):
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


def test_the_batch_of_a_recipe_is_of_each_process_of_hydra(monkeypatch, caplog):
    monkeypatch.setattr(start.HydraConfig, "initialized", lambda: True)
    config = {
        "dataset": {"batch_size": 32, "max_tokens": None}, "lr_scheduler": {"_name": "x", "warmup_updates": 0},
        "optimization": {"update_freq": [8], "max_epoch": 0, "max_update": 9, "lr": [1.0]},
        "distributed_training": {"distributed_world_size": 2},
    }  # fmt: skip
    with caplog.at_level(logging.INFO, "tupe.launch"):
        start.describe(OmegaConf.create(config))
    assert caplog.messages[0] == "an update: 512 sequences = 32 x 8 steps x 2 processes"
    assert caplog.messages[1].startswith("the batch of a recipe is for one process, and an update takes 2 of them")
