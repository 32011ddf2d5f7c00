"""Masked-LM pre-training, from scratch or from a checkpoint, and the next-sentence objective.

With `next_sentence` a sequence is `<s> A </s> </s> B </s>`, where B follows A in its document or comes from another one
(Devlin et al., 2019), and the model needs segment embeddings to tell them apart.
"""

import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.data import (
    AppendTokenDataset,
    BaseWrapperDataset,
    ConcatSentencesDataset,
    FairseqDataset,
    IdDataset,
    MaskTokensDataset,
    NestedDictionaryDataset,
    NumelDataset,
    NumSamplesDataset,
    PrependTokenDataset,
    RightPadDataset,
    SortDataset,
    data_utils,
)  # fmt: skip
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from omegaconf import DictConfig

from .criterion import count_real
from .run import RecordedTask, RecordedTaskConfig

HEAD = "next_sentence"
HELD_OUT_SEED = 1  # of the masks of every split but `train`, so that all models and seeds predict the same tokens


@dataclass
class TupeMaskedLMConfig(RecordedTaskConfig, MaskedLMConfig):
    next_sentence: bool = field(
        default=False, metadata={"help": "sequences are pairs of sentences; needs --criterion masked_lm_next_sentence"}
    )


@register_task("tupe_masked_lm", dataclass=TupeMaskedLMConfig)
class TupeMaskedLMTask(RecordedTask, MaskedLMTask):
    """fairseq's `masked_lm`, with the same batches and masks in training, and a record of the run. Held-out text has
    the same masks whatever the seed.

    With `finetune_from_model`, training starts from that checkpoint and keeps its structure: a model that contradicts
    it is an error, and its longest length stays, however short the sequences are.
    """

    def record_name(self, config: DictConfig) -> str:
        return config.criterion._name.removesuffix("_chunked")  # it computes the same loss

    def data_files(self, split: str) -> list[Path]:
        folders = [Path(folder) for folder in self.cfg.data.split(":")]
        if not split.startswith("train"):  # fairseq reads them in the first folder
            folders = folders[:1]
        name = re.compile(rf"{re.escape(split)}\d*(\.bin|\.idx)?")
        return [path for folder in folders for path in sorted(folder.iterdir()) if name.fullmatch(path.name)]

    def build_model(self, cfg: DictConfig, from_checkpoint: bool = False) -> BaseFairseqModel:
        model = super().build_model(cfg, from_checkpoint)
        if self.cfg.next_sentence:
            if str(model.cfg.segments) == "none":
                raise ValueError("next_sentence needs segment embeddings: tupe checkpoint swap --segments")
            model.register_classification_head(HEAD, num_classes=2)
        return model

    def build_criterion(self, cfg: DictConfig, **kwargs) -> FairseqCriterion:
        if self.cfg.next_sentence != (cfg._name == "masked_lm_next_sentence"):
            raise ValueError(f"next_sentence={self.cfg.next_sentence} does not go with criterion {cfg._name}")
        return super().build_criterion(cfg, **kwargs)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        seed = self.cfg.seed
        self.cfg.seed = seed if split.startswith("train") else HELD_OUT_SEED
        try:
            load = self._load_pairs if self.cfg.next_sentence else super().load_dataset
            load(split, epoch, combine, **kwargs)
            if not split.startswith("train"):  # else by length, and `max_valid_steps` takes the shortest
                self.datasets[split].sort_order = self.datasets[split].sort_order[:1]  # a permutation, always the same
        finally:
            self.cfg.seed = seed

    def _load_pairs(self, split, epoch=1, combine=False, **kwargs):
        d, paths = self.source_dictionary, self.cfg.data.split(":")
        path = f"{paths[(epoch - 1) % len(paths)]}/{split}"
        sentences = data_utils.load_indexed_dataset(path, d, combine=combine)
        if sentences is None:
            raise FileNotFoundError(f"Dataset not found: {split} ({path})")  # the error that fairseq's trainer expects
        pairs = SentencePairs(sentences, self.cfg.tokens_per_sample, self.cfg.seed)

        def masked(side, targets):
            return MaskTokensDataset(
                Side(pairs, side), d, d.pad(), self.mask_idx, return_masked_tokens=targets,
                seed=2 * self.cfg.seed + side,  # else A and B would be masked at the same positions
                mask_prob=self.cfg.mask_prob, leave_unmasked_prob=self.cfg.leave_unmasked_prob,
                random_token_prob=self.cfg.random_token_prob,
                freq_weighted_replacement=self.cfg.freq_weighted_replacement,
            )  # fmt: skip

        def framed(targets, start, stop):
            a, b = (AppendTokenDataset(masked(side, targets), stop) for side in (0, 1))
            return ConcatSentencesDataset(PrependTokenDataset(a, start), PrependTokenDataset(b, stop))

        source = framed(False, d.bos(), d.eos())  # separators are never masked: they tell A from B
        target = framed(True, d.pad(), d.pad())
        dataset = NestedDictionaryDataset(
            {
                "id": IdDataset(),
                "net_input": {
                    "src_tokens": RightPadDataset(source, pad_idx=d.pad()),
                    "src_lengths": NumelDataset(source, reduce=False),
                },
                "target": RightPadDataset(target, pad_idx=d.pad()),
                "next_sentence": Side(pairs, 2),
                "nsentences": NumSamplesDataset(),
                "ntokens": NumelDataset(source, reduce=True),
            },
            sizes=[pairs.sizes],
        )
        with data_utils.numpy_seed(self.cfg.seed):
            shuffle = np.random.permutation(len(pairs))
        self.datasets[split] = SortDataset(dataset, sort_order=[shuffle])


# The name of this task in checkpoints of its first version.
register_task("continued_lm", dataclass=TupeMaskedLMConfig)(type("ContinuedLMTask", (TupeMaskedLMTask,), {}))


class SentencePairs(FairseqDataset):
    """(A [a], B [b], label) with a + b + 4 <= length; label 0: B follows A, 1: B begins elsewhere in another document.

    sentences: ids, each ending with a separator; an empty sentence ends a document. The sentences of a document are
    grouped into pieces that fit. Every epoch cuts each piece into A and B at a random sentence, and replaces B with
    probability 1/2. Pieces of a single sentence are left out. Raises ValueError unless two documents have pieces.
    """

    def __init__(self, sentences: FairseqDataset, length: int, seed: int):
        super().__init__()
        self.sentences, self.room, self.seed, self.epoch = sentences, length - 4, seed, 1
        self.pieces = []  # (document, index of the first sentence, number of sentences)
        document, first, size = 0, 0, 0

        def close(end):
            if end - first >= 2:
                self.pieces.append((document, first, end - first))

        for index, tokens in enumerate(np.asarray(sentences.sizes) - 1):  # without the separator
            if tokens == 0 or tokens > self.room:  # the end of a document, or a sentence that is too long
                close(index)
                document, first, size = document + (tokens == 0), index + 1, 0
            elif size + tokens > self.room:
                close(index)
                first, size = index, tokens
            else:
                size += tokens
        close(len(sentences))
        self.documents = np.array([document for document, _, _ in self.pieces])
        if len(set(self.documents)) < 2:
            raise ValueError(
                f"the next-sentence objective needs two documents with two sentences each that fit into {length} tokens"
            )
        self.sizes = np.full(len(self.pieces), length)  # at most

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    can_reuse_epoch_itr_across_epochs = True  # sizes do not change

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        return self.pair(self.epoch, index)

    @lru_cache(maxsize=64)  # noqa: B019  (source, target and label ask for the same pair; the data set outlives it)
    def pair(self, epoch: int, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        rng = np.random.default_rng([self.seed, epoch, index])
        document, first, count = self.pieces[index]
        cut = first + rng.integers(1, count)
        a = self.words(first, cut)
        label = int(rng.random() < 0.5)
        if not label:
            return a, self.words(cut, first + count), label
        own, end = np.searchsorted(self.documents, [document, document + 1])  # its pieces
        other = rng.integers(len(self.pieces) - (end - own))
        _, first, count = self.pieces[other if other < own else other + end - own]
        b = self.words(first + rng.integers(count), first + count)
        return a, b[: self.room - len(a)], label

    def words(self, start: int, end: int) -> torch.Tensor:
        """The ids of sentences start .. end - 1, without their separators."""
        return torch.cat([self.sentences[i][:-1] for i in range(start, end)])


class Side(BaseWrapperDataset):
    """One part of `SentencePairs`: 0 A, 1 B, 2 the label."""

    def __init__(self, pairs: FairseqDataset, part: int):
        super().__init__(pairs)
        self.part = part

    def __getitem__(self, index):
        return self.dataset[index][self.part]

    def collater(self, samples: list) -> torch.Tensor:
        return torch.tensor(samples)  # labels; A and B are collated after their masks


@register_criterion("masked_lm_next_sentence", dataclass=MaskedLmConfig)
class MaskedLMNextSentence(MaskedLmLoss):
    """Mean loss of masked tokens plus mean loss of next sentences, as in BERT. `loss` in the log is that of the masked
    tokens alone, comparable with the criterion masked_lm; `nsp_loss` is that of the pairs."""

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple[torch.Tensor, int, dict]:
        masked = sample["target"].ne(self.padding_idx)
        count, sentences = masked.sum(), len(sample["next_sentence"])
        options = {"masked_tokens": masked, "classification_head_name": HEAD, "n_real": count_real(sample)}
        logits, extra = model(**sample["net_input"], **options)
        lm_loss = F.cross_entropy(logits.float(), sample["target"][masked], reduction="sum")
        classes, labels = extra["classes"].float(), sample["next_sentence"]
        nsp_loss = F.cross_entropy(classes, labels, reduction="sum")
        loss = lm_loss + nsp_loss * count / sentences  # fairseq divides by the number of masked tokens
        return loss, count, {
            "loss": lm_loss.data,
            "nsp": nsp_loss.data,
            "correct": (classes.argmax(1) == labels).sum(),
            "ntokens": sample["ntokens"],
            "nsentences": sentences,
            "sample_size": count,
        }  # fmt: skip

    @staticmethod
    def reduce_metrics(logging_outputs: list[dict]) -> None:
        MaskedLmLoss.reduce_metrics(logging_outputs)
        total = {key: sum(log[key] for log in logging_outputs) for key in logging_outputs[0]}
        sentences = total["nsentences"]
        metrics.log_scalar("nsp_loss", total["nsp"] / sentences / math.log(2), sentences, round=3)
        metrics.log_scalar("nsp_accuracy", 100 * total["correct"] / sentences, sentences, round=2)
