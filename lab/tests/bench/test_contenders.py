"""The contenders are alike, and a step of theirs is what their users' step is."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lab.bench import contenders
from lab.bench.machine import PRECISIONS
from tupe import cpu

TINY = contenders.Setting("tiny", layers=2, length=20, batch=2, vocab=60)  # 6 of 40 tokens are masked
MISSING = [] if importlib.util.find_spec("transformers") else contenders.HF
# On GPUs only; compiling takes long
GPU = "hf-flash", "tupe_r-triton", "nopos-triton"
CPU = [name for name in contenders.CONTENDERS if name not in (*GPU, "modernbert", "tupe_r-compile", *MISSING)]


def layers_of(contender, name):
    model = contender.model
    if name == "export":
        return model.tupe.encoder.layers
    if name in contenders.HF:
        return model.bert.encoder.layer
    return model.encoder.sentence_encoder.layers if name == "fairseq" else model.encoder.layers


def test_masked_batch():
    tokens, targets = contenders.masked_batch(TINY)
    masked = targets.ne(1)
    assert masked.sum() == 6 and not masked[:, 0].any()
    assert (tokens[masked] == TINY.vocab - 1).all() and (tokens[~masked] < TINY.vocab - 1).all()
    assert all(torch.equal(a, b) for a, b in zip(contenders.masked_batch(TINY), (tokens, targets), strict=True))


@pytest.mark.parametrize("name", CPU)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_contenders_are_alike(name, precision):
    """Same sizes, tokens, masked positions and loss; a step trains every weight of the layers."""
    contender = contenders.Contender(name, replace(TINY, precision=precision))
    layers, width, _, ffn = TINY.dims()
    blocks = layers_of(contender, name)
    per_layer = 4 * width**2 + 2 * width * ffn + 4 * width + width + ffn + 4 * width  # products, biases, layer norms
    for ours, expected in zip((contender.tokens, contender.targets), contenders.masked_batch(TINY), strict=True):
        assert torch.equal(ours, expected)
    dropouts = {m.p for m in contender.model.modules() if isinstance(m, torch.nn.Dropout)}
    assert dropouts <= {0.1} and contender.model.training
    chance = torch.tensor(float(TINY.vocab)).log() * 6  # the sum over masked tokens of an untrained model
    with torch.no_grad():
        assert abs(contender.loss() / chance - 1) < 0.2
    before = [[p.detach().clone() for p in block.parameters()] for block in blocks]
    seen = set()
    for module in blocks[0].modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: seen.add(output.dtype))
    times = contender.step(0)
    assert seen == {PRECISIONS[precision]}
    assert len(times) == 3 and min(times) > 0
    moved = [[p for a, p in zip(old, new.parameters(), strict=True) if not a.equal(p)]
             for old, new in zip(before, blocks, strict=True)]  # fmt: skip
    assert [sum(p.numel() for p in some) for some in moved] == [per_layer] * layers
    assert all(p.dtype == torch.float32 for p in contender.model.parameters())


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["tupe_r-sdpa", "fairseq"])
def test_half_weights_have_float32_copies(name, precision):
    """As with fairseq's --fp16 and --bf16: a step moves the copies as one of float32 weights does, but for rounding."""
    setting = replace(TINY, precision=precision, half_weights=True)
    half, whole = contenders.Contender(name, setting), contenders.Contender(name, TINY)
    assert setting.mode == f"{precision} weights" and replace(TINY, precision=precision).mode == f"{precision} autocast"
    assert {p.dtype for p in half.model.parameters()} == {PRECISIONS[precision]}
    for contender in (half, whole):
        contender.model.eval()  # without dropout
        before = [p.detach().clone() for group in contender.torch_optimizer.param_groups for p in group["params"]]
        assert min(contender.step(0)) > 0
        after = [p for group in contender.torch_optimizer.param_groups for p in group["params"]]
        contender.moved = torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)])
        assert contender.moved.dtype == torch.float32
    assert torch.cosine_similarity(half.moved, whole.moved, 0) > 0.8  # Adam's first step is the signs of the gradients
    copies = [p for group in half.torch_optimizer.param_groups for p in group["params"]]
    for copy, p in zip(copies, half.model.parameters(), strict=True):
        assert torch.equal(copy.to(p.dtype), p)
    numbers = sum(p.numel() for p in half.model.parameters())
    assert sum(x.nbytes for x in half.kept()) == pytest.approx((2 + 4 * 4) * numbers, rel=0.05)


def test_modernbert_trains():
    pytest.importorskip("transformers", "4.48")
    contender = contenders.Contender("modernbert", replace(TINY, precision="bf16"))
    before = [p.detach().clone() for p in contender.model.parameters()]
    assert min(contender.step(0)) > 0
    assert not any(torch.equal(a, b) for a, b in zip(before, contender.model.parameters(), strict=True))


def test_models_are_on_their_device():
    for name, classes in [*((name, 0) for name in CPU), ("nopos", 2), ("fairseq", 2), *[("hf", 2)] * (not MISSING)]:
        model = contenders.build(name, replace(TINY, device="meta"), classes)
        assert model.training and {p.device.type for p in model.parameters()} == {"meta"}, name


def test_flops_are_those_that_pytorch_counts(monkeypatch):
    monkeypatch.setattr(cpu, "ONEDNN", False)  # the counter does not know oneDNN's product
    monkeypatch.setitem(contenders.OURS, "nopos", ("bert_a", {"position": "nopos", "attention": "plain"}))
    contender = contenders.Contender("nopos", TINY)
    with FlopCounterMode(display=False) as counter:
        contender.loss().backward()
    assert counter.get_total_flops() == pytest.approx(contenders.flops_per_token(TINY, "nopos") * 40, rel=1e-9)


def test_flops_of_windows_are_those_of_pairs_that_see_each_other():
    setting = replace(TINY, length=300, layers=3)
    near = (torch.arange(300) - torch.arange(300)[:, None]).abs() <= 64
    assert contenders.keys(setting, "rope") == contenders.keys(setting, "hf") == 3 * 300
    assert contenders.keys(setting, "rope-window") == pytest.approx(300 + 2 * near.sum().item() / 300)


def test_settings_are_all_lengths_in_all_precisions():
    found = contenders.settings(contenders.Setting("tiny"), [512, 128], 2048, ["float32", "bf16"])
    assert [(s.precision, s.length, s.batch) for s in found] == [
        ("float32", 512, 4), ("float32", 128, 16), ("bf16", 512, 4), ("bf16", 128, 16),
    ]  # fmt: skip
    assert str(found[-1]) == "tiny, N = 2, B = 16, L = 128, bf16 autocast"
    with pytest.raises(ValueError, match="2048 tokens holds no sequence of 4096"):
        contenders.settings(contenders.Setting(), [512, 4096], 2048, ["float32"])


def test_an_unknown_contender_is_refused():
    with pytest.raises(ValueError, match="unknown contender 'gpt'; valid: tupe_r, .*fairseq, hf"):
        contenders.Contender("gpt", TINY)
