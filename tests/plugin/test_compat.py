"""What differs from torch and fairseq as they are."""

from types import SimpleNamespace

import pytest
import torch
from fairseq import utils
from fairseq.models.ema.ema import EMA
from helpers import build

from tupe.plugin import compat


@pytest.mark.parametrize("samples, kept", [([1, {}], [1]), ([1, 2], [1, 2]), ([{}, {}], [{}]), ([None], [None])])
def test_empty_batches_are_left_out_unless_there_is_no_other(samples, kept):
    seen = []
    compat._train_step(None, samples, original=lambda trainer, given: seen.append(given))
    assert seen == [kept]


def test_the_mean_of_weights_along_training_copies_integers():
    model = build("tupe_r_tiny")
    config = SimpleNamespace(
        ema_decay=0.5, ema_start_update=0, ema_seed_model=None, ema_update_freq=1, ema_fp32=False
    )
    ema = EMA(model, config)
    with torch.no_grad():
        model.encoder.tokens.weight += 1
    ema.step(model, 1)
    change = ema.get_model().encoder.tokens.weight - model.encoder.tokens.weight
    torch.testing.assert_close(change, torch.full_like(change, -0.5))
    integers = {key for key, value in model.state_dict().items() if not value.is_floating_point()}
    assert integers and all(torch.equal(ema.get_model().state_dict()[key], model.state_dict()[key]) for key in integers)


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU it is fairseq's own")
def test_an_update_is_seeded_as_by_fairseq_and_notes_down_no_stack(monkeypatch):
    (theirs,) = compat.SetTorchSeed.__bases__
    before = torch.get_rng_state()
    with theirs(7):
        expected = torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.setattr("traceback.format_stack", None)  # fails where it is called
    with utils.set_torch_seed(7):
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(TypeError, match="NoneType"):
        theirs(7)
