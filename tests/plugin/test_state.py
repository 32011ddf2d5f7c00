"""The settings in a checkpoint's state dict: what is refused, and what an older checkpoint may lack."""

import re

import pytest
import torch
from helpers import scramble

from tupe.encoder import Encoder
from tupe.plugin.state import EncoderWithSettings, unpack_settings
from tupe.positions import beyond_training
from tupe.schemes import SCHEMES


def encoder(position, kind=EncoderWithSettings, **options):
    torch.manual_seed(0)
    sizes = {"layers": 2, "width": 16, "ffn": 32, "heads": 2, "max_positions": 16}
    return kind(40, 1, position=position, **sizes, dropout=0.0, attention_dropout=0.0, **options).double()


def tokens():
    return torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))


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


@pytest.fixture
def shuffled():
    """A function that puts the classes of schemes into another order, as when they change places in a file."""
    order = dict(SCHEMES)

    def shuffle():
        for name in list(SCHEMES)[::-1]:
            SCHEMES[name] = SCHEMES.pop(name)

    yield shuffle
    SCHEMES.clear()
    SCHEMES.update(order)


@pytest.mark.parametrize("position", ["untied+t5", "t5:max_distance:20+alibi:learned:True:layer+kerple", "rope+window"])
def test_the_order_of_the_registry_is_no_contradiction(position, shuffled):
    old = scramble(encoder(position))
    shuffled()
    new = encoder(position)
    assert new.config.position != old.config.position
    new.load_state_dict(old.state_dict())
    torch.testing.assert_close(new(tokens())[0], old(tokens())[0])
    # optimizers count parameters, so these keep the order in which a checkpoint has them, and so does the next one
    assert [name for name, _ in new.named_parameters()] == [name for name, _ in old.named_parameters()]
    assert torch.equal(new.get_extra_state(), old.get_extra_state())
    assert beyond_training(new.positions, 16)
    with pytest.raises(ValueError, match="the checkpoint was trained with position="):
        encoder(position + "+urpe").load_state_dict(old.state_dict())


def test_epsilon_is_among_the_settings():
    old = encoder("t5", layer_norm_eps=1e-12)
    with pytest.raises(ValueError, match="layer_norm_eps=1e-12; this model has .*layer_norm_eps=1e-5"):
        encoder("t5").load_state_dict(old.state_dict())
