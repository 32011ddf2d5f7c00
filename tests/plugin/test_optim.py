"""`adamw_fused` against fairseq's `adam`: the same numbers, also when one continues a checkpoint of the other."""

import copy

import pytest
import torch
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.optim.adam import Adam, FairseqAdam, FairseqAdamConfig

import tupe.plugin  # noqa: F401
from tupe.plugin.optim import AdamW, FusedAdamW, FusedAdamWConfig

SETTINGS = {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-6, "weight_decay": 0.01, "lr": [0.01], "tpu": False}


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((17, 9), (5,), (3, 2))]


def gradients(step):
    """Of very different sizes, some of them tiny, so that epsilon matters."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator) * 10.0 ** (-2 * i - 2) for i, p in enumerate(parameters())]


def build(kind, params):
    config = {FairseqAdam: FairseqAdamConfig, FusedAdamW: FusedAdamWConfig}[kind](**SETTINGS)
    return kind(config, params)


def advance(optimizer, params, steps):
    for step in steps:
        optimizer.set_lr(0.01 / (1 + step))
        for p, g in zip(params, gradients(step), strict=True):
            p.grad = g.clone()
        optimizer.step()


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=2e-6, atol=1e-7)


def test_same_numbers_as_adam():
    assert OPTIMIZER_REGISTRY["adamw_fused"] is FusedAdamW
    ours, theirs, start = parameters(), parameters(), parameters()
    a, b = build(FusedAdamW, ours), build(FairseqAdam, theirs)
    assert isinstance(a.optimizer, AdamW) and isinstance(b.optimizer, Adam)
    advance(a, ours, range(20))
    advance(b, theirs, range(20))
    assert_equal(ours, theirs)
    for p, q in zip(ours, start, strict=True):
        assert (p - q).abs().max() > 1e-3


def test_epsilon_is_where_fairseq_has_it():
    """The plain `torch.optim.AdamW` gives other numbers, or the adaptation above would be for nothing."""
    ours, theirs = parameters(), parameters()
    advance(build(FusedAdamW, ours), ours, [0])
    plain = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
    for p, g in zip(theirs, gradients(0), strict=True):
        p.grad = g
    plain.step()
    assert (ours[2] - theirs[2]).abs().max() > 1e-4
    assert plain.param_groups[0]["eps"] == 1e-6


@pytest.mark.parametrize(
    "first, second", [(FairseqAdam, FusedAdamW), (FusedAdamW, FairseqAdam), (FusedAdamW, FusedAdamW)]
)
def test_continues_a_checkpoint(first, second, tmp_path):
    params, reference = parameters(), parameters()
    optimizer = build(first, params)
    advance(optimizer, params, range(6))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    resumed = build(second, params)
    resumed.load_state_dict(copy.deepcopy(state))
    if second is FusedAdamW:
        assert resumed.optimizer.updates == 6
        assert all(group["fused"] for group in resumed.param_groups)
    advance(resumed, params, range(6, 12))
    advance(build(FairseqAdam, reference), reference, range(12))
    assert_equal(params, reference)


def test_its_own_settings_win_over_the_checkpoint():
    params = parameters()
    optimizer = build(FusedAdamW, params)
    advance(optimizer, params, range(2))
    state = optimizer.state_dict()
    assert state["param_groups"][0]["eps"] == 1e-6  # not that of a step
    config = FusedAdamWConfig(**{**SETTINGS, "adam_eps": 1e-4})
    other = FusedAdamW(config, params)
    other.load_state_dict(state, optimizer_overrides={"eps": 1e-4})
    assert other.param_groups[0]["eps"] == 1e-4


def test_parameters_without_gradient_stay():
    params, start = parameters(), parameters()
    optimizer = build(FusedAdamW, params)
    params[0].grad = gradients(0)[0]
    optimizer.step()
    assert torch.equal(params[1], start[1]) and not torch.equal(params[0], start[0])


@pytest.mark.parametrize("option", ["use_old_adam", "fp16_adam_stats"])
def test_refuses_options_without_meaning(option):
    with pytest.raises(ValueError, match=option.replace("_", "-")):
        FusedAdamW(FusedAdamWConfig(**SETTINGS, **{option: True}), parameters())


def test_memory_efficient_fp16_is_refused():
    """It steps half-precision weights: fairseq's `adam` keeps their moments in float32, PyTorch does not."""
    for kind, dtype in ((FairseqAdam, torch.float32), (FusedAdamW, torch.float16)):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.float16))
        p.grad = torch.ones_like(p)
        optimizer = build(kind, [p])
        optimizer.step()
        assert optimizer.optimizer.state[p]["exp_avg"].dtype == dtype
        assert optimizer.supports_memory_efficient_fp16 == (dtype == torch.float32)
