"""Measures training steps of our encoders and of the common alternatives, side by side.

Every contender has its own process (and so its own peak memory), and all take turns with the same tokens and the same
masked positions.

B batch, L sequence length, N layers.
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: keeps fairseq's import quiet)
import importlib
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import torch
from fairseq.data import indexed_dataset
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask

from ..common import options
from ..common.options import Command, ListOf
from ..common.processes import workers
from ..common.record import command_line
from . import report
from .contenders import (
    CONTENDERS,
    HF,
    MASKED,
    PEAK_SIZE,
    Contender,
    Setting,
    check_available,
    default_models,
    dictionary,
    flops_per_token,
    matrix_peak,
)
from .machine import DEVICE, PRECISIONS, environment, memory_available, memory_peak, release_memory
from .turns import Lost, take_turns, write

START = "forkserver"  # CUDA works in none that is forked from this process


def libraries(names: list[str]) -> list[str]:
    """Modules that contenders import. Every process imports all of them, so that none alone has their memory."""
    return ["tupe.bench.step"] + ["transformers.models.bert.modeling_bert"] * bool(set(HF) & set(names))


def memory_needed(names: list[str], setting: Setting) -> int:
    """A rough estimate in bytes: weights and Adam's moments of all contenders, and the gradients and activations of a
    step of the one that needs most, which keeps three [B, H, L, L] tensors per layer and all logits in float32."""
    layers, width, heads, ffn = setting.dims()
    weights = setting.vocab * width + layers * (4 * width**2 + 2 * width * ffn)
    tokens = setting.batch * setting.length
    step = tokens * 4 * (layers * (12 * width + 4 * ffn + 3 * heads * setting.length) + 4 * setting.vocab)
    return 12 * weights * len(names) + 4 * weights + step


own = SimpleNamespace(step=None, memory=0.0)  # of this process: its contender's step, and its peak memory before it


def begin(name: str, names: list[str], setting: Setting) -> None:
    """Build a contender in a process of its own."""
    if setting.threads:
        torch.set_num_threads(setting.threads)
    for module in libraries(names):
        importlib.import_module(module)
    own.memory = memory_peak(setting.device)
    own.step = matrix_peak(setting) if name == "peak" else Contender(name, setting).step


def take_turn(device: str, turn: int) -> tuple[list[float], float]:
    """(times of a step, peak memory in MiB) of this process's contender."""
    own.step(turn)  # untimed: it allocates the released memory again
    times = own.step(turn)
    release_memory(device)
    return times, memory_peak(device) - own.memory


def measure(
    names: list[str], setting: Setting, rounds: int, warmup: int = 1, say: Callable[[str], Any] = click.echo
) -> dict:
    """{name: {"steps": seconds [rounds][3], "memory": MiB}}, and the times of the large product under "peak".

    say: called with a line after every turn. Raises ValueError for contenders that cannot be built or do not fit into
    memory.
    """
    check_available(names)
    needed, free = memory_needed(names, setting), memory_available()
    if setting.device == "cpu" and free is not None and needed > free:
        raise ValueError(
            f"{len(names)} contenders at L = {setting.length}, N = {setting.dims()[0]} need about "
            f"{needed / 2**30:.0f} GiB of memory, {free / 2**30:.0f} GiB are free; "
            "use fewer models, tokens or layers"
        )
    multiprocessing.set_forkserver_preload(libraries(names))  # imported once
    memory = {}

    def step(name, turn):
        try:
            times, memory[name] = processes[name].submit(take_turn, setting.device, turn).result()
        except BrokenExecutor as error:
            raise Lost(f"the process of {name} ended, probably because memory ran out") from error
        except RuntimeError as error:  # such as CUDA's memory
            raise Lost(f"{name}: {error}") from error
        return times

    with ExitStack() as stack:
        processes = {name: stack.enter_context(workers(1, method=START)) for name in ["peak", *names]}
        for built in [process.submit(begin, name, names, setting) for name, process in processes.items()]:
            built.result()
        steps = take_turns({name: partial(step, name) for name in processes}, rounds, warmup, say)
    return {name: {"steps": steps[name], "memory": memory[name]} for name in processes}


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


def summary(results: dict, names: list[str], setting: Setting) -> list[dict]:
    """One row (dict) per contender."""
    tokens = setting.batch * setting.length
    peak = 2 * PEAK_SIZE[setting.device] ** 3 / results["peak"]["steps"].min()
    seconds = {name: results[name]["steps"].sum(axis=1) for name in names}
    rows = []
    for name in names:
        steps = results[name]["steps"]
        speed = tokens / statistics.median(seconds[name])
        forward, backward, optimizer = np.median(steps, axis=0).tolist()
        rows.append({
            "contender": name, **asdict(setting), "layers": setting.dims()[0], "rounds": len(steps),
            "tokens_per_s": speed,
            "forward_s": forward, "backward_s": backward, "optimizer_s": optimizer, "steps": steps.tolist(),
            "memory_mib": results[name]["memory"],
            "flops_per_token": flops_per_token(setting, name), "peak_flops": peak,
            "share_of_peak": speed * flops_per_token(setting, name) / peak,
            "times_as_fast": {b: statistics.median(seconds[b] / seconds[name]) for b in names if b != name},
        })  # fmt: skip
    return rows


# ---- the data loader


def loader_speed(
    folder: str, workers: int, length: int = 512, blocks: int = 2000, batch: int = 32, vocab: int = 32768
) -> float:
    """Tokens per second of fairseq's masked-LM data pipeline, without training."""
    words, path = dictionary(vocab), os.path.join(folder, "train")
    words.save(os.path.join(folder, "dict.txt"))
    builder = indexed_dataset.make_builder(path + ".bin", impl="mmap", vocab_size=vocab)
    generator = torch.Generator().manual_seed(0)
    for _ in range(blocks):
        for part in torch.randint(5, vocab, (length - 1,), generator=generator).split(32):  # sentences
            builder.add_item(part.int())
    builder.finalize(path + ".idx")
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
@click.option("--models", type=ListOf(CONTENDERS), help=f"of {', '.join(CONTENDERS)}; default: no variants of tupe_r")
@options.size()
@click.option("--lengths", type=ListOf(int), default="512", show_default=True, metavar="L,...")
@click.option("--layers", type=ListOf(int), default="0", show_default=True, metavar="N,...", help="0: of the size")
@click.option("--tokens", default=2048, show_default=True, help="tokens of a batch; B = tokens / L")
@options.vocab_size()
@click.option("--precision", type=ListOf(list(PRECISIONS)), default="float32", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default=DEVICE, help="default: a GPU if there is one")
@click.option("--threads", default=0, help="of each process; 0: PyTorch's default")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="measured steps of each model")
@click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="steps of each before these")
@click.option("--project", default=0, metavar="DEVICES", help="project the days of the paper's pre-training")
@click.option("--loader", type=click.IntRange(0), metavar="WORKERS", help="measure the data loader alone")
@click.option("--output", type=Path, default=Path("bench"), show_default=True, help="OUTPUT.json, .md and .png")
def command(
    models, size, lengths, layers, tokens, vocab_size, precision, device, threads, rounds, warmup, project, loader,
    output,
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
    check_available(models)
    about = {"command": command_line(), **environment()}
    base = Setting(size, vocab=vocab_size, device=device, threads=threads)
    settings = cross(base, lengths, layers, tokens)
    settings = [replace(setting, precision=name) for name in precision for setting in settings]

    rows = []
    for number, setting in enumerate(settings, 1):
        label = f"{setting.precision} L={setting.length} N={setting.dims()[0]} (setting {number}/{len(settings)})"
        results = measure(models, setting, rounds, warmup, lambda line, label=label: click.echo(f"{label} {line}"))
        rows += summary(results, models, setting)
        write(output, {"about": about, "rows": rows}, report.markdown(rows, about, project), report.of_steps(rows))
    click.echo(report.markdown(rows, about, project))
