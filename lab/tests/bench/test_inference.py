"""The benchmark on real lengths: what it draws, that contenders compute what they are said to, and the command."""

import json

import pytest
import torch
from click.testing import CliRunner
from fairseq.data import data_utils

from lab.bench import inference
from lab.bench.contenders import PAD, Setting

TINY = Setting("tiny", length=64, vocab=60)


@pytest.fixture(scope="module")
def texts(learnable):
    return inference.texts(learnable, "mnli")


def test_texts(texts, learnable):
    pairs = [data_utils.load_indexed_dataset(str(learnable / "MNLI" / f"input{i}" / "valid")) for i in (0, 1)]
    expected = [len(a) + len(b) + 2 for a, b in zip(*pairs, strict=True)]  # each ends in </s>; <s> and a second </s>
    assert texts.sizes.tolist() == expected
    with pytest.raises(ValueError, match="holds no RTE; `tupe prepare glue` writes it"):
        inference.texts(learnable, "RTE")


def test_batches(texts):
    first, second = inference.batches(texts, 32, 2, "cpu")
    assert first.tokens.shape != second.tokens.shape or not torch.equal(first.tokens, second.tokens)
    known = {tuple(map(int, texts[1, i][1])) for i in range(len(texts))}
    for batch in (first, second):
        rows = [tokens[real] for tokens, real in zip(batch.tokens, batch.real, strict=True)]
        assert len(rows) == 32 and {tuple(row.tolist()) for row in rows} <= known
        assert batch.tokens.size(1) == max(map(len, rows)) and batch.count == sum(map(len, rows))
        assert torch.equal(batch.tokens.ne(PAD), batch.real)
    (repeated, _) = inference.batches(texts, 32, 2, "cpu")
    assert torch.equal(repeated.tokens, first.tokens)


@pytest.mark.parametrize("name", ["tupe_r", "fairseq", "export", "hf", "hf-eager", "modernbert"])
def test_contenders_ignore_padding(name):
    if name not in ("tupe_r", "fairseq"):
        pytest.importorskip("transformers")
    tokens = torch.randint(5, 60, (3, 30))
    tokens[:, 0], tokens[1, 9:] = 0, PAD
    real = tokens.ne(PAD)
    logits = inference.classifier(name, TINY)
    with torch.no_grad():
        whole = logits(inference.Batch(tokens, real, int(real.sum())))
        alone = logits(inference.Batch(tokens[1:2, :9], real[1:2, :9], 9))
        assert whole.shape == (3, 2)
        torch.testing.assert_close(alone[0], whole[1], rtol=1e-4, atol=1e-5)


def test_what_follows_from_times(texts):
    drawn = inference.batches(texts, 4, 3, "cpu")
    count, entries = (sum(f(batch) for batch in drawn) for f in (lambda b: b.count, lambda b: b.tokens.numel()))
    found = inference.quantities({"steps": [[1.0], [2.0], [4.0]]}, drawn)
    assert found == {"texts_per_s": 12 / 7, "tokens_per_s": count / 7, "padding": 1 - count / entries}


def test_command(learnable, tmp_path):
    words = [f"--data={learnable}", "--tasks=CoLA", "--size=tiny", "--turns=1", "--batch=4", "--device=cpu"]
    words += ["--models=tupe_r,fairseq", "--precision=float32,bf16", f"--output={tmp_path}/out"]
    result = CliRunner().invoke(inference.command, words)
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["setting"], row["contender"]) for row in rows] == [
        (f"tiny, CoLA, batch 4, {kind}", name) for kind in ("float32", "bf16") for name in ("tupe_r", "fairseq")
    ]
    assert (tmp_path / "out.md").read_text() + "\n" == result.stdout
