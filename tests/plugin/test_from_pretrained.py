"""`TupeModel.from_pretrained` on a checkpoint that was really trained on prepared text."""

import helpers
import pytest
import torch

from tupe.corpus.engine import prepare
from tupe.plugin.model import TupeModel
from tupe.text import TextEncoder

SENTENCE = "Nobody in town painted the river again."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """data/ with text and ck/ with a tiny model after two updates."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "a.txt").write_text("\n\n".join(f"{SENTENCE} A cat didn't like number {i}." for i in range(40)))
    prepare([str(folder / "a.txt")], str(folder / "data"), vocab_size=100, valid_fraction=0.1)
    helpers.train(helpers.pretrain_arguments(folder / "data", folder / "ck", "--max-update=2"))
    return folder


def test_the_data_is_by_default_what_the_checkpoint_names_wherever_one_is(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = TupeModel.from_pretrained(folder / "ck", "checkpoint_last.pt")
    assert loaded.dictionary.symbols == TextEncoder(folder / "data").symbols
    (tmp_path / "ck").mkdir()
    state = helpers.load(folder / "ck/checkpoint_last.pt")
    assert state["cfg"]["task"]["data"] == str(folder / "data")
    state["cfg"]["task"]["data"] = str(tmp_path / "gone")
    torch.save(state, tmp_path / "ck/checkpoint_last.pt")
    with pytest.raises(ValueError, match="gone holds no dict.txt; give .* as data_name_or_path"):
        TupeModel.from_pretrained(tmp_path / "ck", "checkpoint_last.pt")
    with pytest.raises(ValueError, match="checkpoint not found: .*model.pt; in that folder: checkpoint_last.pt"):
        TupeModel.from_pretrained(tmp_path / "ck", "model.pt")
    with pytest.raises(ValueError, match="checkpoint not found: .*nowhere"):
        TupeModel.from_pretrained(tmp_path / "nowhere")


@torch.no_grad()
def test_it_is_the_model_in_evaluation_mode(folder):
    model = TupeModel.from_pretrained(folder / "ck", "checkpoint_last.pt", folder / "data")
    tokens = torch.tensor([[0, *TextEncoder(folder / "data").encode(SENTENCE), 2]])
    features, extra = model(tokens, features_only=True, return_all_hiddens=True)
    assert features.shape == (1, tokens.size(1), 128) and len(extra["inner_states"]) == 3
    assert torch.equal(features, model(tokens, features_only=True)[0])  # no dropout
    limit = model.max_positions()
    with pytest.raises(ValueError, match=f"{limit + 1} tokens exceeds the limit of {limit}"):
        model(torch.full((1, limit + 1), 5))


def test_other_dictionary_is_refused(folder, tmp_path):
    texts = [f"Quite another text, the one of number {i}, is about many zebras." for i in range(60)]
    (tmp_path / "b.txt").write_text("\n\n".join(texts))
    prepare([str(tmp_path / "b.txt")], str(tmp_path / "data"), vocab_size=90, valid_fraction=0.1)
    with pytest.raises(ValueError, match="the dictionary is not the checkpoint's"):
        TupeModel.from_pretrained(folder / "ck", "checkpoint_last.pt", tmp_path / "data")
