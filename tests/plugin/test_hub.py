"""`TupeModel.from_pretrained` on a checkpoint that was really trained on prepared text."""

import helpers
import pytest
import torch

from tupe.corpus.engine import prepare
from tupe.plugin.model import TupeModel
from tupe.text import TextEncoder

SENTENCES = [
    "The dog's owner saw http://example.org/x in the café.",
    "A cat didn't like the river, and the dog barked.",
    "Nobody in town painted the river again.",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """data/ with text and ck/ with a tiny model after two updates."""
    folder = tmp_path_factory.mktemp("hub")
    text = "\n\n".join(" ".join(f"{s} Number {i}." for s in SENTENCES) for i in range(40))
    (folder / "a.txt").write_text(text, encoding="utf-8")
    prepare([str(folder / "a.txt")], str(folder / "data"), vocab_size=150, valid_fraction=0.1)
    arguments = helpers.pretrain_arguments(folder / "data", folder / "ck", "--max-update=2")
    helpers.train(arguments)
    return folder


@pytest.fixture(scope="module")
def hub(folder):
    return TupeModel.from_pretrained(folder / "ck", "checkpoint_last.pt", folder / "data")


@pytest.mark.thorough
def test_encode_is_the_training_text(hub, folder):
    text = TextEncoder(folder / "data")
    one, two = (text.encode(s) for s in SENTENCES[:2])
    assert hub.encode(SENTENCES[0]).tolist() == [0, *one, 2]
    assert hub.encode(SENTENCES[0], SENTENCES[1]).tolist() == [0, *one, 2, 2, *two, 2]
    assert hub.decode(hub.encode(SENTENCES[2])) == "nobody in town painted the river again ."


def test_the_data_is_by_default_what_the_checkpoint_names_wherever_one_is(folder, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = TupeModel.from_pretrained(folder / "ck", "checkpoint_last.pt")
    assert loaded.encode(SENTENCES[0]).tolist() == hub.encode(SENTENCES[0]).tolist()
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


def test_features_and_hidden_states(hub):
    tokens = hub.encode(SENTENCES[0])
    features, hiddens = hub.extract_features(tokens), hub.extract_features(tokens, return_all_hiddens=True)
    assert features.shape == (1, len(tokens), 128) and len(hiddens) == 3
    assert torch.equal(hiddens[-1], features)
    assert torch.equal(features, hub.extract_features(tokens))  # evaluation mode: no dropout


def test_fill_mask(hub):
    filled = hub.fill_mask("Nobody in town painted the <mask> again.", topk=3)
    after_mr = hub.decode(hub.encode("Mr. Smith painted the river."))
    assert hub.fill_mask("Mr. <mask> painted the river.", topk=1)[0][0].split()[0] == after_mr.split()[0] == "mr."
    assert len(filled) == 3 and filled[0][1] >= filled[1][1] >= filled[2][1] > 0
    ids, river = hub.encode("Nobody in town painted the river again.").tolist(), hub.text.encode("river")
    place = next(i for i in range(len(ids)) if ids[i : i + len(river)] == river)
    ids[place : place + len(river)] = [hub.task.source_dictionary.index("<mask>")]
    with torch.no_grad():
        logits, _ = hub.model(torch.tensor([ids]))
    best = torch.softmax(logits[0, place], dim=-1).topk(3)
    assert [probability for _, probability, _ in filled] == pytest.approx(best.values.tolist())
    texts = [hub.decode(torch.tensor([*ids[:place], token, *ids[place + 1 :]])) for token in best.indices.tolist()]
    assert [text for text, _, _ in filled] == texts
    assert filled[0][0].startswith("nobody in town painted the")
    for wrong in ("no mask here", "<mask> and <mask>"):
        with pytest.raises(ValueError, match="exactly one <mask>"):
            hub.fill_mask(wrong)


def test_head_and_predict(hub):
    hub.register_classification_head("toy", num_classes=3)
    log_probabilities = hub.predict("toy", hub.encode(SENTENCES[0]))
    torch.testing.assert_close(log_probabilities.exp().sum(), torch.tensor(1.0))


def test_too_long(hub):
    limit = hub.model.max_positions()
    with pytest.raises(ValueError, match=f"{limit + 1} tokens exceeds the limit of {limit}"):
        hub.extract_features(torch.full((limit + 1,), 5))


def test_other_dictionary_is_refused(folder, tmp_path):
    texts = [f"Quite another text, the one of number {i}, is about many zebras." for i in range(60)]
    (tmp_path / "b.txt").write_text("\n\n".join(texts))
    prepare([str(tmp_path / "b.txt")], str(tmp_path / "data"), vocab_size=90, valid_fraction=0.1)
    with pytest.raises(ValueError, match="90 types.* 150"):
        TupeModel.from_pretrained(folder / "ck", "checkpoint_last.pt", tmp_path / "data")
