"""What is measured side by side is one function, and the tables are complete."""

import torch
from click.testing import CliRunner

from lab.bench import kernels as bench_kernels

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


def test_what_is_compared_is_one_function():
    """Of products and dropout: the same shapes, and without dropout's zeros the same numbers, forward and backward."""
    for what, ways in bench_kernels.cases(["plain"], [8], 16, torch.float32, "cpu"):
        found = {}
        for way, case in ways.items():
            case.forward()
            grad = torch.ones_like(case.out)
            found[way] = [case.out.detach(), *torch.autograd.grad(case.out, case.inputs, grad)]
        if "PyTorch" in found:
            for theirs, ours in zip(found["PyTorch"], found["here"], strict=True):
                kept = (theirs != 0) & (ours != 0)
                assert kept.float().mean() > 0.7, what
                torch.testing.assert_close(theirs[kept], ours[kept], rtol=1e-3, atol=1e-3)


def test_command(tmp_path):
    output = f"--output={tmp_path}/out"
    words = "--device cpu --tokens 16 --lengths 8,16 --precision float32,bf16 --turns 1"
    result = CliRunner().invoke(bench_kernels.command, [*words.split(), output])
    assert result.exit_code == 0, result.output
    page = result.stdout
    for kind in ("float32", "bf16"):
        for what, ways in (("product of 16 tokens", 2), ("dropout of 16 tokens", 2)):
            assert page.count(f"| {what}, {kind} | ") == ways
        for batch, length in ((2, 8), (1, 16)):
            for path in PATHS:
                assert f"| attention, B = {batch}, L = {length}, dropout 0.1, {kind} | {path} | " in page
    result = CliRunner().invoke(bench_kernels.command, ["--device=cpu", "--paths=plain,triton", output])
    assert result.exit_code == 2 and "--paths triton: not for cpu" in result.output
