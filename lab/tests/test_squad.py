"""SQuAD: official scores on hand-made cases and against the official script's formulas, windows over long paragraphs,
and a model that learns to find answers."""

import collections
import json
import re
import string

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lab import squad
from lab.squad import (
    ANSWER_TOKENS,
    best_over_golds,
    best_span,
    exact_match,
    f1,
    normalise_answer,
    official_scores,
    read_squad,
    windows_of,
)
from tupe.common.prepared import tokenizer_files
from tupe.configuration_tupe import TupeConfig
from tupe.modeling_tupe import TupeForMaskedLM
from tupe.sweep.collection import collect
from tupe.sweep.scores import summarise

SAMPLINGS = ["cat", "dog", "mat", "park", "bird", "song"]
FILLER = "while the birds sang of old songs in parks and dogs ran on a mat"


def squad_file(folder, version="1.1", count=50, impossible=0):
    """Write SQuAD's official files, whose paragraphs have one question each; returns the development file.

    Around the answers there are characters that the normaliser changes. impossible: number of questions without an
    answer.
    """
    paragraphs = []
    for i in range(count):
        animal, place = SAMPLINGS[i % 6], SAMPLINGS[(i // 6) % 6]
        answer = f"{place} {i}"
        before = ["", "See https://a.example/x?y=1 now. ", "“Old”\u00a0\u00a0songs… ", "ﬁne\u00ad day; "][i % 4]
        context = f"{before}{FILLER}, The {animal.title()} {i} sang in {answer}, {FILLER}."
        qas = [{"id": f"q{i}", "question": f"Where did the {animal} {i} sing ?"}]
        if i < impossible:
            qas[0].update(is_impossible=True, answers=[], question=f"Who ran on the {animal} {i} ?")
        else:
            qas[0]["answers"] = [{"text": answer, "answer_start": context.index(answer)}]
        paragraphs.append({"context": context, "qas": qas})
    folder.mkdir(exist_ok=True)
    for split in ("train", "dev"):
        content = {"version": version, "data": [{"title": "x", "paragraphs": paragraphs}]}
        (folder / f"{split}-v{version}.json").write_text(json.dumps(content))
    return folder / f"dev-v{version}.json"


# --------------------------------------------------------------------------------------------------- official scores


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The  Cat", "cat"),
        ("a cat, an owl; the end.", "cat owl end"),
        ("Theatre and another anthem", "theatre and another anthem"),  # articles are whole words
        ("U.S.", "us"),
        ("a.b", "ab"),  # punctuation goes first, so no article is left
        ("the", ""),
        ("1,000\u00a0km", "1000 km"),
        ("a–b", "–b"),  # a dash that is not ASCII is no punctuation, and ends a word
    ],
)
def test_normalised_answers(text, expected):
    assert normalise_answer(text) == expected


def test_f1_and_exact_match():
    assert exact_match("The Norman conquest.", "norman conquest") == 1
    assert exact_match("Norman", "norman conquest") == 0
    assert f1("the Norman conquest of England", "Norman conquest") == pytest.approx(2 * 2 / (4 + 2))
    assert f1("cat cat cat", "cat") == pytest.approx(2 * 1 / (3 + 1))  # repeated words count as often as in both
    assert f1("dog", "cat") == 0 and f1("", "") == 1 and f1("cat", "") == 0 and f1("the", "") == 1


def test_several_gold_answers_and_none():
    golds = ["in the 10th century", "10th century"]
    assert best_over_golds(f1, "10th century", golds) == 1
    assert best_over_golds(exact_match, "10th", golds) == 0
    assert best_over_golds(f1, "10th", golds) == pytest.approx(2 / 3)
    assert best_over_golds(exact_match, "", []) == 1 and best_over_golds(f1, "something", []) == 0
    assert best_over_golds(exact_match, "x", ["the", "x"]) == 1
    for version, exact, overlap in (("2.0", 0, 0), ("1.1", 1, 0)):  # an empty gold answer is none in 2.0
        assert best_over_golds(exact_match, "A", ["a", "vitamin A"], version) == exact
        assert best_over_golds(f1, "A", ["a", "vitamin A"], version) == overlap
    assert best_over_golds(f1, "", ["a"]) == 1 and best_over_golds(f1, "", ["a"], "1.1") == 0
    assert official_scores({"a": "A"}, {"a": ["a", "vitamin A"]}) == {"exact": 100.0, "f1": 0.0}


def test_official_scores_without_threshold():
    golds = {"a": ["cat"], "b": ["black dog"]}
    assert official_scores({"a": "cat", "b": "dog"}, golds) == {
        "exact": 50.0,
        "f1": pytest.approx(100 * (1 + 2 / 3) / 2),
    }


def test_no_answer_threshold():
    golds = {"a": ["cat"], "b": ["dog"], "c": [], "d": []}
    predictions = {"a": "cat", "b": "dog", "c": "cow", "d": "cow"}
    apart = official_scores(predictions, golds, {"a": -5.0, "b": -1.0, "c": 2.0, "d": 9.0})
    assert apart == {"exact": 100.0, "f1": 100.0, "threshold": -1.0}
    # "c" looks more answerable than "b": the best is to answer only "a".
    mixed = official_scores(predictions, golds, {"a": -5.0, "b": 3.0, "c": 2.0, "d": 9.0})
    assert mixed["f1"] == 75.0 and mixed["threshold"] == -5.0
    # Equal scores are answered together or not at all.
    equal = official_scores(predictions, golds, {"a": 1.0, "b": 1.0, "c": 1.0, "d": 2.0})
    assert equal["f1"] == 75.0 and equal["threshold"] == 1.0
    nothing = official_scores(dict.fromkeys(golds, "wrong"), golds, dict.fromkeys(golds, 0.0))
    assert nothing["f1"] == 50.0 and nothing["threshold"] < 0
    # When the official script looks for the threshold, an article is an answer where there is none.
    article = official_scores({"a": "the", "b": "dog"}, {"a": [], "b": ["dog"]}, {"a": -5.0, "b": 1.0})
    assert article["f1"] == article["exact"] == 50.0


# --------------------------------------------------------- the official script (evaluate-v2.0.py), as it is published


def normalize_answer(s):
    def remove_articles(text):
        return re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", text)

    def remove_punc(text):
        return "".join(ch for ch in text if ch not in set(string.punctuation))

    return " ".join(remove_articles(remove_punc(s.lower())).split())


def get_tokens(s):
    return normalize_answer(s).split() if s else []


def compute_exact(a_gold, a_pred):
    return int(normalize_answer(a_gold) == normalize_answer(a_pred))


def compute_f1(a_gold, a_pred):
    gold_toks, pred_toks = get_tokens(a_gold), get_tokens(a_pred)
    common = collections.Counter(gold_toks) & collections.Counter(pred_toks)
    num_same = sum(common.values())
    if len(gold_toks) == 0 or len(pred_toks) == 0:
        return int(gold_toks == pred_toks)
    if num_same == 0:
        return 0
    precision, recall = 1.0 * num_same / len(pred_toks), 1.0 * num_same / len(gold_toks)
    return (2 * precision * recall) / (precision + recall)


def find_best_thresh(preds, scores, na_probs, qid_to_has_ans):
    num_no_ans = sum(1 for k in qid_to_has_ans if not qid_to_has_ans[k])
    cur_score = best_score = num_no_ans
    best_thresh = 0.0
    for qid in sorted(na_probs, key=lambda k: na_probs[k]):
        if qid not in scores:
            continue
        diff = scores[qid] if qid_to_has_ans[qid] else (-1 if preds[qid] else 0)
        cur_score += diff
        if cur_score > best_score:
            best_score, best_thresh = cur_score, na_probs[qid]
    return 100.0 * best_score / len(scores), best_thresh


def official(predictions, golds, no_answer):
    """(exact, F1) of the script: for v1.1 without a threshold, for v2.0 its best_exact and best_f1."""
    found = []
    for measure in (compute_exact, compute_f1):
        real = {q: [a for a in golds[q] if normalize_answer(a)] or [""] for q in golds}
        scores = {q: max(measure(a, predictions[q]) for a in real[q]) for q in golds}
        if no_answer is None:
            found.append(100.0 * sum(scores.values()) / len(scores))
        else:
            found.append(find_best_thresh(predictions, scores, no_answer, {q: bool(golds[q]) for q in golds})[0])
    return found


WORDS = st.lists(st.sampled_from(["the", "cat", "Cat,", "dog", "a", "U.S.", "10th"]), max_size=4).map(" ".join)
REAL = WORDS.filter(normalise_answer)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(WORDS, st.lists(REAL, max_size=3), st.integers()), min_size=1, max_size=8), st.booleans())
def test_scores_are_those_of_the_official_script(rows, with_threshold):
    """The scores of no answer differ: of equal ones the script answers some, and not others."""
    rows = [row for row in rows if row[1] or with_threshold]
    if not rows:
        return
    predictions, golds = ({str(n): row[k] for n, row in enumerate(rows)} for k in (0, 1))
    order = np.argsort([row[2] for row in rows], kind="stable").argsort()
    no_answer = {str(n): float(place) for n, place in enumerate(order)} if with_threshold else None
    ours = official_scores(predictions, golds, no_answer)
    exact, score = official(predictions, golds, no_answer)
    assert ours["f1"] == pytest.approx(score)
    if not with_threshold:
        assert ours["exact"] == pytest.approx(exact)
    assert ours["exact"] <= exact + 1e-9  # ours is at the threshold of F1, theirs at its own


# --------------------------------------------------------------------------------------------------------- the model


def test_best_span_is_the_naive_search():
    length = ANSWER_TOKENS + 12
    start, end = torch.randn(2, length)
    inside = torch.zeros(length, dtype=torch.bool)
    inside[8:-1] = True
    end[-3] = 50.0  # out of reach for the earliest starts
    spans = [
        (float(start[i] + end[j]), i, j)
        for i in range(length)
        for j in range(i, min(i + ANSWER_TOKENS, length))
        if inside[i] and inside[j]
    ]
    assert best_span(start, end, inside) == pytest.approx(max(spans))
    assert best_span(start, end, torch.zeros_like(inside)) is None


@pytest.fixture(scope="module")
def folder(vocabulary, tmp_path_factory):
    """A tiny model of 64 positions with random weights, as a Hugging Face folder."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model") / "hf"
    types = len((vocabulary / "dict.txt").read_text().splitlines()) + 5
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = TupeConfig(
        vocab_size=types, position="untied+t5", cls_position="untied", max_position_embeddings=64, **sizes, **none
    )
    TupeForMaskedLM(config).save_pretrained(folder)
    for name, content in tokenizer_files(vocabulary, 64, code=False).items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize("longest", [512, 40, 32])
def test_windows_cover_and_give_back_the_answers(folder, longest, tmp_path):
    questions, tokenizer = read_squad(squad_file(tmp_path / "squad")), AutoTokenizer.from_pretrained(folder)
    for question in questions:
        windows = list(windows_of(question, tokenizer, longest))
        assert (longest == 512) == (len(windows) == 1) and max(len(window.ids) for window in windows) <= longest
        seen, answers = set(), set()
        for window in windows:
            inside = window.offsets[:, 0] >= 0
            assert window.ids[0] == 0 and window.ids[-1] == 2 and not inside[0] and not inside[-1]
            seen.update(map(tuple, window.offsets[inside].tolist()))
            first, last = window.target
            if first:
                answers.add(question.context[window.offsets[first, 0] : window.offsets[last, 1]])
        (whole,) = windows_of(question, tokenizer, 512)
        assert seen == set(map(tuple, whole.offsets[whole.offsets[:, 0] >= 0].tolist()))
        assert answers == {question.answers[0][0]}


@pytest.mark.parametrize("version, impossible", [("1.1", 0), ("2.0", 5)])
def test_a_tiny_model_overfits_its_questions(version, impossible, folder, tmp_path):
    """Answers are scored on the original characters, and paragraphs are longer than the model."""
    file = squad_file(tmp_path / "squad", version, 16, impossible)
    words = [f"--model={folder}", f"--squad={file.parent}", f"--version={version}", f"--output={tmp_path / 'run'}"]
    more = ["--epochs=40", "--batch-size=16", "--lr=2e-3"]
    done = CliRunner().invoke(squad.command, [*words, *more])
    assert done.exit_code == 0, done.output
    collection = collect([tmp_path / "run"])  # as reports find it
    (run,) = collection.finished.values()
    assert (run.record.task, run.model.architecture) == (f"SQuAD-{version}", "tupe_r")
    assert run.record.scores[-1]["f1"] > 90, run.record.scores
    (summary,) = summarise(collection.finished).values()
    assert f"SQuAD-{version}" in summary
    predictions = json.loads((tmp_path / "run" / "predictions.json").read_text())
    questions = read_squad(file)
    assert all(predictions[question.id] in question.context for question in questions)
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model").model_max_length == 64
    again = CliRunner().invoke(squad.command, words)
    assert again.exit_code == 2 and "holds a run already" in again.output


@pytest.mark.parametrize("content, message", [
    ("{", "is not a SQuAD file: JSONDecodeError"), ('{"data": [{}]}', "is not a SQuAD file: KeyError 'paragraphs'"),
    ('{"data": [{"paragraphs": [{"context": "a cat", "qas": [{"id": "q7", "question": "?", "answers": '
     '[{"text": "cat", "answer_start": 0}]}]}]}]}', "question q7: 'cat' is not at 0"),
])  # fmt: skip
def test_bad_files_are_refused(content, message, tmp_path):
    (tmp_path / "f.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_squad(tmp_path / "f.json")
    with pytest.raises(ValueError, match="not found"):
        read_squad(tmp_path / "none.json")
