"""Pseudo-log-likelihoods against one masked sentence at a time, and against numbers computed by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import build_masked_lm

from tupe.evaluate.likelihood import Score, pseudo_log_likelihoods, spans_of

SENTENCES = [[[4], [5, 6, 7]], [[8]], [[4], [4], [9, 10], [11], [12, 13], [5]], [[14, 15]]]


@pytest.fixture(params=["bert_a_tiny", "tupe_r_tiny"])
def model(request):
    return build_masked_lm(request.param, max_positions=16)


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


def test_by_hand():
    """A model that knows one thing: the piece after <s> is 4 with probability 1/2, the piece after 4 is 5 with 3/4, and
    after a mask all 8 types are equally likely."""

    class Left(torch.nn.Module):
        """The token before each of the indices."""

        tokens = SimpleNamespace(weight=torch.zeros(1))

        def forward(self, ids, hiddens, num_tokens, indices):
            return ids.flatten()[indices - 1], None

    class Bigrams(torch.nn.Module):
        config = SimpleNamespace(max_position_embeddings=16, mask_token_id=53)
        tupe = SimpleNamespace(encoder=Left())

        def lm_head(self, left, weight):
            p = torch.full((len(left), 8), 1 / 8)
            p[left == 0] = torch.tensor([0.5 if i == 4 else 0.5 / 7 for i in range(8)])
            p[left == 4] = torch.tensor([0.75 if i == 5 else 0.25 / 7 for i in range(8)])
            return p.log()

    model = Bigrams().eval()
    (two_words, one_word) = pseudo_log_likelihoods(model, [[[4], [5]], [[4, 5]]])
    assert two_words == Score(pytest.approx(math.log(1 / 2 * 3 / 4)), pytest.approx(math.log(1 / 2 * 3 / 4)))
    # 4 is predicted from <s> either way, 5 from 4; only the mask of 5 beside that of 4 differs, and nothing reads it
    assert one_word.word == pytest.approx(two_words.word)
    (three,) = pseudo_log_likelihoods(model, [[[6, 4, 5]]])
    assert three.word == pytest.approx(math.log(0.5 / 7 * 1 / 8 * 3 / 4))  # 6 after <s>, 4 after 6, 5 after 4


@pytest.mark.parametrize("words", [[], [[4] * 15]], ids=["empty", "too long"])
def test_sentences_without_a_score(words, model):
    with pytest.raises(ValueError, match="sentence 2 has"):
        list(pseudo_log_likelihoods(model, [[[4]], words]))
