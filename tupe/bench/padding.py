"""Fine-tuning and inference on texts of real lengths: our encoder, with and without work on padding, beside the common
alternatives of the same size.

All contenders have random weights, live in one process and take turns on the same batches; the ratio of two is the
median over turns of the ratio within a turn.

B batch, L length of its longest text, V vocabulary.
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: keeps fairseq's import quiet)
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
import torch.nn.functional as F
from fairseq.data import data_utils
from matplotlib.figure import Figure
from torch import Tensor, nn

from ..common import options
from ..common.architectures import SIZES
from ..common.glue import TASKS, glue_name
from ..common.options import Command, ListOf
from ..common.record import command_line
from ..common.tables import TextTable
from ..packing import NO_PADDING, Packing
from ..plugin.glue import Pairs
from ..plugin.model import TupeModel
from ..plugin.optim import FusedAdamW, FusedAdamWConfig
from ..plugin.pretrained import load_dictionary
from ..plugin.squad_data import Encoded, Windows
from ..token_positions import TokenPositions
from . import contenders, report
from .contenders import PAD, Setting
from .machine import DEVICE, PRECISIONS, environment
from .turns import Step, take_turns, timed, write

LONGEST = 512
FINETUNE = ["ours", "ours-padded", "fairseq", "hf"]
INFERENCE = ["ours", "ours-padded", "export", "hf", "hf-eager", "modernbert"]
CONTENDERS = list(dict.fromkeys([*FINETUNE, *INFERENCE, "ours-even"]))


class Batch(NamedTuple):
    tokens: Tensor  # [B, L], PAD at the end of shorter texts
    real: Tensor  # [B, L]
    count: int  # of real tokens
    labels: Tensor  # [B]


def texts(data: Path, task: str, split: str) -> Windows | Pairs:
    """The texts of a task, of at most `LONGEST` tokens, special ones included. data: folder that `tupe prepare glue`
    and, for SQuAD-1.1 and SQuAD-2.0, `tupe prepare squad` wrote. split: "train" or "valid".

    Raises ValueError for an unknown task or one that was not prepared.
    """
    words = load_dictionary(data / "dict.txt")
    if task.startswith("SQuAD-"):
        encoded = Encoded.load(data, {"train": "train", "valid": "dev"}[split], task.removeprefix("SQuAD-"))
        return Windows(encoded, words, LONGEST, stride=128, max_query=64)
    name = glue_name(task)
    parts = [data / name / f"input{i}" / split for i in range(len(TASKS[name].text))]
    if not parts[0].with_suffix(".idx").exists():
        raise ValueError(f"{data} holds no {name}; `tupe prepare glue` writes it")
    first, *second = (data_utils.load_indexed_dataset(str(part), words) for part in parts)
    return Pairs(first, second[0] if second else None, words, LONGEST)


def count_pieces(texts: Windows | Pairs) -> int:
    """How many different pieces the texts have."""
    seen = set()
    for i in range(len(texts)):
        text = texts[i]
        seen.update((text["tokens"] if isinstance(text, dict) else text).tolist())
    return len(seen)


def batches(
    sizes: np.ndarray, pieces: int, size: int, count: int, vocab: int, device: str, seed: int
) -> Iterator[Batch]:
    """Random batches of `size` texts of random tokens, among the first `pieces` of the vocabulary, whose lengths are
    drawn from `sizes`."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        drawn = torch.from_numpy(rng.choice(sizes, size))[:, None]
        tokens = torch.from_numpy(rng.integers(5, min(max(pieces, 6), vocab), (size, int(drawn.max()))))
        real = torch.arange(tokens.size(1)) < drawn
        tokens[:, 0] = 0
        labels = torch.from_numpy(rng.integers(0, 2, size))
        tensors = (x.to(device) for x in (tokens.masked_fill(~real, PAD), real))
        yield Batch(*tensors, int(real.sum()), labels.to(device))


# --------------------------------------------------------------------------------------------------------- contenders


def build(name: str, setting: Setting) -> tuple[nn.Module, Callable[[Batch], Tensor]]:
    """A contender's model and the function of a batch to its logits [B, 2]."""
    if name == "export":
        model = build_export(setting)
    else:
        model = contenders.build("tupe_r" if name.startswith("ours") else name, setting, classes=2)
    if name == "ours-padded":
        model.encoder.packing = keep_padding  # in place of the method
        model.encoder.transform = partial(keep_all, model.encoder.transform)
    if name == "fairseq":
        return model, lambda batch: model(batch.tokens, classification_head_name="head")[0]
    if not name.startswith("ours"):
        return model, lambda batch: model(batch.tokens, attention_mask=batch.real.long()).logits

    def logits(batch):
        batch = even(batch) if name == "ours-even" else batch
        return model(batch.tokens, classification_head_name="head", num_tokens=batch.count)[0]

    return model, logits


def even(batch: Batch) -> Batch:
    """The batch's tokens in texts of one length, without padding: how fast ours would be if padding cost nothing. (Less
    than a token of each text is left out.)"""
    rows, length = len(batch.tokens), batch.count // len(batch.tokens)
    tokens = batch.tokens[batch.real][: rows * length].view(rows, length)
    return Batch(tokens, tokens.ne(PAD), tokens.numel(), batch.labels)


def keep_padding(tokens: Tensor, num_tokens: int) -> Packing:
    """What `Encoder.packing` would return if nothing were packed: padding is masked in attention, and computed."""
    return NO_PADDING if num_tokens == tokens.numel() else Packing(tokens.ne(PAD))


def keep_all(
    transform: Callable, x: Tensor, positions: TokenPositions, packing: Packing, hiddens: bool, output_indices: Tensor
) -> tuple[Tensor, None]:
    """`Encoder.transform` whose last layer computes all tokens, too."""
    return transform(x, positions, packing)[0].flatten(0, 1)[output_indices], None


def build_export(setting: Setting) -> nn.Module:
    """TUPE-R as the transformers library loads it from what `tupe checkpoint export` writes."""
    from .. import hf  # needs transformers

    torch.manual_seed(0)
    layers, width, heads, ffn = setting.dims()
    config = hf.TupeConfig(
        setting.vocab, num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=ffn,
        max_position_embeddings=setting.length, position="untied+t5", cls_position="untied",
    )  # fmt: skip
    return hf.TupeForSequenceClassification(config).to(setting.device)


# -------------------------------------------------------------------------------------------------------- measurement


def training_step(model: nn.Module, logits: Callable[[Batch], Tensor]) -> Callable[[Batch], None]:
    """Forward and backward pass, clipping and AdamW: ours (`optim.FusedAdamW`), or PyTorch's fused one as in Hugging
    Face's Trainer."""
    model.train()
    ours = isinstance(model, TupeModel)
    if ours:
        optimizer = FusedAdamW(FusedAdamWConfig(lr=[1e-5]), model.parameters())
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(batch: Batch) -> None:
        F.cross_entropy(logits(batch).float(), batch.labels).backward()
        if ours:
            optimizer.clip_grad_norm(1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def inference_step(model: nn.Module, logits: Callable[[Batch], Tensor]) -> Callable[[Batch], None]:
    """A forward pass without gradients."""
    model.eval()
    return torch.inference_mode()(logits)


def on_batches(function: Callable[[Batch], Any], drawn: list[Batch], precision: str, device: str) -> Step:
    """The step of a contender: every turn has a batch."""

    def compute(turn):
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            function(drawn[turn])

    return lambda turn: timed(device, partial(compute, turn))(turn)


def rows(seconds: dict, counted: list[Batch], about: dict) -> list[dict]:
    """A row per contender; times_as_fast: of the first contender, as a multiple of this one's speed."""
    texts, tokens = sum(len(batch.tokens) for batch in counted), sum(batch.count for batch in counted)
    slots = sum(batch.tokens.numel() for batch in counted)
    first = next(iter(seconds.values()))
    return [
        {
            **about, "contender": name, "padding": 1 - tokens / slots,
            "texts_per_s": texts / times.sum(), "tokens_per_s": tokens / times.sum(),
            "times_as_fast": statistics.median(times / first), "seconds": times.tolist(),
        }
        for name, times in seconds.items()
    ]  # fmt: skip


def table(measured: list[dict]) -> TextTable:
    """The rows of one list, with the first contender's speed over each."""
    header = ["size", "lengths", "batch", "precision", "padding", "contender", "texts/s", "tokens/s"]
    cells = [
        [
            row["size"], row["task"], str(row["batch"]), row["precision"], f"{row['padding']:.0%}", row["contender"],
            f"{row['texts_per_s']:.1f}", f"{row['tokens_per_s']:.0f}", f"{row['times_as_fast']:.2f}",
        ]
        for row in measured
    ]  # fmt: skip
    first = measured[0]["contender"]
    return TextTable.plain([*header, f"{first}: times as fast"], cells, align="llrlrlrrr")


def picture(measured: list[dict]) -> Figure:
    """The same, a line per setting."""
    ratios, first = {}, measured[0]["contender"]
    for row in measured:
        others = ratios.setdefault(f"{row['size']}, {row['task']}, batch {row['batch']}, {row['precision']}", {})
        if row["contender"] != first:
            others[row["contender"]] = row["times_as_fast"]
    return report.picture(first, ratios)


def shared(tasks: str, size: str, batch: str, names: list[str]) -> Callable:
    """The options of both commands."""

    def decorate(function: Callable) -> Callable:
        for decorator in (
            options.output("OUTPUT.json, .md and .png"),
            options.seed(help="of lengths and tokens"),
            click.option("--device", type=click.Choice(["cpu", "cuda"]), default=DEVICE, help="default: a GPU if any"),
            click.option("--turns", type=click.IntRange(1), default=10, show_default=True, help="batches of each"),
            click.option("--precision", type=ListOf(list(PRECISIONS)), default="float32", show_default=True),
            click.option("--contenders", "names", type=ListOf(CONTENDERS), default=",".join(names), show_default=True),
            options.vocab_size(),
            click.option("--batch", type=ListOf(int), default=batch, show_default=True, metavar="B,..."),
            click.option("--sizes", type=ListOf(list(SIZES)), default=size, show_default=True, metavar="SIZE,..."),
            click.option("--tasks", type=ListOf(str), default=tasks, show_default=True, metavar="NAME,..."),
            options.data("what `tupe prepare glue` (and `tupe prepare squad`) wrote"),
        ):
            function = decorator(function)
        return function

    return decorate


def measure(
    make_step: Callable, split: str, data: Path, tasks: list[str], sizes: list[str], batch: list[int], vocab_size: int,
    names: list[str], precision: list[str], turns: int, device: str, seed: int, output: Path,
) -> None:  # fmt: skip
    """Measure every combination, print a table, and write it after every size."""
    of_task = {task: texts(data, task, split) for task in tasks}
    pieces = {task: count_pieces(of_task[task]) for task in tasks}
    measured, about = [], {"command": command_line(), "pieces": pieces, **environment()}
    for size in sizes:
        for task in tasks:
            functions = {}
            for name in names:
                model, logits = build(name, Setting(size, length=LONGEST, vocab=vocab_size, device=device))
                functions[name] = make_step(model, logits)
            for number, kind in ((b, p) for b in batch for p in precision):
                drawn = list(batches(of_task[task].sizes, pieces[task], number, turns + 1, vocab_size, device, seed))
                steps = {name: on_batches(function, drawn, kind, device) for name, function in functions.items()}
                seconds = {name: times.sum(axis=1) for name, times in take_turns(steps, turns).items()}
                measured += rows(seconds, drawn[1:], {"size": size, "task": task, "batch": number, "precision": kind})
                click.echo(f"{size}, {task}, batch {number}, {kind}: measured", err=True)
        write(output, {"about": about, "rows": measured}, table(measured).markdown(), picture(measured))
    click.echo(table(measured).markdown())


@click.command(cls=Command)
@shared("CoLA,RTE", "mini,base", "32", FINETUNE)
def finetune(**arguments):
    """Compare steps of fine-tuning on texts of real lengths: our encoder, the same with work on padding, fairseq's
    RoBERTa, Hugging Face's BERT. Nothing else should run on the machine."""
    measure(training_step, "train", **arguments)


@click.command(cls=Command)
@shared("CoLA,MRPC", "base", "1,32", INFERENCE)
def inference(**arguments):
    """Compare forward passes over texts of real lengths: our encoder, the same with work on padding, our export for the
    transformers library, Hugging Face's BERT and ModernBERT. Nothing else should run on the machine."""
    measure(inference_step, "valid", **arguments)
