"""What errors of a training become."""

import pytest
from torch.utils.data import Dataset

from tupe.common.active import in_worker, reason, refuse
from tupe.data.blocks import BOS
from tupe.data.loader import loader
from tupe.model_config import ModelConfig


class Cut(Dataset):
    """Whose item a function of this package refuses, or torch."""

    def __init__(self, ours):
        self.ours = ours

    def __getitem__(self, index):
        return ModelConfig(position="nothing") if self.ours else [BOS].index("x")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_that_a_data_worker_meets_is_one_line_too(workers):
    with pytest.raises(ValueError) as caught:
        next(iter(loader(Cut(True), [[0]], workers)))
    assert reason(caught.value).startswith("ValueError: unknown position scheme 'nothing'")
    with pytest.raises(ValueError, match=r"^unknown position scheme 'nothing'") as refused:
        refuse(caught.value)
    assert "Traceback" not in str(refused.value)


def test_a_fault_in_a_data_worker_stays_one():
    with pytest.raises(ValueError) as caught:
        next(iter(loader(Cut(False), [[0]], 1)))
    assert in_worker(caught.value) is caught.value and "Traceback" in str(caught.value)


def test_data_workers_are_forked():
    """Those of a fork server, Python 3.14's default, would not be kept from the signals that stop a run."""
    assert loader(Cut(True), [[0]], 1).multiprocessing_context.get_start_method() == "fork"
