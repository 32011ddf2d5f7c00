"""A tokeniser of the library `tokenizers` through all that follows the corpus: pre-training, GLUE, minimal pairs, the
second engine's data, an export and the way back."""

import csv
import json

import helpers
import pytest
import torch
from click.testing import CliRunner
from corpus.test_tokenizers import theirs

from tupe.checkpoints.export import export
from tupe.checkpoints.trained import read_model
from tupe.cli import main
from tupe.corpus.engine import prepare
from tupe.data.splits import read_symbols
from tupe.plugin.pretrained import load_dictionary
from tupe.text import TextEncoder

SENTENCES = [
    "The dog's owner saw a café in Paris.",
    "A cat didn't like the river, and the dog barked.",
    "Nobody in town painted the river again.",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """data/ with text and ck/ with a tiny model after two updates."""
    folder = tmp_path_factory.mktemp("tokenizer")
    theirs("bpe", folder / "theirs")
    text = "\n\n".join(" ".join(f"{s} Number {i}." for s in SENTENCES) for i in range(40))
    (folder / "a.txt").write_text(text, encoding="utf-8")
    choices = {"tokenizer": str(folder / "theirs"), "valid_fraction": 0.5, "workers": 1}
    prepare([str(folder / "a.txt")], str(folder / "data"), **choices)
    helpers.train(
        helpers.pretrain_arguments(folder / "data", folder / "ck", "--max-update=2", "--tokens-per-sample=64")
    )
    return folder


def test_every_reader_has_the_same_symbols(folder):
    text = TextEncoder(folder / "data")
    assert read_symbols(folder / "data") == text.symbols == load_dictionary(folder / "data" / "dict.txt").symbols
    assert "".join(text.decode(text.encode(SENTENCES[2])).split()) == "".join(SENTENCES[2].split())


def test_minimal_pairs_and_order(folder, tmp_path):
    """Words are those of the tokeniser; both commands give what the model gives."""
    bad, good = "Painted in town nobody the river again.", "Nobody in town painted the river again."
    pairs = [{"sentence_good": good, "sentence_bad": bad}, {"sentence_good": "A cat.", "sentence_bad": "A dog."}]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    checkpoint, text = folder / "ck" / "checkpoint_last.pt", TextEncoder(folder / "data")

    def run(*words):
        done = CliRunner().invoke(main, [*map(str, words), "--output", str(tmp_path / words[0])])
        assert done.exit_code == 0, done.output
        return done

    assert "accuracy" in run("minimal-pairs", checkpoint, "--pairs", tmp_path / "pairs.jsonl").output
    scores = list(csv.DictReader((tmp_path / "minimal-pairs" / "pairs.csv").open()))
    model = read_model(checkpoint).model().eval()
    single = []
    for sentence in (good, bad):
        ids = torch.tensor([0, *text.encode(sentence), 2])
        rows = ids.repeat(len(ids) - 2, 1)
        rows[range(len(rows)), range(1, len(ids) - 1)] = len(text) - 1
        with torch.no_grad():
            log_p = model(rows).logits.float().log_softmax(-1)
        single.append(log_p[range(len(rows)), range(1, len(ids) - 1), ids[1:-1]].sum().item())
    assert float(scores[0]["single"]) == pytest.approx(single[0] - single[1], abs=1e-3)
    for sentence in (good, bad):
        words = [[text.symbols[i].strip("\u2581\u0120").removeprefix("##") for i in w] for w in text.word_ids(sentence)]
        assert len(words) in (7, 8) and "".join(map("".join, words)) == "".join(sentence.split())
    run("order", checkpoint, "--sentences=10", "--tokens=300")
    (content,) = json.loads((tmp_path / "order" / "order.json").read_text()).values()
    assert content["order"]["sentences"] == 10 and 0 <= content["order"]["accuracy"] <= 1


def test_export_and_back(folder, tmp_path):
    """A fast tokeniser that needs no code of ours, with the ids of training."""
    from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

    import tupe.hf  # noqa: F401

    text = TextEncoder(folder / "data")
    export(folder / "ck" / "checkpoint_last.pt", tmp_path / "out", folder / "data")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert isinstance(tokenizer, PreTrainedTokenizerFast) and not type(tokenizer).__module__.startswith("tupe")
    assert len(tokenizer) == len(text) and (tokenizer.pad_token_id, tokenizer.mask_token_id) == (1, len(text) - 1)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    for row, sentence in zip(batch["input_ids"].tolist(), SENTENCES, strict=True):
        assert [i for i in row if i != 1] == [0, *text.encode(sentence), 2]
    with torch.no_grad():
        logits = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")(**batch).logits
    assert logits.shape[-1] == len(text)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["pipeline"] == "tokenizers" and "settings" not in manifest
    card = (tmp_path / "out" / "README.md").read_text()
    assert "language: en" in card and "words and signs; " in card and "lower-cased" not in card
    assert TextEncoder(tmp_path / "out").encode(SENTENCES[0]) == text.encode(SENTENCES[0])
