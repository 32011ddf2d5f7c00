"""The learning-rate schedule that is given as a ratio."""

import pytest
from omegaconf import OmegaConf

from tupe.plugin.schedule import PolynomialDecayRatio, PolynomialDecayRatioConfig


class FakeOptimizer:
    def set_lr(self, lr):
        self.lr = lr

    def get_lr(self):
        return self.lr


@pytest.fixture
def any_optimizer(monkeypatch):
    monkeypatch.setattr("fairseq.optim.lr_scheduler.fairseq_lr_scheduler.FairseqOptimizer", FakeOptimizer)
    return FakeOptimizer()


def schedule(**values):
    return OmegaConf.structured(PolynomialDecayRatioConfig(lr=[1.0], **values))


def test_schedule_warms_up_and_ends_at_zero(any_optimizer):
    scheduler = PolynomialDecayRatio(schedule(total_num_update=100, warmup_ratio=0.06), any_optimizer)
    scheduler.step_begin_epoch(1)
    lrs = [scheduler.step_update(update) for update in range(1, 101)]
    assert lrs[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert lrs[6:] == pytest.approx([1 - (u - 6) / 94 for u in range(7, 101)])
    assert lrs[-1] == 0


@pytest.mark.parametrize(
    "values, message",
    [
        ({"total_num_update": 0}, "needs total_num_update"),
        ({"total_num_update": 10, "warmup_ratio": 1.0}, r"must be in \[0, 1\), got 1.0"),
        ({"total_num_update": 10, "warmup_updates": 5}, "takes warmup_ratio, not warmup_updates"),
    ],
)
def test_schedule_refuses(values, message, any_optimizer):
    with pytest.raises(ValueError, match=message):
        PolynomialDecayRatio(schedule(**values), any_optimizer)
