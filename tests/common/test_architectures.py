"""The names of architectures, and what becomes of them where a position is given."""

import pytest

from tupe.common.architectures import ARCHITECTURES, ELECTRA, OTHER_BLOCKS, named, names, preset
from tupe.encoder import Encoder, ModelConfig
from tupe.names import cls_beside
from tupe.positions import Dims, Positions
from tupe.schemes import SCHEMES


@pytest.mark.parametrize("arch", [*ARCHITECTURES, *OTHER_BLOCKS, *ELECTRA])
def test_every_scheme_may_replace_the_position_of_every_architecture(arch):
    """Alone, without a word on [CLS], which stays untied beside TUPE's positions alone."""
    own = ModelConfig(**preset(arch))
    assert own.cls == {**ARCHITECTURES, **ELECTRA}.get(arch, (None, "tied"))[1]
    for position in [*SCHEMES, "untied+t5", "absolute+untied"]:
        config = ModelConfig(**{**preset(arch), "position": position})
        assert config.cls == (own.cls if "untied" in position.split("+") else "tied")
        assert Positions(config.position, Dims(8, 8, 2, 1, 4, 4), config.cls).cls == config.cls


def test_an_encoder_of_an_architecture_takes_another_position():
    config = ModelConfig(**preset("tupe_r_tiny"))
    for position, cls in {"rope": "tied", "alibi": "tied", "untied:norm:False": "untied"}.items():
        assert Encoder(9, 1, config=config, position=position).config.cls == cls
    assert Encoder(9, 1, config=config, position="alibi", cls="untied").config.cls == "untied"
    assert Encoder(9, 1, position="alibi", cls="untied").config.cls == "untied"
    assert Encoder(9, 1, config=config).config == config


def test_the_name_says_what_the_model_is():
    assert named("tupe_r_mini", "alibi", "tied") == "bert_a_mini"
    assert named("tupe_a", "absolute+t5", "tied") == "bert_r" and named("tupe_a", "absolute_d", "tied") == "bert_a_d"
    assert named("electra_tupe_r", "rope", "tied") == "electra_a"
    for kept in (("tupe_r", "untied+clipped", "untied"), ("tupe_r", "untied+t5", "tied"), ("bert_r", "rope", "tied")):
        assert named(*kept) == kept[0]  # the rest is said beside the name
    assert named("modernbert", "alibi", "tied") == "modernbert" and named("", "alibi", "tied") == ""


def test_a_scheme_is_known_by_its_whole_name():
    assert cls_beside("t5+untied:norm:False") == "untied" and cls_beside("absolute+untied", "zero") == "zero"
    assert cls_beside("untied_of_mine") == cls_beside("t5:untied:True") == "tied"


def test_an_unknown_architecture_gets_the_nearest():
    with pytest.raises(ValueError, match="unknown architecture 'TUPE_R_mni'; did you mean 'tupe_r_mini'"):
        preset("TUPE_R_mni")
    with pytest.raises(ValueError, match="unknown architecture 'xyzzy'; valid: bert_a, .*_tiny"):
        preset("xyzzy")
    assert len(names()) == len(set(names())) and all(preset(name) for name in names())
