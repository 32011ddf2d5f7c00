"""What is measured side by side is one function, and the tables are complete."""

import pytest
import torch
from click.testing import CliRunner

from tupe.bench import kernels as bench_kernels
from tupe.encoder import Encoder, LMHead

PATHS = ("plain", "sdpa", "blocked")


def test_cases_of_the_benchmark_agree():
    """What is measured side by side is one function."""
    outs = {}
    for name in PATHS:
        case = bench_kernels.attention_case(name, 2, 9, torch.float32, "cpu", 0.0, heads=2, width=8)
        case.forward()
        case.backward()
        outs[name] = case.out.detach()
    for out in outs.values():
        torch.testing.assert_close(out, outs["plain"], rtol=1e-4, atol=1e-5)


def test_padding_and_no_bias():
    """Padded tokens have no output and no gradients; without a bias none is added."""
    for name in ("plain", "sdpa"):
        case = bench_kernels.attention_case(name, 2, 9, torch.float32, "cpu", 0.0, heads=2, width=8, padded=4)
        case.forward()
        gradients = torch.autograd.grad(case.out.sum(), case.inputs)
        assert all((x[0, :, 5:] == 0).all() and (x[1] != 0).any() for x in (case.out, *gradients[:3])), name
        case = bench_kernels.attention_case(name, 2, 9, torch.float32, "cpu", 0.0, heads=2, width=8, biased=False)
        q, k, v = case.inputs
        case.forward()
        torch.testing.assert_close(case.out, (q @ k.transpose(2, 3) / 4).softmax(-1) @ v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
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
        for name in PATHS:
            assert f"| {name}, {dtype}, B 2, L 8 | " in printed and f"| {name}, {dtype}, B 1, L 16 | " in printed
    assert printed.count("| product, ") == 2
    for part in ("layer", "position terms", "token embeddings", "LM head and loss"):
        (row,) = (line for line in printed.splitlines() if line.startswith(f"| {part} |"))
        forward, backward, *half, ratio = map(float, row.strip("| ").split(" | ")[1:])
        assert len(half) == 2 and ratio == pytest.approx((forward + backward) / sum(half), rel=0.2, abs=0.02)
    plain_rows = [line for line in printed.splitlines() if line.startswith("| plain, ")]
    assert len(plain_rows) == 4 and all(row.endswith("| 1.00 |") for row in plain_rows)
    result = CliRunner().invoke(bench_kernels.command, ["--device=cpu", "--paths=plain,triton"])
    assert result.exit_code == 2 and "--paths triton: not for cpu" in result.output
