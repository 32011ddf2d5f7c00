"""Models as users name them, and the text they are shown."""

import pytest
import torch

from tupe.evaluation.loading import file_names, labelled, load_model, text_block


def test_labels(tmp_path):
    (tmp_path / "a=b.pt").touch()
    assert labelled(["x=a.pt", "b.pt", f"{tmp_path}/a=b.pt"]) == {
        "x": "a.pt", "b.pt": "b.pt", f"{tmp_path}/a=b.pt": f"{tmp_path}/a=b.pt"
    }  # fmt: skip
    with pytest.raises(ValueError, match="x stands for both a.pt and b.pt"):
        labelled(["x=a.pt", "x=b.pt"])


def test_files_are_named_after_labels():
    assert file_names(["a/b", "c"]) == {"a/b": "a_b", "c": "c"}
    with pytest.raises(ValueError, match="a/b and a_b would both be kept as a_b"):
        file_names(["a/b", "a_b"])


def test_text_block(pretrained, vocabulary):
    _, task = load_model(pretrained, vocabulary)
    tokens = text_block(task, 24)
    assert len(tokens) == 24 and tokens[0] == task.source_dictionary.bos()
    assert torch.equal(text_block(task, 10), tokens[:10])
    with pytest.raises(ValueError, match="no test split"):
        text_block(task, 24, split="test")
