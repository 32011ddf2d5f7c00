"""What differs from torch and fairseq as they are."""

import pytest
import torch
from fairseq import utils

from tupe.plugin import compat


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
