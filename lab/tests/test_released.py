"""The models in models/: small, loadable, the same in transformers and as a checkpoint of ours."""

from pathlib import Path

import pytest
import torch

from tupe.evaluate.loading import load_model

transformers = pytest.importorskip("transformers")

from tupe.modeling_tupe import TupeForMaskedLM  # noqa: E402  (needs transformers)
from tupe.tokenization_tupe import TupeTokenizer  # noqa: E402

FOLDERS = sorted((Path(__file__).resolve().parents[2] / "models").iterdir())
pytestmark = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def test_they_are_small_and_the_same_as_read_by_commands(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) < 12e6 and not list(folder.glob("*.py"))
    theirs = TupeForMaskedLM.from_pretrained(folder).eval()
    ours, _ = load_model(folder)
    ids = torch.randint(5, 8000, (3, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(theirs(ids).logits, ours(ids).logits)


def test_they_fill_a_mask(folder):
    parts = {"model": TupeForMaskedLM.from_pretrained(folder), "tokenizer": TupeTokenizer.from_pretrained(folder)}
    fill = transformers.pipeline("fill-mask", **parts)
    assert "window" in {answer["token_str"].strip("▁ ") for answer in fill("she looked out of the <mask> .")}
