"""Pseudo-log-likelihoods of sentences under a masked language model (Salazar et al., 2020; Kauf and Ivanova, 2023).

A sentence w_1 ... w_n is masked and predicted piece by piece:

    PLL(w) = sum_i log p(w_i | w with w_i masked)                                       "single"
    PLL(w) = sum_i log p(w_i | w with w_i and the later pieces of its word masked)      "word" (l2r of Kauf and Ivanova)

The second does not reward a model for completing a rare word from its own end. One masked copy of the sentence is one
sequence of a batch; copies of one length are computed together, in float32.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from .loading import Model, framed, losses_at

Sentence = list[list[int]]  # words, each a list of pieces' ids
Span = tuple[int, int]  # (first, last) masked piece; the first is predicted


class Score(NamedTuple):
    """What a sentence scores, in nats."""

    word: float  # sum over pieces, later pieces of the same word masked too
    single: float  # sum over pieces, one mask at a time


def spans_of(words: Sentence) -> tuple[list[Span], list[Span]]:
    """The spans that "word" and "single" mask, one for each piece."""
    of_word, start = [], 0
    for word in words:
        last = start + len(word) - 1
        of_word += [(i, last) for i in range(start, last + 1)]
        start = last + 1
    return of_word, [(i, i) for i in range(start)]


def pseudo_log_likelihoods(model: Model, sentences: Iterable[Sentence], batch_tokens: int = 4096) -> list[Score]:
    """The `Score` of each sentence. model: in evaluation mode; a sentence is framed as in training, `<s> pieces </s>`.
    batch_tokens: tokens of a batch; the scores do not depend on it but for rounding. Raises ValueError for a sentence
    that is empty or longer than the model's positions, and for a score that is not finite."""
    longest = model.config.max_position_embeddings - 2
    sentences = list(sentences)
    by_length = {}  # {number of pieces: [(number of the sentence, its pieces, span)]}: no batch needs padding
    for number, words in enumerate(sentences):
        pieces = [piece for word in words for piece in word]
        if not 0 < len(pieces) <= longest:
            raise ValueError(f"sentence {number + 1} has {len(pieces)} pieces; valid: 1 to {longest}")
        of_word, single = spans_of(words)
        copies = by_length.setdefault(len(pieces), [])
        copies += [(number, pieces, span) for span in dict.fromkeys(of_word + single)]
    found = {}  # {(number of the sentence, span): log p}
    for length, copies in sorted(by_length.items()):
        size = max(1, batch_tokens // (length + 2))
        for begin in range(0, len(copies), size):
            numbers, pieces, spans = zip(*copies[begin : begin + size], strict=True)
            found.update(zip(zip(numbers, spans, strict=True), _log_p(model, pieces, spans), strict=True))
    return [
        Score(*(sum(found[number, span] for span in spans) for spans in spans_of(words)))
        for number, words in enumerate(sentences)
    ]


def _log_p(model, pieces, spans):
    """log p of the first masked piece of each copy. pieces: those of each, all of one length."""
    pieces = torch.tensor(pieces)
    first, last = torch.tensor(spans).T
    rows, column = torch.arange(len(pieces)), torch.arange(pieces.size(1))
    masked = (column >= first[:, None]) & (column <= last[:, None])
    tokens = framed(model, pieces, masked)
    return (-losses_at(model, tokens, (rows, 1 + first), pieces[rows, first], tokens.numel())).tolist()
