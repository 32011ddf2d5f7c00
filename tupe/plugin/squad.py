"""SQuAD v1.1 and v2.0: a task, a criterion, and the official scores on the original characters. The data: `squad_data`.

B batch, L length of `<s> question </s> </s> window </s>`, C model width.
"""

import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from fairseq.criterions import register_criterion
from fairseq.data import data_utils
from fairseq.dataclass import ChoiceEnum
from fairseq.models import BaseFairseqModel
from fairseq.tasks import FairseqDataclass, register_task
from omegaconf import MISSING, DictConfig

from ..common.record import write_atomically
from ..common.squad import official_scores
from .criterion import count_tokens
from .finetune import FinetuneConfig, FinetuneCriterion, FinetuneTask
from .squad_data import FILES, VERSIONS, Encoded, Windows

logger = logging.getLogger(__name__)

ANSWER_PIECES = 30  # longest answer that is predicted (Devlin et al., 2019)


# -------------------------------------------------------------------------------------------- head, task, criterion


@dataclass
class SquadConfig(FinetuneConfig):
    data: str = field(default=MISSING, metadata={"help": "folder that `tupe prepare squad` wrote"})
    squad_version: ChoiceEnum(list(VERSIONS)) = field(default="1.1", metadata={"help": "version of the files"})
    doc_stride: int = field(default=128, metadata={"help": "pieces from one window over a paragraph to the next"})
    max_query: int = field(default=64, metadata={"help": "pieces of the question that are kept"})


@register_task("squad", dataclass=SquadConfig)
class SquadTask(FinetuneTask):
    """Extractive question answering. Splits: `train`, and `valid`, which is the official development file."""

    metrics = ("f1", "exact")

    def build_model(self, cfg: DictConfig, from_checkpoint: bool = False) -> BaseFairseqModel:
        model = super().build_model(cfg, from_checkpoint)
        model.register_span_head()
        return model

    def load_dataset(self, split: str, combine: bool = False, **kwargs) -> None:
        if split in self.datasets:  # `count_updates` has loaded it already
            return
        encoded = Encoded.load(Path(self.cfg.data), FILES[split], str(self.cfg.squad_version))
        options = self.max_positions(), self.cfg.doc_stride, self.cfg.max_query
        self.datasets[split] = windows = Windows(encoded, self.dictionary, *options)
        with data_utils.numpy_seed(self.cfg.seed):
            shuffled = np.random.permutation(len(windows))
        self.set_batch_order(split, windows, windows.sizes, shuffled)
        self.note_shortened(split, windows.shortened, len(windows.questions))
        self.left_out[split] = windows.left_out / max(windows.answered, 1)
        if windows.left_out:
            logger.warning(f"{split}: {windows.left_out} of {windows.answered} answers fit into no window")

    def record_name(self, config: DictConfig) -> str:
        return f"SQuAD-{self.cfg.squad_version}"

    def data_files(self, split: str) -> list[Path]:
        # The pieces beside it follow from the text and the dictionary, and their file from the time of its writing.
        path = Path(self.cfg.data, f"{FILES.get(split, split)}-v{self.cfg.squad_version}.json")
        return [path] if path.exists() else []

    def answers(self, split: str) -> tuple:
        """({question id: best answer}, {question id: score of no answer minus that answer's}) from the windows."""
        data, best, null = self.dataset(split), {}, {}
        for w, (span, start, end, none) in self.predictions[split].items():
            q = data.questions[data.windows[w][0]].id
            null[q] = min(none, null.get(q, none))
            if start and (q not in best or span > best[q][0]):
                best[q] = span, data.answer(w, start, end)
        texts = {question.id: best.get(question.id, (0.0, ""))[1] for question in data.questions}
        return texts, {q: null[q] - best[q][0] if q in best else sys.float_info.max for q in null}

    def golds(self, split: str) -> dict:
        """{question id: its gold answers, none if it has no answer}."""
        return {question.id: [text for text, _ in question.answers] for question in self.dataset(split).questions}

    def evaluate(self, split: str) -> dict:
        golds = self.golds(split)
        texts, no_answer = self.answers(split)
        scores = official_scores(texts, golds, no_answer if str(self.cfg.squad_version) == "2.0" else None)
        self._threshold = scores.pop("threshold", None)
        return scores

    def keep_predictions(self, split: str, best: bool) -> None:
        super().keep_predictions(split, best)
        path = self.run.folder / "predictions" / f"{split}_golds.json"
        if not path.exists():
            write_atomically(path, json.dumps(self.golds(split), ensure_ascii=False, allow_nan=False) + "\n")

    def write_predictions(self, split: str, stem: str | Path) -> None:
        """The official formats: {question id: answer}, and for v2.0 the scores of no answer, with the threshold."""
        self.scores(split)
        texts, no_answer = self.answers(split)
        if self._threshold is not None:
            texts = {q: text if no_answer[q] <= self._threshold else "" for q, text in texts.items()}
            content = {**no_answer, "threshold": self._threshold}
            write_atomically(f"{stem}_no_answer.json", json.dumps(content, allow_nan=False) + "\n")
        write_atomically(f"{stem}.json", json.dumps(texts, ensure_ascii=False, indent=1, allow_nan=False) + "\n")


@register_criterion("squad", dataclass=FairseqDataclass)  # it has no options
class SquadCriterion(FinetuneCriterion):
    """Mean cross-entropy (nats) of the answer's first and last position; [CLS] where the window has no answer."""

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple[torch.Tensor, int, dict]:
        """Returns (summed loss, number of windows, what to log)."""
        spans, _ = model(**sample["net_input"], spans=True, num_tokens=count_tokens(sample))
        start, end = spans.float().unbind(-1)  # [B, L] each
        allowed = sample["inside"].clone()
        allowed[:, 0].fill_(True)
        logits = [part.masked_fill(~allowed, float("-inf")) for part in (start, end)]
        loss = sum(F.cross_entropy(part, sample["target"][:, i], reduction="sum") for i, part in enumerate(logits)) / 2
        size = len(sample["target"])
        log = {"loss": loss.data, "ntokens": sample["ntokens"], "nsentences": size, "sample_size": size}
        if not model.training:
            log.update(split="valid", id=sample["id"].tolist(), prediction=best_spans(*logits, sample["starts"]))
        return loss, size, log


def best_spans(start: torch.Tensor, end: torch.Tensor, starts: torch.Tensor) -> list[tuple]:
    """[(score of the best span, its first position, its last, score of no answer)] per row.

    start, end: logits [B, L], -inf where no answer can be, [CLS] at 0. starts: where a span may begin [B, L].
    A span is at most `ANSWER_PIECES` long. Positions are 0, 0 if there is none.
    """
    length = start.size(1)
    pairs = start.masked_fill(~starts, float("-inf"))[:, :, None] + end[:, None, :]  # [B, L, L]
    ordered = torch.ones(length, length, dtype=torch.bool, device=start.device).triu().tril(ANSWER_PIECES - 1)
    ordered[:, 0] = False
    value, place = pairs.masked_fill(~ordered, float("-inf")).flatten(1).max(dim=1)
    possible = torch.isfinite(value)
    none = (start[:, 0] + end[:, 0]).tolist()
    first, last = (place // length * possible).tolist(), (place % length * possible).tolist()
    return list(zip(value.tolist(), first, last, none, strict=True))
