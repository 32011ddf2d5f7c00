"""Measures training steps of our encoders and of the common alternatives, side by side.

All contenders take turns with the same tokens and the same masked positions.

B batch, L sequence length, N layers.
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: keeps fairseq's import quiet)
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

from ..common import options
from ..common.active import is_out_of_memory, reason
from ..common.blocks import write_split
from ..common.options import Command, ListOf
from ..common.record import command_line
from . import report
from .contenders import (
    CONTENDERS,
    MASKED,
    PEAK_SIZE,
    Contender,
    Setting,
    default_models,
    dictionary,
    flops_per_token,
    matrix_peak,
)
from .machine import DEVICE, PRECISIONS, Level, environment, memory_available
from .turns import compared, write


def memory_needed(names: list[str], setting: Setting) -> int:
    """A rough estimate in bytes: weights and Adam's moments of all contenders, and the gradients and activations of a
    step of the one that needs most, which keeps three [B, H, L, L] tensors per layer and all logits in float32."""
    layers, width, heads, ffn = setting.dims()
    weights = setting.vocab * width + layers * (4 * width**2 + 2 * width * ffn)
    tokens = setting.batch * setting.length
    step = tokens * 4 * (layers * (12 * width + 4 * ffn + 3 * heads * setting.length) + 4 * setting.vocab)
    return 12 * weights * len(names) + 4 * weights + step


def measure(
    names: list[str], setting: Setting, rounds: int, say: Callable[[str], Any] = click.echo,
    make: Callable[[str, Setting], Contender] | None = None,
) -> list[dict]:  # fmt: skip
    """A row (dict) per contender, but for those that run out of memory. say: called with a line for each of these, and
    after every turn. make: in place of `Contender`. Raises ValueError for contenders that cannot be built, and if none
    fits."""
    needed, free = memory_needed(names, setting), memory_available()
    if setting.device == "cpu" and free is not None and needed > free:
        raise ValueError(
            f"{len(names)} contenders at L = {setting.length}, N = {setting.dims()[0]} need about "
            f"{needed / 2**30:.0f} GiB of memory, {free / 2**30:.0f} GiB are free; "
            "use fewer models, tokens or layers"
        )
    steps, memory = {"peak": matrix_peak(setting)}, {}
    for name in names:
        contender = kept = None
        try:
            contender = (make or Contender)(name, setting)
            contender.step(0)  # not in a mode, in which nothing would ever be compiled
            kept = contender.kept()
            peak = peak_of(contender, kept, setting.device)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            say(f"{name} is left out: {reason(error)}")
            continue
        memory[name] = (peak + sum(tensor.nbytes for tensor in kept)) / 2**20
        steps[name] = contender.step
    if not memory:
        raise ValueError(f"no contender fits into memory at L = {setting.length}, N = {setting.dims()[0]}")
    about = {**asdict(setting), "layers": setting.dims()[0], "rounds": rounds}
    about["mode"] = setting.mode
    about["setting"] = "{mode}, N = {layers}, L = {length}".format_map(about)
    peak, *rows = compared(steps, rounds, about, say)
    for row in rows:
        row.update(quantities(row, peak, setting), memory_mib=memory[row["contender"]])
        del row["times_as_fast"]["peak"]
    return rows


def peak_of(contender: Contender, kept: list[torch.Tensor], device: str) -> int:
    """Bytes that a step takes beside what is kept. On a GPU its allocator is asked, because compiled code passes by
    `Level`."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender.step(0)
        return torch.cuda.max_memory_allocated() - before
    # In a mode nothing is compiled; and what is tried in one never would be again.
    as_it_is = torch.compiler.set_stance("force_eager") if torch.__version__ >= "2.6" else nullcontext()
    with as_it_is, Level(kept) as level:
        contender.step(0)
    return level.peak


def quantities(row: dict, peak: dict, setting: Setting) -> dict:
    """What follows from the times of a contender and of the large products."""
    fastest = 2 * PEAK_SIZE[setting.device] ** 3 / np.min(peak["steps"])
    speed = setting.batch * setting.length / statistics.median(map(sum, row["steps"]))
    flops = flops_per_token(setting, row["contender"])
    forward, backward, optimizer = np.median(row["steps"], axis=0).tolist()
    return {
        "tokens_per_s": speed, "forward_s": forward, "backward_s": backward, "optimizer_s": optimizer,
        "flops_per_token": flops, "peak_flops": fastest, "share_of_peak": speed * flops / fastest,
    }  # fmt: skip


def cross(base: Setting, lengths: list[int], layers: list[int], tokens: int) -> list[Setting]:
    """The settings: every length at the first number of layers, every number of layers at the first length.

    Raises ValueError for a length longer than the tokens of a batch.
    """
    if max(lengths) > tokens:
        raise ValueError(f"a batch of {tokens} tokens holds no sequence of {max(lengths)}; use more --tokens")
    pairs = [(n, lengths[0]) for n in layers] + [(layers[0], length) for length in lengths[1:]]
    return [
        replace(base, layers=replace(base, layers=n).dims()[0]).of_length(length, tokens)
        for n, length in dict.fromkeys(pairs)
    ]


# ---- the data loader


def loader_speed(
    folder: str, workers: int, length: int = 512, blocks: int = 2000, batch: int = 32, vocab: int = 32768
) -> float:
    """Tokens per second of fairseq's masked-LM data pipeline, without training."""
    words, path = dictionary(vocab), os.path.join(folder, "train")
    words.save(os.path.join(folder, "dict.txt"))
    generator = torch.Generator().manual_seed(0)
    texts = (torch.randint(5, vocab, (length - 1,), generator=generator) for _ in range(blocks))
    write_split(path, (sentence for text in texts for sentence in text.split(32)), vocab)
    config = MaskedLMConfig(data=folder, tokens_per_sample=length, sample_break_mode="complete", mask_prob=MASKED)
    config.seed, config.shorten_method = 1, "none"
    task = MaskedLMTask.setup_task(config)
    task.load_dataset("train")
    epoch = task.get_batch_iterator(
        task.dataset("train"), max_sentences=batch, num_workers=workers, seed=1
    ).next_epoch_itr(shuffle=True)
    tokens, start = 0, None
    for sample in epoch:
        start = start or time.perf_counter()  # after the first batch, which includes the start of the workers
        tokens += sample["ntokens"]
    return (tokens - batch * length) / (time.perf_counter() - start)


# ---- the command


@click.command(cls=Command)
@click.option("--models", type=ListOf(CONTENDERS),
              help=f"Models of {', '.join(CONTENDERS)} (default: without variants of tupe_r).")  # fmt: skip
@options.size()
@click.option("--lengths", type=ListOf(int, least=1), default="512", show_default=True, metavar="L,...",
              help="Tokens of a sequence.")  # fmt: skip
@click.option("--layers", type=ListOf(int, least=0), default="0", show_default=True, metavar="N,...",
              help="The number of layers; 0 takes those of the size.")  # fmt: skip
@click.option("--tokens", default=2048, show_default=True, help="Tokens of a batch.")
@options.vocab_size()
@click.option(
    "--precision", type=ListOf(list(PRECISIONS)), default="float32", show_default=True,
    help="Precisions to measure in; half ones by autocast.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default=DEVICE,
              help="Where to measure (default: a GPU if there is one).")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Measured steps of each model.")
@click.option(
    "--project", default=0, metavar="DEVICES", help="Project the days of the paper's pre-training on so many."
)
@click.option(
    "--loader", type=click.IntRange(0), metavar="WORKERS", help="Measure only the data loader, with so many processes."
)
@click.option("--output", type=Path, default=Path("bench"), show_default=True,
              help="The files to write: OUTPUT.json, .md and .png.")  # fmt: skip
def command(
    models, size, lengths, layers, tokens, vocab_size, precision, device, rounds, project, loader, output
):  # fmt: skip
    """Compare masked-LM training steps: our encoders, fairseq's RoBERTa, Hugging Face's BERT.

    \b
    tupe bench step                                    base size, L = 512, float32
    tupe bench step --lengths 512,128,2048 --layers 4,12 --precision float32,bf16 --project 16

    Measures all lengths at the first number of layers, and all numbers of layers at the first length, and writes its
    results after each of these settings. Nothing else should run on the machine.
    """
    if loader is not None:
        with tempfile.TemporaryDirectory() as folder:
            speed = loader_speed(folder, loader, lengths[0], vocab=vocab_size)
        click.echo(f"{speed:.0f} tokens/s from {loader} workers")
        return
    models = models or default_models()
    about = {"command": command_line(), **environment()}
    base = Setting(size, vocab=vocab_size, device=device)
    settings = cross(base, lengths, layers, tokens)
    settings = [replace(setting, precision=name) for name in precision for setting in settings]

    rows = []
    for number, setting in enumerate(settings, 1):
        label = f"{setting.mode} L={setting.length} N={setting.dims()[0]} (setting {number}/{len(settings)})"
        rows += measure(models, setting, rounds, lambda line, label=label: click.echo(f"{label} {line}"))
        write(output, {"about": about, "rows": rows}, report.markdown(rows, about, project), report.picture(rows))
    click.echo(report.markdown(rows, about, project))
