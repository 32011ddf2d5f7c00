"""Runs of fairseq-train for the tests: a tiny data set, and training that hands back the exact loss of every update."""

import gc
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import torch

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PLUGIN = CONFIGS.parent / "tupe"
WORDS = 40


def write_data(folder, lines=60, valid_lines=8, seed=0):
    """A data folder for masked_lm: documents of random words in a mild order, so that there is something to learn."""
    from fairseq.data import Dictionary, indexed_dataset

    folder.mkdir(parents=True)
    dictionary = Dictionary()
    for word in range(WORDS):
        dictionary.add_symbol(f"w{word}", 1000 - word)
    dictionary.save(str(folder / "dict.txt"))
    rng = np.random.default_rng(seed)
    for split, count in [("train", lines), ("valid", valid_lines)]:
        builder = indexed_dataset.make_builder(str(folder / f"{split}.bin"), "mmap", vocab_size=len(dictionary))
        for _ in range(count):
            words = np.cumsum(rng.integers(1, 4, size=rng.integers(5, 14))) % WORDS
            builder.add_item(dictionary.encode_line(" ".join(f"w{word}" for word in words), add_if_not_exist=False))
        builder.finalize(str(folder / f"{split}.idx"))
    return folder


def pretrain_arguments(data, save_dir, *more, processes=1, arch="tupe_r_tiny"):
    """What scripts/pretrain.sh hands to fairseq-train, at a size for tests: 6 updates of 4 short sequences an epoch."""
    from tupe.plugin.launch import fairseq_arguments

    tiny = ["--tokens-per-sample=24", "--lr=[0.01]", "--warmup-updates=2", "--log-interval=1", "--max-update=14"]
    return fairseq_arguments(
        CONFIGS,
        "pretrain",
        [f"model._name={arch}", "dataset.batch_size=4", "optimization.update_freq=[1]"],
        [str(data), f"--user-dir={PLUGIN}", f"--save-dir={save_dir}", *tiny, *more],
        processes=processes,
        cuda=False,
    )


def train(arguments, on_step=lambda samples: None):
    """Run fairseq-train in this process -> [(loss per token, gradient norm) of every update], unrounded.

    on_step sees the list of batches of every update.
    """
    from fairseq import checkpoint_utils, options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.trainer import Trainer
    from fairseq_cli import train as cli

    for function in (checkpoint_utils.save_checkpoint, cli.should_stop_early):  # fairseq's state of an earlier run
        vars(function).clear()
    losses, reduce, step = [], Trainer._reduce_and_log_stats, Trainer.train_step

    def record(self, logging_outputs, sample_size, grad_norm=None):
        if grad_norm is not None:
            losses.append((float(sum(log["loss"] for log in logging_outputs)) / float(sample_size), float(grad_norm)))
        return reduce(self, logging_outputs, sample_size, grad_norm)

    def watch(self, samples, raise_oom=False):
        on_step(samples)
        return step(self, samples, raise_oom)

    parser = options.get_training_parser()
    config = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, arguments))
    patches = [
        mock.patch.object(Trainer, "_reduce_and_log_stats", record),
        mock.patch.object(Trainer, "train_step", watch),
        # Idle data workers look every 5 seconds whether they are still wanted; the end of a run waits for them.
        mock.patch.object(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.1),
        mock.patch.object(torch.utils.data._utils.worker, "MP_STATUS_CHECK_INTERVAL", 0.1),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        if config.distributed_training.distributed_world_size > 1:
            from fairseq.distributed import utils as distributed_utils

            distributed_utils.call_main(config, cli.main)
        else:
            cli.main(config)
        gc.collect()
    return losses


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


if __name__ == "__main__":  # python tests/helpers.py LOSSES.json fairseq-train arguments...
    sys.path.insert(0, str(PLUGIN.parent))
    Path(sys.argv[1]).write_text(json.dumps(train(sys.argv[2:])))
