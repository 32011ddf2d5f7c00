"""A tokeniser of the library `tokenizers` through all that follows the corpus: pre-training, GLUE, SQuAD, minimal
pairs, the hub interface, the second engine's data, an export and the way back."""

import json

import helpers
import numpy as np
import pytest
import torch

from tupe.checkpoints import convert
from tupe.checkpoints.export import export
from tupe.corpus import glue as glue_data
from tupe.corpus.engine import prepare
from tupe.plugin import squad_data
from tupe.plugin.model import TupeModel
from tupe.text import TextEncoder
from tupe.training.data import read_symbols

SENTENCES = [
    "The dog's owner saw a café in Paris.",
    "A cat didn't like the river, and the dog barked.",
    "Nobody in town painted the river again.",
]


@pytest.fixture(scope="module", params=["bpe", "unigram", "wordpiece"])
def folder(request, tmp_path_factory):
    """data/ with text and ck/ with a tiny model after two updates."""
    folder = tmp_path_factory.mktemp(request.param)
    text = "\n\n".join(" ".join(f"{s} Number {i}." for s in SENTENCES) for i in range(40))
    (folder / "a.txt").write_text(text, encoding="utf-8")
    size = {"bpe": 300, "unigram": 60, "wordpiece": 100}[request.param]
    choices = {"tokenizer": request.param, "vocab_size": size, "valid_fraction": 0.1, "cased": True, "workers": 1}
    prepare([str(folder / "a.txt")], str(folder / "data"), **choices)
    helpers.train(
        helpers.pretrain_arguments(folder / "data", folder / "ck", "--max-update=2", "--tokens-per-sample=64")
    )
    return folder


def test_hub(folder):
    hub, text = (
        TupeModel.from_pretrained(folder / "ck", "checkpoint_last.pt", folder / "data"),
        TextEncoder(folder / "data"),
    )
    one, two = map(text.encode, SENTENCES[:2])
    assert hub.encode(*SENTENCES[:2]).tolist() == [0, *one, 2, 2, *two, 2]
    assert "".join(hub.decode(hub.encode(SENTENCES[2])).split()) == "".join(SENTENCES[2].split())
    filled = hub.fill_mask("Nobody in <mask> painted the river.", topk=2)
    assert len(filled) == 2 and all("river" in sentence for sentence, _, _ in filled)
    assert read_symbols(folder / "data") == text.symbols == hub.task.source_dictionary.symbols


def test_fine_tuning_data(folder, tmp_path):
    from fairseq.data import data_utils

    text = TextEncoder(folder / "data")
    list(glue_data.prepare(helpers.official_folder(tmp_path / "glue"), folder / "data", tmp_path / "bin", ["RTE"]))
    rows, _ = glue_data.read_split("RTE", "train", tmp_path / "glue" / "RTE" / "train.tsv")
    data = data_utils.load_indexed_dataset(str(tmp_path / "bin" / "RTE" / "input1" / "train"))
    assert [item.tolist() for item in data] == [[*text.encode(texts[1]), 2] for texts, _ in rows]
    helpers.squad_file(tmp_path / "squad", count=5)
    list(squad_data.prepare(tmp_path / "squad", folder / "data", tmp_path / "bin"))
    encoded = squad_data.Encoded.load(tmp_path / "bin", "dev", "1.1")
    for question in encoded.questions:
        answer, start = question.answers[0]
        ids, begins, ends = (part[question.context] for part in (encoded.ids, encoded.begins, encoded.ends))
        inside = (begins < start + len(answer)) & (ends > start)
        assert ids == text.encode(encoded.contexts[question.context])
        first, last = np.flatnonzero(inside)[[0, -1]]
        assert encoded.contexts[question.context][begins[first] : ends[last]].startswith(answer.split()[0])


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
    back = convert.convert(tmp_path / "out", "tupe", None, tmp_path / "back").parent
    assert TextEncoder(back).encode(SENTENCES[0]) == text.encode(SENTENCES[0])
