"""SQuAD: official scores on hand-made cases, the span head, and a model that learns to find answers."""

import json
import os
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.distributed import ModuleProxyWrapper
from helpers import make_vocabulary, squad_file, train_recipe

from tupe.checkpoints import convert
from tupe.checkpoints import files as checkpoints
from tupe.common.record import read
from tupe.common.squad import best_over_golds, constant_scores, exact_match, f1, normalise_answer, official_scores
from tupe.normaliser import Normaliser
from tupe.plugin.squad import ANSWER_PIECES, SquadCriterion, best_spans
from tupe.plugin.squad_data import prepare, read_squad

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


# --------------------------------------------------------------------------------------------------------- the model


def test_best_spans_is_the_naive_search():
    torch.manual_seed(0)
    length = ANSWER_PIECES + 12
    start, end = torch.randn(2, 3, length)
    inside = torch.zeros(3, length, dtype=torch.bool)
    for row, last in enumerate((length - 1, 30, 9)):
        inside[row, 8:last] = True
    allowed = inside.clone()
    allowed[:, 0] = True
    start, end = (x.masked_fill(~allowed, float("-inf")) for x in (start, end))
    starts = inside.clone()
    starts[0, 8:15] = False
    end[0, -3] = 50.0  # out of reach for the earliest starts
    searched = best_spans(start, end, starts)
    for row in range(3):
        spans = [
            (float(start[row, i] + end[row, j]), i, j)
            for i in range(length)
            for j in range(i, min(i + ANSWER_PIECES, length))
            if starts[row, i] and inside[row, j]
        ]
        best = max(spans)
        assert searched[row][:3] == (pytest.approx(best[0]), best[1], best[2])
        assert searched[row][3] == pytest.approx(float(start[row, 0] + end[row, 0]))
    nothing = best_spans(start, end, torch.zeros_like(starts))
    assert [row[1:3] for row in nothing] == [(0, 0)] * 3


def test_the_span_head_is_trained_on_several_gpus(tmp_path):
    """DistributedDataParallel (one process is enough) leaves all parameters the gradients they have without it."""
    words = Dictionary()
    for word in "abcdef":
        words.add_symbol(word)
    words.add_symbol("<mask>")
    sizes = {"encoder_layers": 1, "encoder_embed_dim": 8, "encoder_ffn_embed_dim": 8, "encoder_attention_heads": 2}
    options = {"max_positions": 8, "dropout": 0.0, "attention_dropout": 0.0, **sizes}
    model = convert.build_model(checkpoints.configuration("tupe_r", options, "squad", "squad"), words)
    model.register_span_head()
    inside = torch.zeros(2, 8, dtype=torch.bool)
    inside[:, 3:7] = True
    sample = {
        "net_input": {"src_tokens": torch.tensor([[0, 4, 2, 5, 6, 7, 8, 2]] * 2), "src_lengths": None},
        "starts": inside, "inside": inside, "target": torch.tensor([[3, 5], [0, 0]]), "ntokens": 16,
    }  # fmt: skip

    def gradients(called):
        updates = []
        for _ in range(2):  # an update that is left unfinished shows in the next one
            model.zero_grad()
            SquadCriterion(None)(called, sample)[0].backward()
            updates.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return updates

    alone = gradients(model)
    assert alone[0]["span_head.weight"].any() and not any(name.startswith("lm_head.") for name in alone[0])
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        together = gradients(ModuleProxyWrapper(ddp))
    finally:
        torch.distributed.destroy_process_group()
    for one, other in zip(alone, together, strict=True):
        for name, grad in one.items():
            torch.testing.assert_close(other[name], grad)


def run(data, checkpoint, save_dir, version, *more):
    return train_recipe(
        "squad", f"task.data={data}", f"task.squad_version='{version}'",
        f"checkpoint.finetune_from_model={checkpoint}", f"checkpoint.save_dir={save_dir}", "checkpoint.no_save=true",
        "dataset.num_workers=0", "dataset.batch_size=16", "model.dropout=0", "model.attention_dropout=0", *more,
    )  # fmt: skip


def epochs(count):
    return f"optimization.max_epoch={count}", f"dataset.validate_interval={count}", "optimization.lr=[0.002]"


@pytest.fixture(scope="session")
def longer(vocabulary, tmp_path_factory):
    """A pre-trained model of 64 positions."""
    return pretrain(vocabulary, tmp_path_factory.mktemp("longer"), 64)


def pretrain(data, folder, positions):
    train_recipe(
        "pretrain", "model._name=tupe_r_tiny", f"task.data={data}", f"task.tokens_per_sample={positions}",
        "dataset.batch_size=4", "optimization.max_update=2", "optimization.update_freq=[1]",
        f"checkpoint.save_dir={folder}",
    )  # fmt: skip
    return folder / "checkpoint_last.pt"


@pytest.mark.parametrize(
    "version, count, impossible",
    [
        ("2.0", 16, 5), pytest.param("2.0", 50, 15, marks=pytest.mark.slow),
        pytest.param("1.1", 50, 0, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.thorough
def test_a_tiny_model_overfits_its_questions(version, count, impossible, vocabulary, longer, tmp_path):
    """Guards the offsets: answers are scored on the original characters, paragraphs are longer than the model."""
    file = squad_file(tmp_path / "squad", version, count, impossible)
    list(prepare(tmp_path / "squad", vocabulary, tmp_path / "bin"))
    run(tmp_path / "bin", longer, tmp_path / "run", version, *epochs(25))
    result = read(tmp_path / "run")
    assert (result.task, result.metrics, result.state) == (f"SQuAD-{version}", ["f1", "exact"], "finished")
    assert result.scores[-1]["f1"] > 90
    predictions = json.loads((tmp_path / "run" / "predictions" / "valid_last.json").read_text())
    contexts, questions = read_squad(file)
    golds = {question.id: [text for text, _ in question.answers] for question in questions}
    assert official_scores(predictions, golds)["f1"] == pytest.approx(result.scores[-1]["f1"])
    assert json.loads((tmp_path / "run" / "predictions" / "valid_golds.json").read_text()) == golds
    assert constant_scores(golds, version)["exact"] >= 100 * impossible / len(golds)
    for question in questions:
        assert predictions[question.id] in contexts[question.context]
    no_answer = tmp_path / "run" / "predictions" / "valid_last_no_answer.json"
    assert no_answer.exists() == (version == "2.0")


@pytest.mark.slow
@pytest.mark.skipif("SQUAD" not in os.environ, reason="SQUAD=folder of the official v2.0 files, not ours to ship")
def test_a_tiny_model_overfits_fifty_real_questions(tmp_path):
    data = json.loads((Path(os.environ["SQUAD"]) / "train-v2.0.json").read_text())["data"]
    paragraphs, count, lines, normaliser = [], 0, [], Normaliser()
    for paragraph in (p for article in data for p in article["paragraphs"]):
        lines += map(normaliser.normalise, (paragraph["context"], *(entry["question"] for entry in paragraph["qas"])))
        qas = [entry for entry in paragraph["qas"] if not entry["is_impossible"]][: min(5, 50 - count)]
        count += len(qas)
        paragraphs += [{**paragraph, "qas": qas}] if qas else []
    assert count == 50
    for split in ("train", "dev"):
        (tmp_path / f"{split}-v1.1.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    (tmp_path / "data").mkdir()
    vocabulary = make_vocabulary(tmp_path / "data", lines, 2000)
    checkpoint = pretrain(vocabulary, tmp_path / "pretrained", 128)
    list(prepare(tmp_path, vocabulary, tmp_path / "bin"))
    run(tmp_path / "bin", checkpoint, tmp_path / "run", "1.1", *epochs(40))
    assert read(tmp_path / "run").scores[-1]["f1"] > 90
