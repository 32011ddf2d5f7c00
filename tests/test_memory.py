"""The memory count against a real step on the CPU, and against what the Large recipe promises."""

from unittest import mock

import pytest
import torch
from fairseq_runs import CONFIGS
from omegaconf import OmegaConf

from tupe import attention, memory
from tupe.compat import compose
from tupe.encoder import Encoder

GIB = 2**30


@pytest.mark.parametrize("position", ["untied+t5", "absolute"])
def test_what_a_real_forward_keeps(position):
    """The same layers with data: autograd keeps exactly as many bytes as on the meta device."""

    def build():
        cls = "untied" if "untied" in position else "tied"
        sizes = {"layers": 2, "width": 64, "ffn": 128, "heads": 4, "max_positions": 32}
        return Encoder(100, 1, position=position, cls=cls, attention="sdpa", **sizes).train()

    def count(encoder, tokens):
        x, outside = memory.kept(encoder, lambda: encoder.embed(tokens))
        terms, of_bias = memory.kept(encoder, lambda: encoder.terms(tokens, "sdpa", padded=False))
        _, inside = memory.kept(encoder, lambda: encoder.layers[0](x, encoder.positions, terms[0], 0))
        return outside, of_bias, inside

    with mock.patch.dict(attention.PATHS, {"sdpa": memory.fused}):
        real = count(build(), torch.full((3, 32), 5))
    with torch.device("meta"):
        encoder, tokens = build(), torch.zeros(3, 32, dtype=torch.long)
    with memory.counting():
        assert count(encoder, tokens) == real
    assert real[2] > 4 * 4 * 3 * 32 * 64  # q, k, v and attention's output at the least


def test_growth():
    one, two = (memory.step_bytes("tupe_r_tiny", batch, 64, vocabulary=100) for batch in (4, 8))
    assert one["state"] == two["state"] == 20 * one["parameters"]
    assert two["activations"] < 2 * one["activations"] < 2.2 * two["activations"]  # all but the shared bias
    again = memory.step_bytes("tupe_r_tiny", 8, 64, vocabulary=100, checkpoint_activations=True)
    assert again["activations"] < two["activations"] / 3 and again["transient"] > two["transient"]
    with pytest.raises(ValueError, match="unknown architecture 'tupe_x'"):
        memory.step_bytes("tupe_x", 1, 64)


def test_the_large_recipe_fits_the_cards_it_names():
    def total(batch, **options):
        sizes = memory.step_bytes("tupe_r_large", batch, 512, **options)
        return sum(sizes[part] for part in ("state", "activations", "transient")) / GIB

    recipe = compose(CONFIGS, "pretrain_large")
    assert recipe.dataset.batch_size * recipe.optimization.update_freq[0] == 256
    text = (CONFIGS / "pretrain_large.yaml").read_text()
    for batch, options in ((recipe.dataset.batch_size, {}), (32, {"checkpoint_activations": True})):
        assert f"{total(batch, **options):.1f} GiB" in text and total(batch, **options) < 16 - 1.5
    assert f"{total(32):.1f} GiB" in text and 16 < total(32) < 32 - 1.5


def test_large_differs_from_base_in_size_and_batch_split_only():
    names = ("pretrain_large", "pretrain")
    large, base = (OmegaConf.to_container(compose(CONFIGS, name), resolve=False) for name in names)
    assert large["model"]["_name"] == "tupe_r_large" and base["model"]["_name"] == "tupe_r"
    for config in (large, base):
        del config["model"]["_name"], config["dataset"]["batch_size"], config["optimization"]["update_freq"]
    assert large == base
