"""Models as users name them, and the text they are shown."""

import pytest
import torch

from tupe.evaluation.loading import file_names, labelled, load_model, text_block


def test_labels(tmp_path, monkeypatch):
    """Folders of Hydra's sweeps have "=" and "," in their names; labels may have "=" too."""
    monkeypatch.chdir(tmp_path)
    hydra = "o/lr=1,seed=2/checkpoint_last.pt"
    (tmp_path / hydra).parent.mkdir(parents=True)
    for name in ("a.pt", "a=b.pt", "=.pt", hydra):
        (tmp_path / name).touch()
    for source, label, path in (
        ("x=a.pt", "x", "a.pt"), ("a.pt", "a.pt", "a.pt"), ("a=b.pt", "a=b.pt", "a=b.pt"), ("x=a=b.pt", "x", "a=b.pt"),
        (hydra, hydra, hydra), (f"x={hydra}", "x", hydra), (f"lr=1={hydra}", "lr=1", hydra), ("=.pt", "=.pt", "=.pt"),
        (f"x={tmp_path}/{hydra}", "x", f"{tmp_path}/{hydra}"),
    ):  # fmt: skip
        assert labelled([source]) == {label: path}
    with pytest.raises(ValueError, match="x stands for both a.pt and a=b.pt"):
        labelled(["x=a.pt", "x=a=b.pt"])
    for missing in ("x=b.pt", "b.pt", "o/lr=1,seed=3/checkpoint_last.pt", "=a.pt", "x=", ""):
        with pytest.raises(ValueError, match=f"^{missing} not found"):
            labelled([missing])


def test_files_are_named_after_labels():
    assert file_names(["a/b", "c"]) == {"a/b": "a_b", "c": "c"}
    with pytest.raises(ValueError, match="a/b and a_b would both be kept as a_b"):
        file_names(["a/b", "a_b"])


def test_text_block(pretrained, vocabulary):
    _, task = load_model(pretrained, vocabulary)
    tokens = text_block(task, 24)
    assert len(tokens) == 24 and tokens[0] == task.source_dictionary.bos()
    assert torch.equal(text_block(task, 10), tokens[:10])
    with pytest.raises(ValueError, match="has no split 'test'"):
        text_block(task, 24, split="test")
