"""The settings in a checkpoint's state dict: what is refused, and what an older checkpoint may lack."""

import re

import pytest
import torch

from tupe.encoder import Encoder
from tupe.plugin.model import EncoderWithSettings, unpack_settings
from tupe.schemes import SCHEMES


def encoder(position, kind=EncoderWithSettings, **options):
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 16, "ffn": 32, "heads": 2, "max_positions": 16}
    return kind(40, 1, position=position, **sizes, dropout=0.0, attention_dropout=0.0, **options).double()


@pytest.mark.parametrize("position", [name for name in SCHEMES if name != "window"])
def test_another_position_is_a_contradiction(position):
    model = encoder(position)
    encoder(position).load_state_dict(model.state_dict())
    other = "alibi" if position != "alibi" else "rope"  # neither has parameters
    with pytest.raises((ValueError, RuntimeError), match="position=" + re.escape(position)):
        encoder(other).load_state_dict(model.state_dict(), strict=False)


def test_another_option_is_a_contradiction():
    """Neither has parameters whose shapes could tell."""
    with pytest.raises(ValueError, match="trained with position=rope:base:500 .*; this model has position=rope "):
        encoder("rope").load_state_dict(encoder("rope:base:500").state_dict())


@pytest.mark.parametrize("typed", ["rope:base:1e4", "absolute:std:0.0600", "t5:max_distance:256:buckets:64+urpe:layer"])
def test_the_settings_have_the_one_spelling(typed):
    model = encoder(typed)
    assert unpack_settings(model.get_extra_state())["position"] == model.config.position


def test_they_are_all_that_is_added_to_an_encoder():
    """The same numbers, parameters in the same order, and one more key."""
    options = {"segments": "learned", "separator": 2}
    ours, plain = (encoder("absolute+t5", kind, **options) for kind in (EncoderWithSettings, Encoder))
    theirs = plain.state_dict()
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(torch.equal(value, theirs[key]) for key, value in ours.state_dict().items() if key in theirs)
    assert ours.state_dict().keys() - theirs.keys() == {"_extra_state"}
    assert [name for name, _ in plain.named_children()] == ["tokens", "positions", "segments", "embed_norm", "layers"]


def test_epsilon_is_among_the_settings():
    old = encoder("t5", layer_norm_eps=1e-12)
    with pytest.raises(ValueError, match="layer_norm_eps=1e-12; this model has .*layer_norm_eps=1e-5"):
        encoder("t5").load_state_dict(old.state_dict())
