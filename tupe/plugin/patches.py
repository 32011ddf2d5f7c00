"""Every attribute of fairseq that is replaced: one table, and the only place that replaces any.

A replacement with a parameter `original` gets what it replaces, and does a little more. Several rows of one attribute
are wrapped around each other, the last outermost. The site shows the table (docs/hooks.py).
"""

import importlib.util
import inspect
import os
import pkgutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from fairseq.dataclass.configs import DistributedTrainingConfig
from fairseq.distributed import utils as distributed_utils

from . import masked_lm, optim, saving, steps

ON_IMPORT, IN_TRAINING, BY_TUPE = "always", "in programs that train", "`tupe` only"
UNFIXED = "not fixed in fairseq 0.12.3.1"  # the newest there is
OURS = "permanent: a feature, not a fix"


@dataclass(frozen=True)
class Patch:
    """attribute: its dotted name. until: the version from which the row can go. when: ON_IMPORT of the user-dir, so
    that fairseq-train gets it too; IN_TRAINING, then as well, but only where `fairseq_cli.train` is loaded, which sets
    up logging; or BY_TUPE, when one of the commands of `tupe` is about to train."""

    attribute: str
    replacement: Callable
    reason: str
    until: str
    when: str = ON_IMPORT

    def install(self) -> None:
        owner, _, name = self.attribute.rpartition(".")
        owner = pkgutil.resolve_name(owner)
        theirs, ours = inspect.getattr_static(owner, name), self.replacement
        if "original" in inspect.signature(ours).parameters:
            decorator = type(theirs) if isinstance(theirs, (classmethod, staticmethod)) else lambda function: function
            ours = decorator(_around(getattr(theirs, "__func__", theirs), self.replacement))
        setattr(owner, name, ours)


def _around(original, replacement):
    @wraps(original)
    def replaced(*args, **kwargs):
        return replacement(*args, original=original, **kwargs)

    replaced.replacement = replacement
    return replaced


def parse_args_and_arch(*args, original: Callable, **kwargs) -> Namespace | tuple[Namespace, list[str]]:
    """fairseq's, where --bf16 means a TPU only if the library of one is installed."""
    found = original(*args, **kwargs)
    parsed = found[0] if isinstance(found, tuple) else found  # beside arguments that are not known
    if getattr(parsed, "bf16", False) and importlib.util.find_spec("torch_xla") is None:
        parsed.tpu = False
    return found


def infer_torchrun(section: DistributedTrainingConfig) -> None:
    """fairseq's, which divides by the number of GPUs. section: of the whole configuration."""
    section.distributed_init_method, section.distributed_no_spawn = "env://", True
    section.distributed_world_size = int(os.environ["WORLD_SIZE"])
    section.distributed_rank = int(os.environ["RANK"])
    on_node = int(os.environ.get("LOCAL_RANK", section.distributed_rank))
    section.device_id = on_node % max(torch.cuda.device_count(), 1)


def all_gather_list(data: Any, group: Any = None, *args, original: Callable, **kwargs) -> list:
    if torch.cuda.is_available():
        return original(data, group, *args, **kwargs)
    gathered = [None] * distributed_utils.get_world_size(group)
    torch.distributed.all_gather_object(gathered, data, group=group)
    return gathered


PATCHES = [
    Patch("fairseq.options.parse_args_and_arch", parse_args_and_arch,
          "`--bf16` means a TPU, also where there is none", UNFIXED),
    Patch("fairseq.distributed.utils._infer_torch_distributed_launch_init", infer_torchrun,
          "`torchrun` on machines without GPUs divides by zero", UNFIXED),
    Patch("fairseq.trainer.Trainer.train_step", steps.train_step,
          "a signal, a loss that is not finite, and a stall end the run; an empty batch discards no update", OURS),
    Patch("fairseq.trainer.Trainer.valid_step", steps.with_progress,
          "a batch of validation is progress for `--heartbeat-timeout`", OURS),
    Patch("fairseq.trainer.Trainer.save_checkpoint", steps.with_progress,
          "a checkpoint is progress for `--heartbeat-timeout`", OURS),
    Patch("fairseq_cli.train.validate_and_save", steps.validate_and_save,
          "after a signal, all processes save the last whole update and stop", OURS, BY_TUPE),
    Patch("fairseq_cli.train.validate", steps.validate,
          "a validation takes one batch more than `--max-valid-steps`", UNFIXED, IN_TRAINING),
    Patch("fairseq_cli.train.get_training_stats", steps.training_stats,
          "every progress line tells the time left", OURS, BY_TUPE),
    Patch("fairseq.distributed.utils.all_gather_list", all_gather_list,
          "on CPUs it makes tensors for a GPU", UNFIXED),
    Patch("fairseq.data.LRUCacheDataset.set_epoch", masked_lm.forget_masks,
          "blocks that a cache holds keep the masks of an earlier epoch", UNFIXED),
    Patch("fairseq.data.iterators.EpochBatchIterator.next_epoch_itr", masked_lm.begin_epoch,
          "data workers repeat the masks of their first epoch, and a resumed run has others", UNFIXED),
    Patch("fairseq.checkpoint_utils.load_checkpoint_to_cpu", saving.load_checkpoint_to_cpu,
          "a checkpoint chooses which of fairseq's parts are built, and some of them run code from it", UNFIXED),
    Patch("fairseq.trainer.Trainer.load_checkpoint", saving.load_checkpoint,
          "a run of fairseq's own models goes on from checkpoints that are none of ours", OURS),
    Patch("fairseq.checkpoint_utils.save_checkpoint", saving.save_checkpoint,
          "`--save-interval-updates` keeps nothing at the end of an epoch", UNFIXED),
    Patch("fairseq.checkpoint_utils.torch_persistent_save", saving.save,
          "a kill or a full disk leaves half a checkpoint", UNFIXED),
    Patch("fairseq.checkpoint_utils.PathManager", saving.Paths,
          "a checkpoint is copied into the file that is to be resumed from", UNFIXED),
    Patch("fairseq.trainer.PathManager", saving.Paths,
          "a run starts from a checkpoint that is a folder of transformers", OURS),
    Patch("fairseq.criterions.masked_lm.MaskedLmLoss.reduce_metrics", masked_lm.reduce_metrics,
          "a batch in which nothing is masked has the loss 0 / 0", UNFIXED),
    Patch("fairseq.utils.clip_grad_norm_", optim.clip_grad_norm,
          "training on the CPU of a machine with a GPU fails at its first update", UNFIXED),
    Patch("fairseq.trainer.Trainer._build_optimizer", optim.build_optimizer,
          "parameters that an encoding names have no weight decay", OURS),
    *(Patch(f"fairseq.optim.FP16Optimizer.{function.__name__}", function,
            "the float32 copies and the counters of the loss's scale are lost: a resumed run is another one", UNFIXED)
      for function in (optim.state_dict, optim.load_state_dict)),
    Patch("fairseq.optim.FP16Optimizer._sync_fp16_grads_to_fp32", optim.take_gradients,
          "a kernel for each gradient, where one does", OURS),
    Patch("fairseq.optim.FP16Optimizer._sync_fp32_params_to_fp16", optim.give_weights,
          "a kernel for each weight, where one does", OURS),
]  # fmt: skip


@cache
def apply(when: str) -> None:
    """Install the rows of that moment, which may come more than once."""
    for patch in PATCHES:
        if patch.when == when:
            patch.install()
