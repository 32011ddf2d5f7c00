"""Triton's kernels in its interpreter, on a CPU, against the plain backend; and that they compile for two cards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_attention import MAX, SOFTMAX, H, assert_same, batch, encoder, outcome

from tupe import backend_triton, backends, triton_attention
from tupe.attention import NORMALISERS
from tupe.backends import choose

ROOT = Path(__file__).parents[1]
triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not triton_attention.interpreted(), reason="it was imported without its interpreter")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Three tiles of a sequence, the last one not full."""
    monkeypatch.setattr(triton_attention, "TILE", 16)


EVERYDAY = ("untied", "untied"), ("t5", "tied"), ("rope", "tied")  # the interpreter takes seconds for each
FULL = pytest.param(MAX, (), marks=pytest.mark.thorough, id="full")


@pytest.mark.parametrize("length, padding", [FULL, pytest.param(39, (0, 5, 39), id="padded")])
@pytest.mark.parametrize(
    "position, cls",
    [pytest.param(*case, marks=() if case in EVERYDAY else pytest.mark.thorough) for case in SOFTMAX],
)
def test_equals_plain(position, cls, length, padding):
    tokens = batch(length, padding)
    expected = outcome(encoder(position, cls, attention="plain"), tokens)
    assert_same(outcome(encoder(position, cls, attention="triton"), tokens), expected, 1e-5)


def test_holes_in_the_mask_and_queries_of_a_view():
    """As from an exported model, whose mask hides tokens between others; and rows that are not contiguous."""
    q, k, v = (torch.randn(2, 20, 3, 24).transpose(1, 2).requires_grad_() for _ in range(3))
    bias, mask = torch.randn(3, 20, 20, requires_grad=True), torch.ones(2, 20, dtype=torch.bool)
    mask[0, 3:9] = mask[1, 0] = False
    ours = triton_attention.attention(q, k, v, bias, mask, 0.2, 0.0)
    logits = (q @ k.transpose(2, 3) * 0.2 + bias).masked_fill(~mask[:, None, None], -torch.inf)
    plain = logits.softmax(-1) @ v
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    grad = torch.randn(ours.shape)
    inputs = q, k, v, bias
    for a, b in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(plain, inputs, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_bias_by_offset_equals_its_matrix():
    q, k, v = (torch.randn(2, H, 21, 16) for _ in range(3))
    offsets = torch.randn(H, 41, requires_grad=True)
    index = torch.arange(21) - torch.arange(21)[:, None] + 20
    results = []
    for bias in (offsets, offsets[:, index]):
        out = triton_attention.attention(q, k, v, bias, None, 0.25, 0.0)
        results.append((out, *torch.autograd.grad(out.square().sum(), offsets)))
    for by_offset, matrix in zip(*results, strict=True):
        torch.testing.assert_close(by_offset, matrix, rtol=1e-5, atol=1e-5)


def test_half_precision():
    q, k, v = (torch.randn(2, H, 21, 32).half() for _ in range(3))
    bias = torch.randn(H, 21, 21)
    ours = triton_attention.attention(q, k, v, bias.half(), None, 32**-0.5, 0.0)
    exact = (q.float() @ k.float().transpose(2, 3) * 32**-0.5 + bias).softmax(-1) @ v.float()
    assert ours.dtype == torch.float16
    torch.testing.assert_close(ours.float(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.thorough
def test_dropout_drops_the_same_weights_in_both_passes():
    """With ones as values a row's output is the sum of its kept weights; derivatives agree with differences."""
    share = 0.25
    q, k, v = (torch.randn(2, 3, 40, 16) for _ in range(3))
    ones = triton_attention.attention(q, k, torch.ones_like(v), None, None, 0.0, share)
    kept = ones[..., 0] * 40 * (1 - share) / 40
    assert kept.mean() == pytest.approx(1 - share, abs=0.02) and kept.std() > 0.03
    inputs = [x.requires_grad_() for x in (q, k, v, torch.randn(3, 40, 40))]
    grad = torch.randn(v.shape)

    def loss(*inputs):
        torch.manual_seed(5)
        return (triton_attention.attention(*inputs, None, 0.25, share) * grad).sum()

    for place, gradient in enumerate(torch.autograd.grad(loss(*inputs), inputs)):
        step = 1e-2 * torch.randn(gradient.shape)
        with torch.no_grad():
            up, down = ([x + s * step if i == place else x for i, x in enumerate(inputs)] for s in (1, -1))
            difference = (loss(*up) - loss(*down)) / 2
        torch.testing.assert_close((gradient * step).sum(), difference, rtol=2e-2, atol=1e-3)


def test_what_it_refuses():
    ask = backend_triton.Triton().refuses
    cpu = torch.device("cpu")
    assert ask(encoder().positions, "softmax", cpu, torch.float32) is None
    assert "all weights" in ask(encoder("shaw", "tied").positions, "softmax", cpu, torch.float32)
    assert all(ask(encoder().positions, name, cpu, torch.float32) for name in NORMALISERS if name != "softmax")
    wide = encoder("t5", "tied", layer="gau").positions  # one head, and values of twice the width
    wide.dims = wide.dims.__class__(**{**vars(wide.dims), "value_dim": 256})
    assert "wider than 128" in ask(wide, "softmax", cpu, torch.float32)


@pytest.mark.parametrize("faster", [True, False])
def test_auto_takes_it_where_it_was_measured_to_win(faster, monkeypatch):
    seconds = {"triton": 1.0 if faster else 3.0, "sdpa": 2.0}
    monkeypatch.setattr(backend_triton, "seconds_of", lambda backend, *sizes: seconds[backend.name])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: torch.enable_grad())
    backend_triton.wins.cache_clear()
    cuda = torch.device("cuda")

    def chosen(position, dtype=torch.bfloat16):
        return choose("auto", encoder(position).positions, "softmax", cuda, dtype)[0].name

    assert chosen("untied+t5") == ("triton" if faster else "sdpa")
    assert chosen("rope") == chosen("t5+window:size:8") == chosen("untied", torch.float32) == "sdpa"
    backend_triton.wins.cache_clear()
    assert backends.BACKENDS["triton"] is backend_triton.Triton


def test_it_is_measured_inside_inference_mode_too(monkeypatch):
    def seconds(backend, *sizes):
        torch.ones(2, requires_grad=True).sum().backward()
        return 1.0

    monkeypatch.setattr(backend_triton, "seconds_of", seconds)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: torch.enable_grad())
    backend_triton.wins.cache_clear()
    with torch.inference_mode():
        assert backend_triton.wins(12, 64, torch.bfloat16, "a card") is False
    backend_triton.wins.cache_clear()


@pytest.mark.thorough
def test_heads_may_be_two_gigabytes_apart():
    """Offsets of 32 bits would point elsewhere. The pages between are never touched."""
    q, k, v = (torch.randn(1, 3, 20, 16) for _ in range(3))
    bias, far = torch.randn(3, 20, 20), 1_100_000_000
    apart = torch.empty(2 * far + 400, dtype=torch.float16).as_strided((3, 20, 20), (far, 20, 1))
    apart.copy_(bias)
    expected = triton_attention.attention(q, k, v, apart.float(), None, 0.2, 0.0)
    torch.testing.assert_close(triton_attention.attention(q, k, v, apart, None, 0.2, 0.0), expected)


COMPILE = """
import inspect, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from tupe import triton_attention

card, dtype = int(sys.argv[1]), sys.argv[2]
kinds = dict.fromkeys(["Q", "K", "V", "GRAD", "BIAS", "OUT", "DQ", "DK", "DV"], "*" + dtype)
kinds |= dict.fromkeys(["LSE", "DELTA", "DBIAS"], "*fp32") | {"MASK": "*i8", "SEED": "*i64"}
kinds |= dict.fromkeys(["scale", "dropout"], "fp32")
chosen = triton_attention.sizes(64, 64, kinds, kinds, 0.1)
for name in ("_forward", "_backward_q", "_backward_kv", "_backward_bias"):
    kernel = getattr(triton_attention, name)
    names = inspect.signature(kernel.fn).parameters
    kind = {each: "constexpr" if each in chosen else kinds.get(each, "i32") for each in names}
    source = ASTSource(kernel, kind, {each: chosen[each] for each in names if each in chosen})
    print(name, "mma" in triton.compile(source, target=GPUTarget("cuda", card, 32)).asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("card", "dtype"), [(80, "bf16"), (90, "bf16"), (80, "fp16")])  # A100, H100
def test_kernels_compile_for_a_card(card, dtype, tmp_path):
    """Without one, and with products on tensor cores. The interpreter cannot multiply bfloat16."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):
        pytest.skip("older compilers look for a card")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE, str(card), dtype]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split()[1::2] == ["True"] * 4, done.stderr
