"""`adamw_fused` against fairseq's `adam`: the same numbers, also when one continues a checkpoint of the other."""

import copy

import pytest
import torch
from fairseq import optim
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim import OPTIMIZER_REGISTRY
from fairseq.optim.adam import Adam, FairseqAdam, FairseqAdamConfig
from fairseq.optim.lr_scheduler.fixed_schedule import FixedLRScheduleConfig
from fairseq.trainer import Trainer
from helpers import build as build_model
from helpers import load, pretrain_arguments, train, write_data
from omegaconf import OmegaConf

import tupe.plugin  # noqa: F401
from tupe.plugin.optim import AdamW, FusedAdamW
from tupe.positions import parameter_groups

SETTINGS = {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-6, "weight_decay": 0.01, "lr": [0.01], "tpu": False}


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((17, 9), (5,), (3, 2))]


def gradients(step):
    """Of very different sizes, some of them tiny, so that epsilon matters."""
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator) * 10.0 ** (-2 * i - 2) for i, p in enumerate(parameters())]


def build(kind, params):
    return kind(FairseqAdamConfig(**SETTINGS), params)


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


@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1e3])
def test_factors_of_gradients_are_left_to_the_step(max_norm):
    """What the trainer does in an update. Afterwards the gradients are those that were used, as ever."""
    ours, theirs = parameters(), parameters()
    optimizers = build(FusedAdamW, ours), build(FairseqAdam, theirs)
    for step in range(5):
        norms = []
        for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
            for p, g in zip(params, gradients(step), strict=True):
                p.grad = g.clone()
            optimizer.multiply_grads(0.5)
            optimizer.multiply_grads(torch.tensor(1 / (step + 3), dtype=torch.double))  # as several processes do
            norms.append(optimizer.clip_grad_norm(max_norm))
            optimizer.step()
        torch.testing.assert_close(*norms)
        torch.testing.assert_close([p.grad for p in ours], [p.grad for p in theirs])
    assert_equal(ours, theirs)


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
    other = FusedAdamW(FairseqAdamConfig(**{**SETTINGS, "adam_eps": 1e-4}), params)
    other.load_state_dict(state, optimizer_overrides={"eps": 1e-4})
    assert other.param_groups[0]["eps"] == 1e-4


def halves(name, flat, overflow=()):
    """A model's float32 copies after 6 updates in half precision, as on a GPU; some updates' gradients overflow."""
    config = OmegaConf.structured(FairseqConfig)
    config.optimizer = {"_name": name, **SETTINGS}
    config.common.fp16, config.common.fp16_no_flatten_grads = True, not flat
    model = build_model("tupe_r_tiny").half()
    optimizer = optim.FP16Optimizer.build_optimizer(config, list(model.parameters()))
    assert optimizer.has_flat_params == flat
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        for p in model.parameters():
            p.grad = (torch.randn(p.shape, generator=generator) * optimizer.scaler.loss_scale).half()
            p.grad[...] = torch.inf if step in overflow else p.grad
        optimizer._needs_sync = True  # as `backward` says
        try:
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
        except OverflowError:
            assert step in overflow
        optimizer.zero_grad()
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def test_flat_half_precision(monkeypatch):
    """One vector of all parameters, which a GPU has and a CPU's fairseq never reaches."""
    overflow = 2, 3
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    theirs, start = halves("adam", True, overflow), halves("adam", True, range(6))
    assert (theirs - start).abs().mean() > 1e-3
    for name, flat in [("adam", False), ("adamw_fused", True), ("adamw_fused", False)]:
        torch.testing.assert_close(halves(name, flat, overflow), theirs, rtol=1e-3, atol=1e-4)


# ---- the scale of the loss ----


def skipped(optimizer, batches, limit=2**10):
    """Those of the batches at which the loss overflows, because its scale is above `limit`."""
    found = []
    for batch in batches:
        try:
            optimizer.scaler.check_overflow(torch.inf if optimizer.scaler.loss_scale > limit else 1.0)
            optimizer.scaler.update()
        except OverflowError:
            found.append(batch)
    return found


def test_the_scale_grows_at_the_same_updates_after_a_resume():
    def new():
        config = OmegaConf.structured(FairseqConfig)
        config.optimizer = {"_name": "adam", **SETTINGS}
        config.common.fp16, config.common.fp16_no_flatten_grads, config.common.fp16_scale_window = True, True, 8
        return optim.FP16Optimizer.build_optimizer(
            config, [torch.nn.Parameter(p.detach().half()) for p in parameters()]
        )

    first, resumed = new(), new()
    assert skipped(first, range(55))
    resumed.load_state_dict(first.state_dict())
    assert skipped(resumed, range(55, 150)) == skipped(first, range(55, 150)) != []
    plain = first.state_dict()
    del plain["loss_scaler"]  # of fairseq without the plugin
    new().load_state_dict(plain)


# ---- parameters without weight decay ----

LEARNED = "sinusoidal_learned+shaw_sinusoidal_learned"
FREQUENCIES = {f"encoder.positions.{name}.log_omega" for name in LEARNED.split("+")}


def optimizer_of(model, name, weight_decay, half=False):
    """What fairseq's trainer builds for a model."""
    trainer = Trainer.__new__(Trainer)
    trainer.cfg = config = OmegaConf.structured(FairseqConfig)
    config.optimizer = {"_name": name, **SETTINGS, "weight_decay": weight_decay}
    config.lr_scheduler, config.common.fp16 = FixedLRScheduleConfig(lr=[0.01]), half
    config.lr_scheduler._name = "fixed"
    trainer.cuda, trainer._optimizer = False, None
    trainer._wrapped_model, trainer._wrapped_criterion = model, torch.nn.Module()
    return trainer.optimizer


def trained(name, weight_decay, half):
    """{name of a parameter: its change} after 5 updates with the same gradients, through fairseq's own way."""
    model = build_model("bert_a_tiny", position=LEARNED)
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizer = optimizer_of(model.half() if half else model, name, weight_decay, half)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        optimizer.set_lr(0.01)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        if half:
            optimizer._multiply_factor = 1.0  # of the loss scale
            optimizer._needs_sync = True
        optimizer.step()
    return {key: p.detach().float() - start[key] for key, p in model.named_parameters()}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["adam", "adamw_fused"])
def test_learned_frequencies_have_no_weight_decay(name, half):
    with_decay, without = trained(name, 0.5, half), trained(name, 0.0, half)
    same = {key for key, change in with_decay.items() if torch.equal(change, without[key])}
    zeros = {key for key in same if key.endswith("bias")}  # start at 0: decay is too small to see in half precision
    assert FREQUENCIES <= same <= FREQUENCIES | zeros
    if not half:
        assert same == FREQUENCIES
        for key in FREQUENCIES:  # steps of the learning rate in log omega: every frequency moves by its own share
            assert 0 < without[key].abs().max() <= 5 * 0.01 * 1.5


def test_groups_of_parameters():
    """One function for every optimizer and every model."""
    model = build_model("bert_a_tiny", position="fire+kerple+alibi:layer:learned:True+urpe+rope:learned:True")
    ends = ("log_c", "log_threshold", "log_factor", "inner", "log_slopes", "urpe.table", "log_omega")
    names = {p: name for name, p in model.named_parameters()}
    groups = parameter_groups(model, 0.1)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    undecayed = {names[p] for p in groups[1]["params"]}
    assert undecayed == {name for name in names.values() if name.endswith(ends)} and len(undecayed) == 8
    assert len(groups[0]["params"]) == len(names) - 8
    assert len(parameter_groups(build_model("bert_a_tiny", position="t5"), 0.1)) == 1


def test_training_with_learned_frequencies_resumes_exactly(tmp_path):
    """Two groups in the optimizer's state; a model without such parameters has one."""
    data = write_data(tmp_path / "data")

    def run(folder, position, *more):
        words = [f"--position={position}", "--weight-decay=0.5", "--max-update=4", "--num-workers=0", *more]
        return train(pretrain_arguments(data, tmp_path / folder, *words, arch="bert_a_tiny"))

    whole = run("whole", LEARNED, "--save-interval-updates=2", "--keep-interval-updates=-1")
    resumed = run("resumed", LEARNED, f"--continue-once={tmp_path}/whole/checkpoint_1_2.pt")
    assert resumed == whole[2:]
    run("plain", "absolute")
    states = [load(tmp_path / folder / "checkpoint_last.pt")["last_optimizer_state"] for folder in ("resumed", "plain")]
    groups = [[group["weight_decay"] for group in state["param_groups"]] for state in states]
    assert groups == [[0.5, 0.0], [0.5]]
