"""SQuAD's official scores on the original characters."""

import collections
import re
import string
from collections.abc import Callable

import numpy as np

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """An answer as the official script compares it: lower case, no punctuation, no articles, single spaces."""
    return " ".join(re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, gold: str) -> float:
    """1 if both are the same after normalisation, else 0."""
    return float(normalise_answer(prediction) == normalise_answer(gold))


def f1(prediction: str, gold: str) -> float:
    """Harmonic mean of precision and recall over words; 1 if both are empty, 0 if one is."""
    predicted, correct = normalise_answer(prediction).split(), normalise_answer(gold).split()
    if not predicted or not correct:
        return float(predicted == correct)
    common = sum((collections.Counter(predicted) & collections.Counter(correct)).values())
    return 2 * common / (len(predicted) + len(correct))


def best_over_golds(measure: Callable, prediction: str, golds: list[str], version: str = "2.0") -> float:
    """The best score against any gold answer; for a question without one, the empty string is correct.

    Version 2.0 of the official script ignores a gold answer that is all articles and punctuation; in 1.1 it can be
    matched exactly, but its F1 is 0.
    """
    real = [gold for gold in golds if normalise_answer(gold)]
    if version == "1.1" and golds:
        return max((measure(prediction, gold) for gold in (golds if measure is exact_match else real)), default=0.0)
    return max(measure(prediction, gold) for gold in real or [""])


def official_scores(predictions: dict, golds: dict, no_answer: dict | None = None) -> dict:
    """{"exact", "f1", "threshold"} in percent over all questions.

    predictions: {question id: text of the best answer}. golds: {question id: list of gold answers, empty if there is
    none}. no_answer: {question id: score of no answer minus that of the best span}: a question above the threshold is
    answered with the empty string. The threshold is the one with the highest F1, which the official script reports as
    "best_f1"; "exact" is at the same threshold. Without no_answer every answer counts, as in version 1.1.
    """
    ids = sorted(golds, key=lambda qid: no_answer[qid]) if no_answer else list(golds)
    version = "2.0" if no_answer else "1.1"
    given = {
        m: np.array([best_over_golds(m, predictions[qid], golds[qid], version) for qid in ids])
        for m in (exact_match, f1)
    }
    empty = np.array([float(not golds[qid]) for qid in ids])
    answered, threshold = len(ids), None
    if no_answer:
        # When it looks for the threshold, no answer is right where there is none, and any other text is wrong.
        for values in given.values():
            values[empty == 1] = [not predictions[qid] for qid in ids if not golds[qid]]
        # F1 if the first k questions are answered, for k = 0 ... n; equal values are answered together.
        totals = np.concatenate([[0], np.cumsum(given[f1])]) + empty.sum() - np.concatenate([[0], np.cumsum(empty)])
        values = [no_answer[qid] for qid in ids]
        allowed = [k for k in range(len(ids) + 1) if k in (0, len(ids)) or values[k - 1] < values[k]]
        answered = max(allowed, key=lambda k: totals[k])
        threshold = values[answered - 1] if answered else values[0] - 1.0
    scores = {m: (given[m][:answered].sum() + empty[answered:].sum()) / len(ids) for m in given}
    percent = {"exact": 100 * float(scores[exact_match]), "f1": 100 * float(scores[f1])}
    return {**percent, "threshold": float(threshold)} if no_answer else percent


def constant_scores(golds: dict, version: str) -> dict:
    """{"exact", "f1"} in percent of always giving one answer: none, or the one that most questions have.

    golds: {question id: list of gold answers}.
    """
    counts = collections.Counter(answer for answers in golds.values() for answer in dict.fromkeys(answers))
    tried = ["", *(answer for answer, _ in counts.most_common(1))]

    def best(measure):
        return max(sum(best_over_golds(measure, text, golds[q], version) for q in golds) for text in tried)

    return {"exact": 100 * best(exact_match) / len(golds), "f1": 100 * best(f1) / len(golds)}
