"""The next-sentence objective beside masked words: a fairseq plugin on top of ours.

    fairseq-train DATA --user-dir lab/next_sentence --task next_sentence --criterion masked_lm_next_sentence ...

A sequence is `<s> A </s> </s> B </s>`, where B follows A in its document or comes from another one (Devlin et al.,
2019), and the model needs segment embeddings to tell them apart (`tupe checkpoint swap --segments`).
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.data import (
    AppendTokenDataset,
    BaseWrapperDataset,
    ConcatDataset,
    ConcatSentencesDataset,
    Dictionary,
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
)
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqTask, register_task
from omegaconf import DictConfig

import tupe.plugin  # noqa: F401  (architectures, optimizers, schedules)
from tupe.checkpoints import gate
from tupe.data.blocks import cut_long
from tupe.data.splits import HELD_OUT_SEED, prefixes_of
from tupe.plugin.criterion import count_tokens
from tupe.plugin.masked_lm import TupeMaskedLMConfig, TupeMaskedLMTask

HEAD = "next_sentence"
CRITERION = "masked_lm_next_sentence"
gate.allow("task", HEAD, gate.PARTS["task"]["tupe_masked_lm"])
gate.allow("criterion", CRITERION, gate.PARTS["criterion"]["masked_lm"])


@dataclass
class NextSentenceConfig(TupeMaskedLMConfig):
    pass


@register_task("next_sentence", dataclass=NextSentenceConfig)
class NextSentenceTask(TupeMaskedLMTask):
    """Pairs of sentences, whose words are masked as in fairseq's `masked_lm`, in batches that fairseq shuffles."""

    get_batch_iterator = FairseqTask.get_batch_iterator

    def build_model(self, cfg: DictConfig, from_checkpoint: bool = False) -> BaseFairseqModel:
        model = super().build_model(cfg, from_checkpoint)
        if str(model.cfg.segments) == "none":
            raise ValueError("next sentences need segment embeddings: tupe checkpoint swap --segments")
        model.register_classification_head(HEAD, num_classes=2)
        return model

    def build_criterion(self, cfg: DictConfig, **kwargs) -> FairseqCriterion:
        if cfg._name != CRITERION:
            raise ValueError(f"the task next_sentence does not go with criterion {cfg._name}; valid: {CRITERION}")
        return super().build_criterion(cfg, **kwargs)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        d, seed = self.source_dictionary, self.cfg.seed if split.startswith("train") else HELD_OUT_SEED
        parts = [data_utils.load_indexed_dataset(prefix, d) for prefix in prefixes_of(self.cfg.data, split)]
        sentences = ConcatDataset(parts)
        cuts = d if str(self.cfg.long_sentences) == "cut" else None
        pairs = SentencePairs(sentences, self.cfg.tokens_per_sample, seed, cuts)
        self.note_left_out(split, pairs.left_out / pairs.total)

        def masked(side, targets):
            return MaskTokensDataset(
                Side(pairs, side), d, d.pad(), self.mask_idx, return_masked_tokens=targets,
                seed=2 * seed + side,  # else A and B would be masked at the same positions
                mask_prob=self.cfg.mask_prob, leave_unmasked_prob=self.cfg.leave_unmasked_prob,
                random_token_prob=self.cfg.random_token_prob,
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
        with data_utils.numpy_seed(seed):
            shuffle = np.random.permutation(len(pairs))
        self.datasets[split] = SortDataset(dataset, sort_order=[shuffle])


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


class SentencePairs(FairseqDataset):
    """(A [a], B [b], label) with a + b + 4 <= length; label 0: B follows A, 1: B begins elsewhere in another document.

    sentences: ids, each ending with a separator; an empty sentence ends a document. The sentences of a document are
    grouped into pieces that fit. Every epoch cuts each piece into A and B at a random sentence, and replaces B with
    probability 1/2. Pieces of a single sentence are left out. dictionary: of the ids, if sentences that may leave no
    room for a second one are to be cut. left_out, total: numbers of tokens. Raises ValueError unless two documents have
    pieces.
    """

    def __init__(self, sentences: FairseqDataset, length: int, seed: int, dictionary: Dictionary | None = None):
        super().__init__()
        self.room, self.seed, self.epoch = length - 4, seed, 1
        longest = self.room // 2 if dictionary else max(sentences.sizes)
        self.sentences = cut_sentences(sentences, longest, dictionary, end=1)  # without the separators
        self.pieces = []  # (document, index of the first sentence, number of sentences)
        self.total = self.left_out = int(self.sentences.sizes.sum())
        document, first, size = 0, 0, 0

        def close(end):
            if end - first >= 2:
                self.pieces.append((document, first, end - first))
                self.left_out -= int(size)

        for index, tokens in enumerate(self.sentences.sizes):
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

    can_reuse_epoch_itr_across_epochs = False  # data workers would go on with the pairs and masks of their first epoch

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
        """The ids of sentences start .. end - 1."""
        return torch.cat([self.sentences[i] for i in range(start, end)])


class Side(BaseWrapperDataset):
    """One part of `SentencePairs`: 0 A, 1 B, 2 the label."""

    def __init__(self, pairs: FairseqDataset, part: int):
        super().__init__(pairs)
        self.part = part

    def __getitem__(self, index):
        return self.dataset[index][self.part]

    def collater(self, samples: list) -> torch.Tensor:
        return torch.tensor(samples)  # labels; A and B are collated after their masks


@register_criterion(CRITERION, dataclass=MaskedLmConfig)
class MaskedLMNextSentence(MaskedLmLoss):
    """Mean loss of masked tokens plus mean loss of next sentences, as in BERT. `loss` in the log is that of the
    masked tokens only, comparable with the criterion masked_lm; `nsp_loss` is that of the pairs."""

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple[torch.Tensor, int, dict]:
        masked = sample["target"].ne(self.padding_idx).nonzero(as_tuple=True)  # rows, columns; only this waits
        count, sentences = len(masked[0]), len(sample["next_sentence"])
        options = {"masked_tokens": masked, "classification_head_name": HEAD, "num_tokens": count_tokens(sample)}
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
