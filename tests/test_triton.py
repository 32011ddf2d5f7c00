"""Triton's kernels in its interpreter, on a CPU, against the plain backend. `test_triton_compiler.py` compiles them."""

import contextlib
import itertools

import pytest
import torch
from test_attention import MAX, SOFTMAX, H, assert_same, batch, encoder, outcome

from tupe import backend_triton, backends, triton_attention
from tupe.attention import NORMALISERS, Batch
from tupe.backends import choose
from tupe.token_positions import TokenPositions

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not triton_attention.interpreted(), reason="it was imported without its interpreter")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Three tiles of queries and two of keys, the last ones not full."""
    small = dict.fromkeys(triton_attention.TILES, triton_attention.Tile(16, 32, 4, 1))
    monkeypatch.setattr(triton_attention, "TILES", small)
    monkeypatch.setattr(triton_attention, "PROGRAMS", 40)  # of the bias: several parts of the batch


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


def test_compiled_code_is_one_graph():
    """Of operators whose shapes, strides and gradients torch knows without the kernels, dropout included."""
    tokens, model = batch(20, (5,), 1), encoder(attention="triton", attention_dropout=0.25)
    torch.manual_seed(3)
    expected = outcome(model, tokens)
    torch.manual_seed(3)
    model.compile(backend="aot_eager", fullgraph=True)
    assert_same(outcome(model, tokens), expected, 1e-5)

    q, k, v, grad = (torch.randn(1, 20, 2, 16).transpose(1, 2) for _ in range(4))
    read, mask, seed, numbers = torch.randn(2, 20, 20), torch.arange(20)[None] < 9, torch.tensor([7]), (0.2, 0.25)
    inputs = q, k, v, read, read, mask, seed, *numbers, True
    torch.library.opcheck(triton_attention._attention, inputs, test_utils="test_faketensor")
    inputs = q, k, v, read, mask, *triton_attention._attention(*inputs), grad, *numbers
    for last in itertools.product((True, False), (True, False)):  # atomic, of_bias
        torch.library.opcheck(triton_attention._attention_backward, (*inputs, *last), test_utils="test_faketensor")


def test_the_gradient_of_a_rounded_bias_is_summed_in_float32():
    """Over layers, as over sequences."""
    q, bias = torch.randn(2, H, 21, 32).half().requires_grad_(), torch.randn(H, 21, 21, requires_grad=True)
    backend, whole = backend_triton.Triton(), Batch(TokenPositions(21, "cpu"), torch.float16, H)
    prepared = backend.prepare(bias, None, None, whole)
    layers = [(backend.mix(q * n, q, q, None, prepared, 0.2, 0.0)[0] ** 2).sum() for n in (1, 2)]
    apart = [torch.autograd.grad(layer, bias, retain_graph=True)[0] for layer in layers]
    assert not torch.equal(apart[0], apart[0].half().float())
    assert torch.equal(torch.autograd.grad(sum(layers), bias)[0], apart[0] + apart[1])


def test_half_precision():
    q, k, v = (torch.randn(2, H, 21, 32).half() for _ in range(3))
    bias = torch.randn(H, 21, 21)
    ours = triton_attention.attention(q, k, v, bias.half(), None, 32**-0.5, 0.0)
    exact = (q.float() @ k.float().transpose(2, 3) * 32**-0.5 + bias).softmax(-1) @ v.float()
    assert ours.dtype == torch.float16
    torch.testing.assert_close(ours.float(), exact, rtol=2e-2, atol=2e-2)


def dropout_case(device, dtype, length, width, atomic=False):
    """Relative errors of output and gradients, in float64, beside the formula with the weights that were dropped."""
    B, H, share = 3, 3, 0.25
    torch.manual_seed(1)
    q, k, v = (torch.randn(B, H, length, width, device=device, dtype=dtype).requires_grad_() for _ in range(3))
    bias = torch.randn(H, length, length, device=device, dtype=dtype).requires_grad_()
    mask = torch.arange(length, device=device) < torch.tensor([length, length // 3, length - 1], device=device)[:, None]

    def ours(q, v, bias, mask):
        torch.manual_seed(5)
        return triton_attention.attention(q, k, v, bias, mask, 0.25, share, atomic=atomic)

    columns = [torch.eye(length, device=device, dtype=dtype)[:, i : i + width] for i in range(0, length, width)]
    kept = [ours(torch.zeros_like(q), x.expand(B, H, -1, -1).contiguous(), None, None) > 0 for x in columns]
    kept = torch.cat(kept, -1)  # equal weights of unit vectors: those that stay are seen one by one
    assert kept.float().mean() == pytest.approx(1 - share, abs=0.02)
    assert not torch.equal(kept[0], kept[1]) and not torch.equal(kept[0, 0], kept[0, 1])
    inputs, exact = (q, k, v, bias), [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    logits = exact[0] @ exact[1].transpose(2, 3) * 0.25 + exact[3]
    weights = logits.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1) * kept / (1 - share)
    out, formula = ours(q, v, bias, mask), weights @ exact[2]
    grad = torch.randn_like(out)
    pairs = zip(
        (out, *torch.autograd.grad(out, inputs, grad)),
        (formula, *torch.autograd.grad(formula, exact, grad.double())), strict=True,
    )  # fmt: skip
    return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("width", [16, 24, pytest.param(128, marks=pytest.mark.thorough)])
def test_dropout_drops_the_same_weights_in_all_kernels(width, atomic):
    """In tiles of 16, and those of wide heads; gradients of q, k, v and of the bias, however it is summed."""
    assert max(dropout_case("cpu", torch.float32, 40, width, atomic)) < 1e-5


def test_atomic_additions_add_what_the_kernel_of_the_bias_sums():
    """Without a gradient of the bias, nothing is added."""
    q, k, v = (torch.randn(3, 2, 21, 16, requires_grad=True) for _ in range(3))
    bias, grad = torch.randn(2, 21, 21, requires_grad=True), torch.randn(3, 2, 21, 16)
    mask, found = (torch.arange(21) < 17).expand(3, -1), []
    for atomic in (False, True):
        out = triton_attention.attention(q, k, v, bias, mask, 0.3, 0.0, atomic=atomic)
        found.append(torch.autograd.grad(out, (q, k, v, bias), grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    out = triton_attention.attention(q, k, v, bias.detach(), None, 0.3, 0.0, atomic=True)
    assert len(torch.autograd.grad(out, (q, k, v), grad)) == 3


def test_what_it_refuses():
    ask = backend_triton.Triton().refuses
    cpu = torch.device("cpu")
    assert ask(encoder().positions, "softmax", cpu, torch.float32) is None
    assert "all weights" in ask(encoder("shaw", "tied").positions, "softmax", cpu, torch.float32)
    assert all(ask(encoder().positions, name, cpu, torch.float32) for name in NORMALISERS if name != "softmax")
    wide = encoder("t5", "tied", block="gau").positions  # one head, and values of twice the width
    wide.dims = wide.dims.__class__(**{**vars(wide.dims), "value_dim": 256})
    assert "wider than 128" in ask(wide, "softmax", cpu, torch.float32)


@pytest.fixture
def card(monkeypatch):
    """`card(seconds)`: as on one where a backend takes seconds(its name, length). atomic: how many times as long atomic
    additions take."""

    def pretend(seconds, atomic=1.0):
        def seconds_of(backend, *sizes):
            return seconds(backend.name, sizes[-1]) * (atomic if getattr(backend, "atomic", False) else 1)

        monkeypatch.setattr(backend_triton, "seconds_of", seconds_of)

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: torch.enable_grad())
    backend_triton.fastest.cache_clear()
    yield pretend
    backend_triton.fastest.cache_clear()


def test_a_recording_has_the_backend_that_was_measured_before_it(card, monkeypatch):
    """And one of a length that was not measured yet has PyTorch's."""
    card(lambda name, length: 1.0 if name == "triton" else 2.0)
    assert chosen("t5") == "triton"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chosen("t5") == "triton" and chosen("t5", 64) == "sdpa"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert chosen("t5", 64) == "triton"


def chosen(position, length=512, dtype=torch.bfloat16):
    return choose("auto", encoder(position).positions, "softmax", torch.device("cuda"), dtype, length)[0].name


@pytest.mark.parametrize("faster", [True, False])
def test_auto_takes_it_where_it_was_measured_to_win(faster, card):
    card(lambda name, length: 2.0 if name == "sdpa" else 1.0 if faster else 3.0)
    assert chosen("untied+t5") == ("triton" if faster else "sdpa")
    assert chosen("rope") == chosen("t5+window:size:8") == chosen("untied", dtype=torch.float32) == "sdpa"
    assert chosen("pope+t5") == "sdpa"  # whose queries become wider
    assert backends.BACKENDS["triton"] is backend_triton.Triton


def test_it_is_measured_at_about_the_length_of_the_sequences(card):
    measured = []
    card(lambda name, length: measured.append(length) or (length if name == "sdpa" else 200))
    assert [chosen("untied", length) for length in (1, 64, 65, 128, 129, 500, 9999)] == ["sdpa"] * 4 + ["triton"] * 3
    assert measured == [length for length in (64, 128, 256, 512, 2048) for _ in range(3)]


def test_a_tie_is_not_decided_by_chance(card):
    card(lambda name, length: 0.95 if name == "triton" else 1.0)
    assert chosen("untied") == "sdpa"


@pytest.mark.parametrize("share, atomic", [(0.95, False), (0.8, True)])
def test_the_card_decides_how_the_gradient_of_the_bias_is_summed(share, atomic, card):
    card(lambda name, length: 1.0 if name == "triton" else 2.0, share)
    model = encoder("untied").positions
    found, reason = choose("auto", model, "softmax", torch.device("cuda"), torch.bfloat16, 512)
    assert found.atomic == atomic and ("atomic" in reason) == atomic
    assert not choose("triton", model, "softmax", torch.device("cuda"), torch.bfloat16, 512)[0].atomic


def test_without_memory_it_is_measured_later(card):
    full = [True]

    def seconds(name, length):
        if full:
            raise torch.cuda.OutOfMemoryError
        return 1.0 if name == "triton" else 2.0

    card(seconds)
    assert chosen("untied") == "sdpa"
    full.clear()
    assert chosen("untied") == "triton"


def test_an_older_card_is_refused(card, monkeypatch):
    card(lambda name, length: 1.0 if name == "triton" else 2.0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert chosen("untied") == "sdpa"
    with pytest.raises(ValueError, match="compute capability 8.0 or later; valid here: auto, plain, sdpa$"):
        choose("triton", encoder().positions, "softmax", torch.device("cuda"), torch.float16, 512)


def test_kernels_that_cannot_be_made_do_not_win(card, caplog):
    def seconds(name, length):
        if name == "triton":
            raise RuntimeError("At this line:\nFailed to find C compiler")
        return 1.0

    card(seconds)
    assert chosen("untied") == "sdpa"
    assert "triton fails here: RuntimeError: Failed to find C compiler" in caplog.text


def test_it_is_measured_inside_inference_mode_too(card):
    card(lambda name, length: torch.ones(2, requires_grad=True).sum().backward() or 1.0)
    with torch.inference_mode():
        assert backend_triton.fastest(12, 64, torch.bfloat16, 512, "a card") is None


@pytest.mark.thorough
def test_heads_may_be_two_gigabytes_apart():
    """Offsets of 32 bits would point elsewhere. The pages between are never touched."""
    q, k, v = (torch.randn(1, 3, 20, 16) for _ in range(3))
    bias, far = torch.randn(3, 20, 20), 1_100_000_000
    apart = torch.empty(2 * far + 400, dtype=torch.float16).as_strided((3, 20, 20), (far, 20, 1))
    apart.copy_(bias)
    expected = triton_attention.attention(q, k, v, apart.float(), None, 0.2, 0.0)
    torch.testing.assert_close(triton_attention.attention(q, k, v, apart, None, 0.2, 0.0), expected)
