"""Options that make training faster or smaller, through fairseq's own loop: the losses of every update stay."""

import shutil

import pytest
import torch
from helpers import pretrain_arguments, train

STEPS = ["--max-update=5", "--no-save", "--num-workers=0"]


@pytest.fixture(scope="module")
def stock(data, tmp_path_factory):
    """fairseq's criterion and optimizer."""
    stock = ["--criterion=masked_lm", "--optimizer=adam"]
    return train(pretrain_arguments(data, tmp_path_factory.mktemp("stock"), *STEPS, *stock))


def assert_same(ours, stock, tolerance):
    assert len(ours) == len(stock) == 5 and len(set(stock)) == 5
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(stock), rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    "options, tolerance",
    [
        (["--criterion=masked_lm_chunked", "--optimizer=adamw_fused", "--checkpoint-activations"], 1e-4),
        (["--precision=autocast"], 0.01),
        (["--precision=bf16"], 0.01),
    ],
    ids=["all three", "autocast", "bf16"],
)
def test_same_losses(data, stock, options, tolerance, tmp_path):
    """With dropout: the same masks are drawn. Tolerance: relative, of losses and gradient norms."""
    assert_same(train(pretrain_arguments(data, tmp_path, *STEPS, *options)), stock, tolerance)


@pytest.mark.parametrize("precision", ["--fp16", pytest.param("--autocast=bf16", marks=pytest.mark.slow)])
def test_the_other_optimizer_continues_a_run_in_half_precision(precision, data, tmp_path, monkeypatch):
    """... and fairseq refuses it in float32, as `tupe.plugin.optim.FusedAdamW` says."""
    pytest.importorskip("fairseq")
    monkeypatch.setattr("tupe.plugin.recorded.choose_precision", lambda config: None)  # fp16 without a GPU
    first, second = tmp_path / "first", tmp_path / "second"
    steps = ["--fp16-no-flatten-grads", "--num-workers=0", "--max-update=4"]  # flat ones want a GPU
    steps += ["--save-interval-updates=2", "--keep-interval-updates=-1"]
    losses = train([*pretrain_arguments(data, first, *steps, "--optimizer=adam"), precision])
    resume = [f"--continue-once={first}/checkpoint_1_2.pt", "--optimizer=adamw_fused", "--no-save"]
    arguments = [*pretrain_arguments(data, second, *steps, *resume), precision]
    if precision == "--fp16":
        torch.testing.assert_close(torch.tensor(train(arguments)), torch.tensor(losses[2:]), rtol=1e-3, atol=0)
    else:
        with pytest.raises(AssertionError, match="FairseqAdam vs FusedAdamW"):
            train(arguments)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("dropout, tolerance", [(0, 1e-3), (0.1, 0.5)])
def test_compiled(data, dropout, tolerance, tmp_path):
    """With dropout, compiled code draws other masks."""
    options = [*STEPS, f"--dropout={dropout}", f"--attention-dropout={dropout}"]
    plain = train(pretrain_arguments(data, tmp_path / "plain", *options))
    torch._dynamo.reset()
    seen = torch._dynamo.utils.counters["frames"]
    ours = train(pretrain_arguments(data, tmp_path / "compiled", *options, "--compile=yes"))
    assert seen["ok"] > 0
    assert_same(ours, plain, tolerance)
