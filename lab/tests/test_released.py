"""The models in models/: small, loadable, the same in transformers and as a checkpoint of ours."""

from pathlib import Path

import pytest
import torch

from tupe.checkpoints.convert import convert
from tupe.evaluate.loading import load_model

transformers = pytest.importorskip("transformers")

from tupe.modeling_tupe import TupeForMaskedLM  # noqa: E402  (needs transformers)
from tupe.tokenization_tupe import TupeTokenizer  # noqa: E402

FOLDERS = sorted((Path(__file__).resolve().parents[2] / "models").iterdir())
pytestmark = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def test_they_are_small_and_compute_what_fairseqs_model_computes_from_their_weights(folder, tmp_path):
    assert sum(path.stat().st_size for path in folder.iterdir()) < 12e6 and not list(folder.glob("*.py"))
    theirs = TupeForMaskedLM.from_pretrained(folder).eval()
    convert(folder, "tupe", None, tmp_path)
    ours, _ = load_model(tmp_path / "checkpoint.pt", tmp_path)
    ids = torch.randint(5, 8000, (3, 40), generator=torch.Generator().manual_seed(1))
    ids[:, 0], ids[:, -1] = 0, 2
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids)[0], rtol=0, atol=1e-4)


def test_they_fill_a_mask(folder):
    parts = {"model": TupeForMaskedLM.from_pretrained(folder), "tokenizer": TupeTokenizer.from_pretrained(folder)}
    fill = transformers.pipeline("fill-mask", **parts)
    assert "window" in {answer["token_str"].strip("▁ ") for answer in fill("she looked out of the <mask> .")}
