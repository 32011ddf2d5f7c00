"""Masked-LM pre-training, from scratch or from a checkpoint."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.data import LRUCacheDataset
from fairseq.data.iterators import CountingIterator, EpochBatchIterator
from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMTask
from omegaconf import II, MISSING, DictConfig

from ..data.batches import Epoch, held_out
from ..data.blocks import PAD
from ..data.loader import pad
from ..data.masks import IGNORED, masked_blocks
from ..data.splits import HELD_OUT_SEED, files_of, folders_of, prefixes_of
from ..text import read_dictionary
from .ordered import Items
from .recorded import RecordedTask, RecordedTaskConfig

logger = logging.getLogger(__name__)


@dataclass
class TupeMaskedLMConfig(RecordedTaskConfig):
    """Those options of fairseq's `masked_lm` that the blocks and masks of `tupe.data` have. Defaults are fairseq's."""

    data: str = field(default=MISSING, metadata={"help": "folder of prepared data, or several joined by ':'"})
    sample_break_mode: ChoiceEnum(["complete"]) = field(
        default="complete", metadata={"help": "blocks end at sentences: RoBERTa's FULL-SENTENCES"}
    )
    tokens_per_sample: int = field(default=1024, metadata={"help": "most tokens of a block"})
    mask_prob: float = field(default=0.15, metadata={"help": "share of the tokens that is predicted"})
    leave_unmasked_prob: float = field(default=0.1, metadata={"help": "share of these that stay"})
    random_token_prob: float = field(default=0.1, metadata={"help": "share of these that become another token"})
    seed: int = II("common.seed")


@register_task("tupe_masked_lm", dataclass=TupeMaskedLMConfig)
class TupeMaskedLMTask(RecordedTask, MaskedLMTask):
    """fairseq's `masked_lm` on the blocks, masks and batches of `tupe.data`, with a record of the run. Held-out text
    has the same masks whatever the seed.

    With `finetune_from_model`, training starts from that checkpoint and keeps its structure: a model that contradicts
    it is an error, and its longest length stays, however short the sequences are.
    """

    @classmethod
    def setup_task(cls, cfg: DictConfig, **kwargs) -> "TupeMaskedLMTask":
        read_dictionary(folders_of(cfg.data)[0] / "dict.txt")  # raises ValueError for one that fairseq would take
        return super().setup_task(cfg, **kwargs)

    def record_name(self, config: DictConfig) -> str:
        return config.criterion._name.removesuffix("_chunked")  # it computes the same loss

    def data_files(self, split: str) -> list[Path]:
        return files_of(prefixes_of(self.cfg.data, split))

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        cfg, symbols, trains = self.cfg, self.source_dictionary.symbols, split == self.train_subset
        shares = {name: getattr(cfg, name) for name in ("mask_prob", "leave_unmasked_prob", "random_token_prob")}
        seed = cfg.seed if trains else HELD_OUT_SEED
        masked = masked_blocks(cfg.data, split, cfg.tokens_per_sample, symbols, seed, **shares)
        count = len(masked)
        logger.info(f"{split}: {count} blocks")
        order = functools.partial(Epoch, count, cfg.seed) if trains else functools.partial(held_out, count)
        self.datasets[split] = Items(masked, collate, order, cfg.tokens_per_sample)


def collate(samples: list) -> dict:
    """A batch of fairseq's task: source and target [B, L], padded on the right. samples: (index, masked block)."""
    indices, items = zip(*samples, strict=True)
    ids, targets = pad(items)
    lengths = [len(source) for source, _ in items]
    return {
        "id": torch.tensor(indices),
        "net_input": {"src_tokens": ids, "src_lengths": torch.tensor(lengths)},
        "target": targets.masked_fill(targets == IGNORED, PAD),
        "nsentences": len(items),
        "ntokens": sum(lengths),
    }


def forget_masks(dataset: LRUCacheDataset, epoch: int, original: Callable) -> None:
    """As fairseq's `set_epoch`, whose cache gives the items that it holds the masks of an earlier epoch: to those of
    the first batch, which the trainer looks at between two epochs of fairseq's own `masked_lm`."""
    LRUCacheDataset.__getitem__.cache_clear()
    original(dataset, epoch)


def begin_epoch(
    iterator: EpochBatchIterator, *args, original: Callable, set_dataset_epoch: bool = True, **kwargs
) -> CountingIterator:  # fmt: skip
    """As fairseq's `next_epoch_itr`, whose data workers outlive an epoch with the data set of the epoch that they began
    with, and so with its masks: one that is told of a new epoch gets new workers. Those of a validation stay."""
    if set_dataset_epoch:
        iterator.dataloader = None
    return original(iterator, *args, set_dataset_epoch=set_dataset_epoch, **kwargs)


# ------------------------------------------------------------------------------------------------------- the criterion


def nothing_masked(logging_outputs: list[dict]) -> bool:
    """Whether no token of these batches was masked. Then their loss is logged as None, which no mean counts."""
    if sum(log.get("sample_size", 0) for log in logging_outputs) > 0:
        return False
    metrics.log_scalar("loss", None, 0, round=3)
    return True


def reduce_metrics(logging_outputs: list[dict], original: Callable) -> None:
    """As fairseq's, which divides by the number of masked tokens, even if that is 0."""
    if not nothing_masked(logging_outputs):
        original(logging_outputs)


@register_criterion("masked_lm_chunked", dataclass=MaskedLmConfig)
class ChunkedMaskedLmLoss(MaskedLmLoss):
    """The same numbers as `masked_lm` with a loss that never holds all logits, and without a wait for the GPU to learn
    how much padding there is: the loss is the sum over masked tokens, the sample size their number. (fairseq resumes no
    run with another criterion, not even a run of `masked_lm` with this one.)"""

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple[torch.Tensor, int, dict]:
        targets = sample["target"]
        masked = targets.ne(self.padding_idx).nonzero(as_tuple=True)  # rows, columns; only this waits for the GPU
        options = {"masked_tokens": masked, "lm_targets": targets[masked], "num_tokens": int(sample["ntokens"])}
        loss, _ = model(**sample["net_input"], **options)
        sample_size = len(masked[0])
        logging_output = {
            "loss": loss.data,
            "ntokens": sample["ntokens"],
            "nsentences": sample["nsentences"],
            "sample_size": sample_size,
        }
        return loss, sample_size, logging_output
