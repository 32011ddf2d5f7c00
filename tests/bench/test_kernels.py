"""The concatenation that stands for TUPE-A's bias equals the plain path; the tables are complete."""

import pytest
import torch
from click.testing import CliRunner

from tupe.attention import Plain, Prepared
from tupe.backends import BACKENDS
from tupe.bench import kernels as bench_kernels
from tupe.bench.kernels import concatenated
from tupe.encoder import Encoder, LMHead

B, H, D = 3, 2, 8
SCALE = (2 * D) ** -0.5


def inputs(length, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    qkv = [random(B, H, length, D) for _ in range(3)]
    return [*qkv, random(H, length, D), random(H, length, D), random(2, H)]


def plain(q, k, v, pos_q, pos_k, theta, real, scale, dropout):
    """The plain path on the bias that the encoder would make."""
    bias = pos_q * scale @ pos_k.transpose(1, 2)
    length = bias.size(1)
    first = torch.arange(length) == 0
    bias = torch.where(first[None, None, :], theta[1, :, None, None], bias)
    bias = torch.where(first[None, :, None], theta[0, :, None, None], bias)
    if real is not None:
        bias = bias.masked_fill(~real, float("-inf"))
    return Plain().mix(q, k, v, None, Prepared(bias), scale, dropout)[0]


def outcome(function, tensors, real):
    out = function(*tensors, real, SCALE, 0.0)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad(out, tensors, weights)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_concatenation_equals_plain(length, padded):
    """Output and the gradients of q, k, v, both projections of positions and theta; [CLS] is reset, padding unseen."""
    real = None
    if padded:
        real = torch.arange(length) < torch.tensor([length, max(1, length - 3), 1])[:, None]
        real = real[:, None, None, :]
    ours, theirs = (outcome(function, inputs(length), real) for function in (concatenated, plain))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    if length > 1:  # no gradient that is compared is zero throughout, but theta_1's (a constant of its row)
        assert all(b.abs().max() > 1e-3 for b in theirs)
        assert theirs[-1][0].abs().max() < 1e-10


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=["bf16", "fp16"])
def test_concatenation_in_low_precision(dtype, tolerance):
    """Tolerance: of the relative error against float64."""
    real = (torch.arange(7) < torch.tensor([7, 5, 2])[:, None])[:, None, None, :]
    low = inputs(7, dtype)
    exact = outcome(plain, [x.detach().double().requires_grad_() for x in low], real)
    for ours, theirs in list(zip(outcome(concatenated, low, real), exact, strict=True))[:-1]:
        assert ours.isfinite().all() and (ours - theirs).norm() / theirs.norm() < tolerance


def test_concatenation_drops_weights():
    """The mean over many draws is the result without dropout."""
    q, k, v, *rest = (x.detach().float() for x in inputs(6))
    many = [x[:1].expand(2000, -1, -1, -1) for x in (q, k, v)]
    torch.manual_seed(0)
    out = concatenated(*many, *rest, None, SCALE, 0.2)
    exact = concatenated(*(x[:1] for x in many), *rest, None, SCALE, 0.0)
    spread = out.std(0) / 2000**0.5
    assert spread.min() > 0 and ((out.mean(0) - exact[0]).abs() < 5 * spread).all()


def test_cases_of_the_benchmark_agree():
    """What is measured side by side is one function."""
    outs = {}
    for name in (*BACKENDS, "concatenated"):
        case = bench_kernels.attention_case(name, 2, 9, torch.float32, "cpu", 0.0, heads=H, width=D)
        case.forward()
        case.backward()
        outs[name] = case.out.detach()
    for out in outs.values():
        torch.testing.assert_close(out, outs["plain"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_step_are_differentiated(dtype):
    """Every parameter of the encoder and of the LM head is in one of the parts, and gets a gradient in it."""
    cases = bench_kernels.step_cases(2, 8, 64, 96, 50, dtype, "cpu")
    count = 0
    for case in cases.values():
        case.forward()
        case.backward()
        gradients = torch.autograd.grad(case.compute(), case.inputs, case.grad)
        assert all(g.isfinite().all() for g in gradients) and any(g.abs().max() > 0 for g in gradients)
        count += len(case.inputs)
    assert cases["layer"].out.dtype == torch.float32 and cases["position terms"].out.dtype == torch.float32
    encoder, head = Encoder(50, 1, position="untied+t5", cls="untied", layers=1, width=64, ffn=96, heads=1,
                            max_positions=8), LMHead(64, 50)  # fmt: skip
    once = len(list(encoder.parameters())) - 2 + len(list(head.parameters()))  # without the embeddings' layer norm
    assert count == once + 4  # and the inputs x, bias and masked features, and the embedding a second time


def test_command():
    words = "--device cpu --tokens 16 --lengths 8,16 --vocab-size 50 --dropout 0.1 --turns 1"
    result = CliRunner().invoke(bench_kernels.command, words.split())
    printed = result.output
    assert result.exit_code == 0
    for dtype in ("float32", "bfloat16"):
        for name in (*BACKENDS, "concatenated"):
            assert f"| {name}, {dtype}, B 2, L 8 | " in printed and f"| {name}, {dtype}, B 1, L 16 | " in printed
    assert printed.count("| product, ") == 2
    for part in ("layer", "position terms", "token embeddings", "LM head and loss"):
        (row,) = (line for line in printed.splitlines() if line.startswith(f"| {part} |"))
        forward, backward, *half, ratio = map(float, row.strip("| ").split(" | ")[1:])
        assert len(half) == 2 and ratio == pytest.approx((forward + backward) / sum(half), rel=0.2, abs=0.02)
    plain_rows = [line for line in printed.splitlines() if line.startswith("| plain, ")]
    assert len(plain_rows) == 4 and all(row.endswith("| 1.00 |") for row in plain_rows)
