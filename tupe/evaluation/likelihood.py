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

import numpy as np
import torch
from torch import Tensor

from ..plugin.model import TupeModel

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
    model: TupeModel, sentences: Iterable[Sentence], batch_tokens: int = 4096
) -> Iterator[Score]:
    """The `Score` of each sentence, in order. model: a `TupeModel` in evaluation mode; its dictionary frames a sentence
    as in training, `<s> pieces </s>`. batch_tokens: tokens of a batch; the scores do not depend on it but for rounding.
    Raises ValueError for a sentence that is empty or longer than the model's positions.
    """
    if model.training:
        raise ValueError("call eval() first: dropout would make the scores random")
    sentences = list(sentences)
    longest = model.max_positions() - 2
    todo = []  # (length, sentence, copy, first, last masked piece, target)
    prepared = []
    for number, words in enumerate(sentences):
        pieces, spans, of_word, of_single = masked_copies(words)
        if not 0 < len(pieces) <= longest:
            raise ValueError(f"sentence {number + 1} has {len(pieces)} pieces; valid: 1 to {longest}")
        prepared.append((pieces, spans, of_word, of_single, np.zeros(len(spans))))
        todo += [(len(pieces), number, copy, *span) for copy, span in enumerate(spans)]
    todo.sort(key=lambda entry: entry[0])
    begin = 0
    while begin < len(todo):
        end = begin + 1
        length = todo[begin][0]  # one for the whole batch: no padding
        while end < len(todo) and todo[end][0] == length and (length + 2) * (end - begin + 1) <= batch_tokens:
            end += 1
        batch = todo[begin:end]
        begin = end
        tokens, rows, columns, targets = _batch(batch, prepared, model.dictionary)
        log_p = _log_probabilities(model, tokens, (rows, columns), targets)
        for (_, number, copy, *_), value in zip(batch, log_p.tolist(), strict=True):
            prepared[number][4][copy] = value
    for pieces, _, of_word, of_single, values in prepared:
        yield Score(float(values[of_word].sum()), float(values[of_single].sum()), len(pieces))


def _batch(batch, prepared, dictionary) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Masked copies of one length -> tokens [B, L], and of each copy the row, the column of the first masked piece, and
    that piece."""
    length = batch[0][0]
    tokens = np.empty((len(batch), length + 2), dtype=int)
    tokens[:, 0], tokens[:, -1] = dictionary.bos(), dictionary.eos()
    mask, columns, targets = dictionary.index("<mask>"), [], []
    for row, (_, number, _, first, last) in enumerate(batch):
        pieces = prepared[number][0]
        tokens[row, 1:-1] = pieces
        tokens[row, 1 + first : 2 + last] = mask
        columns.append(1 + first)
        targets.append(pieces[first])
    return torch.from_numpy(tokens), torch.arange(len(batch)), torch.tensor(columns), torch.tensor(targets)


def _log_probabilities(model, tokens, indices, targets) -> Tensor:
    """log p of the targets [B] at indices (rows [B], columns [B]) of tokens [B, L], in float32."""
    device = model.encoder.tokens.weight.device
    tokens, targets = tokens.to(device), targets.to(device)
    indices = tuple(index.to(device) for index in indices)
    logits, _ = model(tokens, masked_tokens=indices, num_tokens=tokens.numel())  # [B, V]
    return torch.log_softmax(logits.float(), dim=-1).gather(1, targets[:, None]).squeeze(1)
