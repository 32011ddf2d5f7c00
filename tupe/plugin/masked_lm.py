"""Masked-LM pre-training, from scratch or from a checkpoint."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from fairseq.criterions import FairseqCriterion
from fairseq.data import (
    Dictionary,
    FairseqDataset,
    LRUCacheDataset,
    PrependTokenDataset,
    TokenBlockDataset,
    data_utils,
)  # fmt: skip
from fairseq.data.iterators import CountingIterator, EpochBatchIterator
from fairseq.data.shorten_dataset import maybe_shorten_dataset
from fairseq.dataclass import ChoiceEnum
from fairseq.logging import metrics
from fairseq.logging.meters import MetersDict
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from omegaconf import DictConfig

from ..data.splits import HELD_OUT_SEED, check_split, cut_long, parts_of
from ..text import read_dictionary
from .run import RecordedTask, RecordedTaskConfig

logger = logging.getLogger(__name__)

MOST_LEFT_OUT = 0.05  # of the tokens of the training text, in sentences that are too long


@dataclass
class TupeMaskedLMConfig(RecordedTaskConfig, MaskedLMConfig):
    long_sentences: ChoiceEnum(["cut", "skip"]) = field(
        default="cut",
        metadata={"help": "those that do not fit into a block are cut between words, or left out as by fairseq"},
    )


@register_task("tupe_masked_lm", dataclass=TupeMaskedLMConfig)
class TupeMaskedLMTask(RecordedTask, MaskedLMTask):
    """fairseq's `masked_lm`, with the same batches and masks in training, and a record of the run. Held-out text has
    the same masks whatever the seed.

    Of `long_sentences`, cut loses no text, and makes no block without text. With skip, blocks are those of fairseq,
    which leaves out sentences that are too long; more than `MOST_LEFT_OUT` of the training text is an error.

    With `finetune_from_model`, training starts from that checkpoint and keeps its structure: a model that contradicts
    it is an error, and its longest length stays, however short the sequences are.
    """

    def __init__(self, cfg: DictConfig, *args, **kwargs):
        super().__init__(cfg, *args, **kwargs)
        self.left_out = {}  # see the record

    @classmethod
    def setup_task(cls, cfg: DictConfig, **kwargs) -> "TupeMaskedLMTask":
        read_dictionary(Path(cfg.data.split(":")[0]) / "dict.txt")  # raises ValueError for one that fairseq would take
        return super().setup_task(cfg, **kwargs)

    def record_name(self, config: DictConfig) -> str:
        return config.criterion._name.removesuffix("_chunked")  # it computes the same loss

    def data_files(self, split: str) -> list[Path]:
        folders = [Path(folder) for folder in self.cfg.data.split(":")]
        if not split.startswith("train"):  # fairseq reads them in the first folder
            folders = folders[:1]
        name = re.compile(rf"{re.escape(split)}\d*(\.bin|\.idx)?")
        return [path for folder in folders for path in sorted(folder.iterdir()) if name.fullmatch(path.name)]

    def build_criterion(self, cfg: DictConfig, **kwargs) -> FairseqCriterion:
        if self.cfg.mask_whole_words:  # fairseq's own task fails in the middle of loading
            raise ValueError("mask_whole_words: not supported; masks are drawn piece by piece")
        criterion = super().build_criterion(cfg, **kwargs)
        if self.run is not None:
            self.run.record.left_out = self.left_out
        return criterion

    def train_step(self, *args, **kwargs) -> tuple:
        loss, sample_size, log = super().train_step(*args, **kwargs)
        return loss, sample_size, {**log, "nothing_masked": (sample_size == 0) * 1}  # it adds nothing to the update

    def reduce_metrics(self, logging_outputs: list[dict], criterion: FairseqCriterion) -> None:
        super().reduce_metrics(logging_outputs, criterion)
        if count := sum(log.get("nothing_masked", 0) for log in logging_outputs):
            metrics.log_scalar_sum("nothing_masked", int(count))  # number of batches

    def post_validate(self, model: BaseFairseqModel, stats: dict, agg: MetersDict) -> None:
        if agg["loss"].avg is None:
            raise ValueError("no validated token was masked: raise max_valid_steps, or hold out more text")
        super().post_validate(model, stats, agg)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        paths = self.cfg.data.split(":")
        for prefix in parts_of(f"{paths[(epoch - 1) % len(paths)]}/{split}", combine):
            check_split(prefix, len(self.source_dictionary))
        seed = self.cfg.seed
        self.cfg.seed = seed if split.startswith("train") else HELD_OUT_SEED
        try:
            self.load_blocks(split, epoch, combine, **kwargs)
            data, pad = self.datasets[split], self.source_dictionary.pad()
            if not split.startswith("train"):  # else by length, and `max_valid_steps` takes the shortest
                data.sort_order = data.sort_order[:1]  # a permutation, always the same
            if not any(data[i]["target"].ne(pad).any() for i in range(len(data))):  # as a rule, the first one has some
                raise ValueError(f"{self.cfg.data}: {split!r} has too little text: none of its tokens is masked")
        finally:
            self.cfg.seed = seed

    def load_blocks(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        """Set `datasets[split]`."""
        super().load_dataset(split, epoch, combine, **kwargs)

    def _load_sentences(self, split, epoch, combine):
        paths = self.cfg.data.split(":")
        path = f"{paths[(epoch - 1) % len(paths)]}/{split}"
        sentences = data_utils.load_indexed_dataset(path, self.source_dictionary, combine=combine)
        if sentences is None:
            raise FileNotFoundError(f"Dataset not found: {split} ({path})")  # the error that fairseq's trainer expects
        return sentences

    def _load_dataset_split(self, split, epoch, combine):
        """As fairseq's, but for long sentences and blocks without text."""
        cfg, d, room = self.cfg, self.source_dictionary, self.cfg.tokens_per_sample - 1  # one less for <s>
        sentences = self._load_sentences(split, epoch, combine)
        total, where = int(np.sum(sentences.sizes)), cfg.shorten_data_split_list
        sentences = maybe_shorten_dataset(sentences, split, where, cfg.shorten_method, cfg.tokens_per_sample, cfg.seed)
        limited, cuts = str(cfg.sample_break_mode) != "none", str(cfg.long_sentences) == "cut"
        if limited and cuts:
            sentences = cut_sentences(sentences, room, d)
        sizes = np.asarray(sentences.sizes)
        self._note_left_out(split, total - int(sizes[sizes <= room].sum() if limited else sizes.sum()), total)
        blocks = TokenBlockDataset(sentences, sizes, room, pad=d.pad(), eos=d.eos(), break_mode=cfg.sample_break_mode)
        blocks = with_text(blocks, d.eos()) if cuts else blocks
        logger.info(f"{split}: {len(blocks)} blocks")
        return PrependTokenDataset(blocks, d.bos())

    def _note_left_out(self, split, count, total):
        """Tell the log, and the record, which share of a split's tokens is in no sequence (of several folders, the
        largest)."""
        share = count / total
        if str(self.cfg.long_sentences) == "skip" and split.startswith("train") and share > MOST_LEFT_OUT:
            raise ValueError(
                f"{self.cfg.data}: {share:.0%} of the tokens of {split!r} would be left out, in sentences too long for "
                f"sequences of {self.cfg.tokens_per_sample}; valid: up to {MOST_LEFT_OUT:.0%}, or --long-sentences cut"
            )
        logger.log(logging.WARNING if count else logging.INFO, f"{split}: {share:.2%} of {total} tokens are left out")
        self.left_out[split] = max(share, self.left_out.get(split, 0.0))


# The name of this task in checkpoints of its first version.
register_task("continued_lm", dataclass=TupeMaskedLMConfig)(type("ContinuedLMTask", (TupeMaskedLMTask,), {}))


def forget_masks(dataset: LRUCacheDataset, epoch: int, original: Callable) -> None:
    """As fairseq's `set_epoch`, whose cache gives the items that it holds the masks of an earlier epoch: to the first
    block, which `load_dataset` looks at, in every epoch."""
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


class Parts(FairseqDataset):
    """Stretches of the items of a data set: item i is sizes[i] tokens of dataset[index[i]], from start[i] on."""

    def __init__(self, dataset: FairseqDataset, index: np.ndarray, start: np.ndarray, sizes: np.ndarray):
        super().__init__()
        self.dataset, self.index, self.start, self.sizes = dataset, index, start, sizes

    can_reuse_epoch_itr_across_epochs = True  # sizes do not change

    def __len__(self):
        return len(self.index)

    def __getitem__(self, i):
        return self.dataset[int(self.index[i])][self.start[i] : self.start[i] + self.sizes[i]]

    def num_tokens(self, i: int) -> int:
        return int(self.sizes[i])

    size = num_tokens


def cut_sentences(sentences: FairseqDataset, room: int, dictionary: Dictionary | None, end: int = 0) -> FairseqDataset:
    """The same sentences, those of more than `room` tokens in parts: cut where the last possible word begins, or within
    a word that is longer than that. end: number of tokens at the end of each sentence that are left out."""
    sizes = np.asarray(sentences.sizes, dtype=np.int64) - end
    if not end and not (sizes > room).any():
        return sentences
    symbols = dictionary.symbols if dictionary else []
    index, starts, sizes = cut_long(sizes, lambda i: np.asarray(sentences[i]), room, symbols)
    return Parts(sentences, index, starts, sizes)


def with_text(blocks: TokenBlockDataset, separator: int) -> FairseqDataset:
    """Blocks without those that hold only separators, such as the end of a document between two full blocks."""
    lines = blocks.block_to_dataset_index[:, 2].astype(np.int64) - blocks.block_to_dataset_index[:, 0] + 1
    suspects = np.flatnonzero(blocks.sizes <= lines)
    empty = [i for i in suspects if (blocks[i] == separator).all()]
    kept = np.delete(np.arange(len(blocks)), empty)
    return Parts(blocks, kept, np.zeros_like(kept), blocks.sizes[kept]) if empty else blocks
