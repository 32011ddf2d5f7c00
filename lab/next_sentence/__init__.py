"""The next-sentence objective beside masked words: a fairseq plugin on top of ours.

    fairseq-train DATA --user-dir lab/next_sentence --task next_sentence --criterion masked_lm_next_sentence ...

A sequence is `<s> A </s> </s> B </s>`, where B follows A in its document or comes from another one (Devlin et al.,
2019), and the model needs segment embeddings to tell them apart (`python -m lab continue` adds them).
"""

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss
from fairseq.logging import metrics
from fairseq.models import BaseFairseqModel
from fairseq.tasks import register_task
from omegaconf import DictConfig

import tupe.plugin  # noqa: F401  (architectures, optimizers, schedules)
from tupe.checkpoints import gate
from tupe.data.batches import Epoch, held_out
from tupe.data.blocks import BOS, EOS, PAD
from tupe.data.loader import pad
from tupe.data.masks import IGNORED, MaskedBlocks
from tupe.data.splits import HELD_OUT_SEED, Split, prefixes_of
from tupe.plugin.masked_lm import TupeMaskedLMConfig, TupeMaskedLMTask
from tupe.plugin.ordered import Items

HEAD = "next_sentence"
CRITERION = "masked_lm_next_sentence"
gate.ADMITTED["task"][HEAD] = gate.ADMITTED["task"]["tupe_masked_lm"]
gate.ADMITTED["criterion"][CRITERION] = gate.ADMITTED["criterion"]["masked_lm"]


@dataclass
class NextSentenceConfig(TupeMaskedLMConfig):
    pass


@register_task("next_sentence", dataclass=NextSentenceConfig)
class NextSentenceTask(TupeMaskedLMTask):
    """Pairs of sentences, masked and ordered as the blocks of `tupe_masked_lm` are."""

    def build_model(self, cfg: DictConfig, from_checkpoint: bool = False) -> BaseFairseqModel:
        model = super().build_model(cfg, from_checkpoint)
        if str(model.cfg.segments) == "none":
            raise ValueError("next sentences need segment embeddings: python -m lab continue adds them")
        model.register_classification_head(HEAD, num_classes=2)
        return model

    def build_criterion(self, cfg: DictConfig, **kwargs) -> FairseqCriterion:
        if cfg._name != CRITERION:
            raise ValueError(f"the task next_sentence does not go with criterion {cfg._name}; valid: {CRITERION}")
        return super().build_criterion(cfg, **kwargs)

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        cfg, symbols, trains = self.cfg, self.source_dictionary.symbols, split == self.train_subset
        sentences = [ids for prefix in prefixes_of(cfg.data, split) for ids in Split(prefix, len(symbols))]
        pairs = SentencePairs(sentences, cfg.tokens_per_sample, cfg.seed if trains else HELD_OUT_SEED)
        masks = {name: getattr(cfg, name) for name in ("mask_prob", "leave_unmasked_prob", "random_token_prob")}
        order = functools.partial(Epoch, len(pairs), cfg.seed) if trains else functools.partial(held_out, len(pairs))
        self.datasets[split] = Items(MaskedPairs(pairs, symbols, **masks), collate, order, cfg.tokens_per_sample)


class SentencePairs:
    """Item (epoch, i) is (A [a], B [b], label) with a + b + 4 <= length; label 0: B follows A, 1: B begins elsewhere in
    another document.

    sentences: ids, each ending with a separator; an empty sentence ends a document. The sentences of a document are
    grouped into pieces that fit. Every epoch cuts each piece into A and B at a random sentence, and replaces B with
    probability 1/2 by whole sentences that are about as long: neither the length nor the end of a pair tells its
    label. Pieces of a single sentence, and sentences that do not fit, are left out. Raises ValueError unless two
    documents have pieces.
    """

    def __init__(self, sentences: list[np.ndarray], length: int, seed: int):
        self.sentences, self.room, self.seed = sentences, length - 4, seed
        self.pieces = []  # (document, index of the first sentence, number of sentences)
        document, first, size = 0, 0, 0

        def close(end):
            if end - first >= 2:
                self.pieces.append((document, first, end - first))

        for index, tokens in enumerate(len(ids) - 1 for ids in sentences):  # without the separators
            if tokens == 0 or tokens > self.room:  # the end of a document, or a sentence that is too long
                close(index)
                document, first, size = document + (tokens == 0), index + 1, 0
            elif size + tokens > self.room:
                close(index)
                first, size = index, tokens
            else:
                size += tokens
        close(len(sentences))
        self.kept = np.array([i for _, first, count in self.pieces for i in range(first, first + count)], int)
        self.documents = np.repeat([document for document, _, _ in self.pieces], [count for _, _, count in self.pieces])
        # of the kept sentences: tokens before each, and after the last
        self.before = np.cumsum([0, *(len(sentences[i]) - 1 for i in self.kept)])
        if len(set(self.documents)) < 2:
            raise ValueError(
                f"the next-sentence objective needs two documents with two sentences each that fit into {length} tokens"
            )

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, item: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, int]:
        epoch, index = item
        rng = np.random.default_rng([self.seed, max(epoch, 0), index])
        document, first, count = self.pieces[index]
        cut = first + rng.integers(1, count)
        a = self.words(range(first, cut))
        label = int(rng.random() < 0.5)
        b = self.words(range(cut, first + count))
        return a, self.elsewhere(rng, document, len(b), self.room - len(a)) if label else b, label

    def elsewhere(self, rng: np.random.Generator, document: int, size: int, room: int) -> np.ndarray:
        """Sentences in a row of a random other document, from a random one on: about `size` tokens, at most `room`."""
        own, end = np.searchsorted(self.documents, [document, document + 1])  # its sentences among those that are kept
        start = rng.integers(len(self.kept) - (end - own))
        start += (end - own) * (start >= own)
        first, end = np.searchsorted(self.documents, [self.documents[start], self.documents[start] + 1])
        enough = np.searchsorted(self.before, self.before[end] - size, side="right") - 1
        start = max(first, min(start, enough))  # earlier where the document would end too soon
        fitting = np.flatnonzero(np.diff(self.before[start : end + 1]) <= room)
        start += fitting[0] if len(fitting) else 0  # later where that sentence is too long
        sizes = self.before[start + 1 : end + 1] - self.before[start]
        sizes = sizes[sizes <= room]
        count = np.abs(sizes - size).argmin() + 1 if len(sizes) else 1
        return self.words(self.kept[start : start + count])[:room]

    def words(self, indices: Iterable[int]) -> np.ndarray:
        """The ids of these sentences."""
        return np.concatenate([self.sentences[i][:-1] for i in indices])


class MaskedPairs(MaskedBlocks):
    """Item (epoch, i) is pair i as one sequence, with the masks of that epoch, and its label: (ids with masks, targets,
    label). Separators are never masked: they tell A from B."""

    def __init__(self, pairs: SentencePairs, symbols: list[str], **masks: float):
        super().__init__({}, symbols, pairs.seed, **masks)
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    @property
    def sizes(self) -> np.ndarray:
        return np.full(len(self), self.pairs.room + 4)  # at most

    def __getitem__(self, item: tuple[int, int]) -> tuple[np.ndarray, np.ndarray, int]:
        epoch, index = item
        a, b, label = self.pairs[epoch, index]
        whole = np.concatenate([[BOS], a, [EOS, EOS], b, [EOS]])
        self.blocks = {index: whole}  # the one that is masked next
        ids, targets = super().__getitem__(item)
        separates = (whole == BOS) | (whole == EOS)
        return np.where(separates, whole, ids), np.where(separates, IGNORED, targets), label


def collate(samples: list) -> dict:
    """A batch of fairseq's task. samples: (index, item of `MaskedPairs`)."""
    indices, items = zip(*samples, strict=True)
    ids, targets = pad([item[:2] for item in items])
    lengths = [len(item[0]) for item in items]
    return {
        "id": torch.tensor(indices),
        "net_input": {"src_tokens": ids, "src_lengths": torch.tensor(lengths)},
        "target": targets.masked_fill(targets == IGNORED, PAD),
        "next_sentence": torch.tensor([item[2] for item in items]),
        "nsentences": len(items),
        "ntokens": sum(lengths),
    }


@register_criterion(CRITERION, dataclass=MaskedLmConfig)
class MaskedLMNextSentence(MaskedLmLoss):
    """Mean loss of masked tokens plus mean loss of next sentences, as in BERT. `loss` in the log is that of the
    masked tokens only, comparable with the criterion masked_lm; `nsp_loss` is that of the pairs."""

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple[torch.Tensor, int, dict]:
        masked = sample["target"].ne(self.padding_idx).nonzero(as_tuple=True)  # rows, columns; only this waits
        count, sentences = len(masked[0]), len(sample["next_sentence"])
        features, _ = model(**sample["net_input"], features_only=True, num_tokens=int(sample["ntokens"]))
        with model.precision():
            logits = model.lm_head(features[masked], model.encoder.tokens.weight)
        lm_loss = F.cross_entropy(logits.float(), sample["target"][masked], reduction="sum")
        classes, labels = model.classification_heads[HEAD](features[:, 0]).float(), sample["next_sentence"]
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
