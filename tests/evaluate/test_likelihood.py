"""Pseudo-log-likelihoods against one masked sentence at a time."""

import pytest
import torch
from helpers import build_masked_lm

from tupe.evaluate.likelihood import pseudo_log_likelihoods, spans_of

SENTENCES = [[[4], [5, 6, 7]], [[8]], [[4], [4], [9, 10], [11], [12, 13], [5]], [[14, 15]]]


@pytest.fixture
def model():
    return build_masked_lm("tupe_r_tiny", max_positions=16)


def test_masks_of_a_sentence():
    of_word, single = spans_of([[4], [5, 6, 7]])
    assert of_word == [(0, 0), (1, 3), (2, 3), (3, 3)] and single == [(0, 0), (1, 1), (2, 2), (3, 3)]


def naive(model, words, whole_word):
    pieces = [piece for word in words for piece in word]
    ends = [end for n, word in enumerate(words) for end in [sum(map(len, words[: n + 1]))] * len(word)]
    total = 0.0
    for i, piece in enumerate(pieces):
        ids = [0, *pieces, 2]
        for j in range(i, ends[i] if whole_word else i + 1):
            ids[1 + j] = 53
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0][0, 1 + i]
        total += float(torch.log_softmax(logits.double(), -1)[piece])
    return total


@pytest.mark.parametrize("batch_tokens", [40, 10_000])
def test_equals_one_sentence_at_a_time(batch_tokens, model):
    for words, score in zip(SENTENCES, pseudo_log_likelihoods(model, SENTENCES, batch_tokens), strict=True):
        assert score.word == pytest.approx(naive(model, words, True), abs=1e-4)
        assert score.single == pytest.approx(naive(model, words, False), abs=1e-4)


@pytest.mark.parametrize("words", [[], [[4] * 15]], ids=["empty", "too long"])
def test_sentences_without_a_score(words, model):
    with pytest.raises(ValueError, match="sentence 2 has"):
        list(pseudo_log_likelihoods(model, [[[4]], words]))
