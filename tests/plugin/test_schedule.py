"""The learning-rate schedules."""

import pytest
import torch
from helpers import load, pretrain_arguments, train, write_data
from omegaconf import OmegaConf

from tupe.common.rates import constant, polynomial
from tupe.plugin.schedule import (
    ConstantCooldown,
    ConstantCooldownConfig,
    PolynomialDecayRatio,
    PolynomialDecayRatioConfig,
)


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
    lrs = [scheduler.step_update(update) for update in range(1, 101)]
    assert lrs[:6] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1.0])
    assert lrs[6:] == pytest.approx([1 - (u - 6) / 94 for u in range(7, 101)])
    assert lrs[-1] == 0
    assert lrs == pytest.approx([polynomial(update, 6, 100) for update in range(1, 101)])  # the other engine's


def test_a_schedule_without_an_end_is_refused(any_optimizer):
    with pytest.raises(ValueError, match="needs total_num_update"):
        PolynomialDecayRatio(schedule(total_num_update=0), any_optimizer)


def test_rates_for_each_epoch_are_refused(any_optimizer):
    with pytest.raises(ValueError, match="--lr 0.1,0.01: polynomial_decay_ratio has one rate for all epochs"):
        config = OmegaConf.structured(PolynomialDecayRatioConfig(lr=[0.1, 0.01], total_num_update=9))
        PolynomialDecayRatio(config, any_optimizer)
    with pytest.raises(ValueError, match="constant_cooldown has one rate"):
        config = OmegaConf.structured(ConstantCooldownConfig(lr=[0.1, 0.01], total_num_update=9))
        ConstantCooldown(config, any_optimizer)


def test_the_rate_is_constant_up_to_the_cooldown(any_optimizer):
    values = {"warmup_updates": 4, "cooldown_updates": 5, "total_num_update": 20}
    scheduler = ConstantCooldown(OmegaConf.structured(ConstantCooldownConfig(lr=[2.0], **values)), any_optimizer)
    assert any_optimizer.lr == 0.5  # of the first update
    lrs = [scheduler.step_update(update) for update in range(1, 21)]
    assert lrs[:4] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert lrs[4:15] == [2.0] * 11
    assert lrs[15:] == pytest.approx([1.6, 1.2, 0.8, 0.4, 0.0])


def test_without_a_cooldown_the_rate_stays():
    assert [constant(done, 2, 0, 4) for done in range(7)] == [0.5, 0.5, 1, 1, 1, 1, 1]


def test_a_cooldown_fits_into_the_run(any_optimizer):
    values = {"warmup_updates": 6, "cooldown_updates": 5, "total_num_update": 10}
    with pytest.raises(ValueError, match="valid: at most 10 in all"):
        ConstantCooldown(OmegaConf.structured(ConstantCooldownConfig(lr=[1.0], **values)), any_optimizer)


@pytest.mark.thorough
def test_a_branch_is_the_shorter_run(tmp_path):
    """From the long run's checkpoint at which its own cool-down begins: losses and weights of a run of that length."""
    data = write_data(tmp_path / "data")
    schedule = ["--lr-scheduler=constant_cooldown", "--warmup-updates=1", "--cooldown-updates=2"]
    schedule += ["--no-epoch-checkpoints", "--save-interval-updates=1", "--keep-interval-updates=-1"]

    def run(name, updates, *more):
        length = [f"--max-update={updates}", f"--total-num-update={updates}"]
        losses = train(pretrain_arguments(data, tmp_path / name, *schedule, *length, *more))
        return losses, load(tmp_path / name / "checkpoint_last.pt")["model"]

    _, trunk = run("long", 8)
    whole, weights = run("short", 5)
    branch, branched = run("branch", 5, f"--continue-once={tmp_path}/long/checkpoint_1_3.pt")
    assert branch == whole[3:]
    assert all(torch.equal(weights[key], branched[key]) for key in weights)
    assert any(not torch.equal(weights[key], trunk[key]) for key in weights)
