"""Training steps of our encoders and of the common alternatives, side by side.

All contenders take turns with the same tokens and the same masked positions.

L sequence length, N layers.
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: keeps fairseq's import quiet)
import statistics
from collections.abc import Callable
from dataclasses import asdict

import click
import numpy as np
import torch

from tupe.common import options
from tupe.common.active import reason
from tupe.common.options import Command, ListOf
from tupe.run.record import command_line

from .contenders import CONTENDERS, PEAK_SIZE, Contender, Setting, flops_per_token, matrix_peak, settings
from .instrument import batches, compared, comparison, write
from .machine import Level, environment

COLUMNS = {
    "tokens/s": "{tokens_per_s:.0f}", "of the peak": "{share_of_peak:.0%}", "forward ms": "{ms[0]:.1f}",
    "backward ms": "{ms[1]:.1f}", "optimizer ms": "{ms[2]:.1f}", "MiB": "{memory_mib:.0f}",
}  # fmt: skip
ASSUMPTIONS = """\
FLOP per token of one training step: 6 per weight of a matrix product (2 forward, 4 backward); 12 C L per layer for
q . k and weights . v, where L is the number of keys that a query sees; LM head, and of ours the last layer after its
attention, at the 15 % masked tokens only (Hugging Face's BERT computes its head at all, which counts as time but not as
FLOP). Not counted: recomputation, embeddings, position terms, element-wise operations, the optimizer.

Every contender has the same sizes, tokens, masked positions, dropout 0.1 and precision (half: autocast with
float32 weights), and clips gradients at 1; ours and Hugging Face's use PyTorch's fused AdamW, fairseq's RoBERTa uses
fairseq's Adam, as their users do. Contenders take turns in one process, each turn in a new random order.
Times are medians over turns. MiB: the most that a contender's tensors take at once in a step, weights, gradients and
moments included. The peak is the fastest square product of size 2048 (on a GPU 8192), three in every turn."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a GPU or the machine ran out of memory."""
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def measure(
    names: list[str], setting: Setting, turns: int, make: Callable[[str, Setting], Contender] | None = None
) -> list[dict]:
    """A row per contender, but for those that run out of memory. make: in place of `Contender`.

    Raises ValueError for contenders that cannot be built, and if none fits.
    """
    steps, memory = {"peak": matrix_peak(setting)}, {}
    for name in names:
        contender = kept = None  # the memory of one that did not fit is free again
        try:
            contender = (make or Contender)(name, setting)
            contender.step(0)  # not in a mode, in which nothing would ever be compiled
            kept = contender.kept()
            peak = peak_of(contender, kept, setting.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            click.echo(f"{name} is left out: {reason(error)}", err=True)
            continue
        memory[name] = (peak + sum(tensor.nbytes for tensor in kept)) / 2**20
        steps[name] = contender.step
    if not memory:
        raise ValueError(f"no contender fits into memory: {setting}")
    about = {**asdict(setting), "layers": setting.dims()[0], "mode": setting.mode, "setting": str(setting)}
    peak, *rows = compared(steps, turns, about)
    return [{**row, **quantities(row, peak, setting), "memory_mib": memory[row["contender"]]} for row in rows]


def peak_of(contender: Contender, kept: list[torch.Tensor], device: str) -> int:
    """Bytes that a step takes beside what is kept. On a GPU its allocator is asked, because compiled code passes by
    `Level`."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender.step(0)
        return torch.cuda.max_memory_allocated() - before
    # In a mode nothing is compiled; and what is tried in one never would be again.
    with torch.compiler.set_stance("force_eager"), Level(kept) as level:
        contender.step(0)
    return level.peak


def quantities(row: dict, peak: dict, setting: Setting) -> dict:
    """What follows from the times of a contender and of the large products."""
    fastest = 2 * PEAK_SIZE[setting.device] ** 3 / np.min(peak["steps"])
    speed = setting.batch * setting.length / statistics.median(map(sum, row["steps"]))
    flops = flops_per_token(setting, row["contender"])
    forward, backward, optimizer = (ms / 1e3 for ms in row["ms"])
    return {
        "tokens_per_s": speed, "forward_s": forward, "backward_s": backward, "optimizer_s": optimizer,
        "flops_per_token": flops, "peak_flops": fastest, "share_of_peak": speed * flops / fastest,
    }  # fmt: skip


@click.command(cls=Command)
@click.option("--models", type=ListOf(CONTENDERS), default="tupe_r,tupe_a,bert_a,nopos,fairseq,hf", show_default=True,
              help=f"Models of {', '.join(CONTENDERS)}.")  # fmt: skip
@options.size()
@click.option("--layers", type=click.IntRange(0), default=0, help="The number of layers (default: those of the size).")
@click.option("--vocab-size", type=click.IntRange(1), default=32768, show_default=True, help="Types of the vocabulary.")
@batches
@comparison
def command(models, size, layers, vocab_size, lengths, tokens, precision, device, turns, output):
    """Compare masked-LM training steps: our encoders, fairseq's RoBERTa, Hugging Face's BERT.

    \b
    python -m lab bench step --output step                         base size, L = 512, float32
    python -m lab bench step --lengths 512,128,2048 --precision float32,bf16 --output step

    Writes its results after each length and precision. Nothing else should run on the machine. It takes the memory of
    all models, and of one step.
    """
    about, rows = {"command": command_line(), **environment()}, []
    for setting in settings(Setting(size, layers, vocab=vocab_size, device=device), lengths, tokens, precision):
        rows += measure(models, setting, turns)
        page = write(output, about, rows, COLUMNS, ASSUMPTIONS)
    click.echo(page)
