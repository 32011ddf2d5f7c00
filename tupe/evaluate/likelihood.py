"""Pseudo-log-likelihoods of sentences under a masked language model (Salazar et al., 2020; Kauf and Ivanova, 2023).

A sentence w_1 ... w_n is masked and predicted piece by piece:

    PLL(w) = sum_i log p(w_i | w with w_i masked)                                       "single"
    PLL(w) = sum_i log p(w_i | w with w_i and the later pieces of its word masked)      "word" (l2r of Kauf and Ivanova)

The second does not reward a model for completing a rare word from its own end. One masked copy of the sentence is one
sequence of a batch; copies of about one length are computed together, in float32.

B batch, L sequence length, V vocabulary.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from ..data.blocks import BOS, EOS
from .loading import logits_at

if TYPE_CHECKING:  # transformers takes as long to import as torch
    from ..modeling_tupe import TupeForMaskedLM

Sentence = list[list[int]]  # words, each a list of pieces' ids


@dataclass(frozen=True)
class Score:
    """Of one sentence, in nats."""

    word: float  # sum over pieces, later pieces of the same word masked too
    single: float  # sum over pieces, one mask at a time
    pieces: int


def masked_copies(words: Sentence) -> tuple[list[int], list[tuple[int, int]], np.ndarray, np.ndarray]:
    """(pieces, [(first, last) masked piece of every copy], for each piece its copy under "word", and under "single").

    Copies that both ways of masking share, the last piece of each word, are made once.
    """
    pieces = [piece for word in words for piece in word]
    spans, of_word, of_single = [], [], []
    end = 0
    for word in words:
        start, end = end, end + len(word)
        for i in range(start, end):
            of_single.append(len(spans))
            spans.append((i, i))
            if i < end - 1:
                spans.append((i, end - 1))
            of_word.append(len(spans) - 1)
    return pieces, spans, np.array(of_word, dtype=int), np.array(of_single, dtype=int)


@torch.inference_mode()
def pseudo_log_likelihoods(
    model: "TupeForMaskedLM", sentences: Iterable[Sentence], batch_tokens: int = 4096
) -> Iterator[Score]:
    """The `Score` of each sentence, in order. model: in evaluation mode; a sentence is framed as in
    training, `<s> pieces </s>`. batch_tokens: tokens of a batch; the scores do not depend on it but for rounding.
    Raises ValueError for a sentence that is empty or longer than the model's positions, and for a score that is not
    finite.
    """
    if model.training:
        raise ValueError("call eval() first: dropout would make the scores random")
    longest = model.config.max_position_embeddings - 2
    prepared, by_length = [], {}  # {length: [(sentence, copy, first, last masked piece)]}: no batch needs padding
    for number, words in enumerate(sentences):
        pieces, spans, of_word, of_single = masked_copies(words)
        if not 0 < len(pieces) <= longest:
            raise ValueError(f"sentence {number + 1} has {len(pieces)} pieces; valid: 1 to {longest}")
        prepared.append((pieces, of_word, of_single, np.zeros(len(spans))))
        by_length.setdefault(len(pieces), []).extend((number, copy, *span) for copy, span in enumerate(spans))
    for length, copies in sorted(by_length.items()):
        size = max(1, batch_tokens // (length + 2))
        for begin in range(0, len(copies), size):
            batch = copies[begin : begin + size]
            log_p = _log_probabilities(model, [prepared[number][0] for number, *_ in batch], batch)
            if not np.isfinite(log_p).all():
                raise ValueError("the model's scores are not finite; its training may have diverged")
            for (number, copy, *_), value in zip(batch, log_p, strict=True):
                prepared[number][3][copy] = value
    for pieces, of_word, of_single, values in prepared:
        yield Score(float(values[of_word].sum()), float(values[of_single].sum()), len(pieces))


def _log_probabilities(model, sentences, copies):
    """log p of the first masked piece of each copy, in float32. sentences: the pieces of each, all of one length."""
    mask, device = model.config.mask_token_id, model.tupe.encoder.tokens.weight.device
    pieces = torch.tensor(sentences)
    rows, first, last = torch.arange(len(pieces)), *torch.tensor([copy[2:] for copy in copies]).T
    column = torch.arange(pieces.size(1))
    masked = (column >= first[:, None]) & (column <= last[:, None])
    tokens = F.pad(pieces.masked_fill(masked, mask), (1, 0), value=BOS)
    tokens = F.pad(tokens, (0, 1), value=EOS).to(device)
    indices = rows.to(device), (1 + first).to(device)
    logits = logits_at(model, tokens, indices, tokens.numel())  # [B, V]
    targets = pieces[rows, first].to(device)
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1).tolist()
