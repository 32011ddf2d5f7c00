"""Fine-tuning and inference on texts of real lengths: our encoder, with and without work on padding, beside the common
alternatives of the same size.

All contenders have random weights, live in one process and take turns on the same batches; the ratio of two is the
median over turns of the ratio within a turn.

B batch, L length of its longest text, V vocabulary.
"""

import tupe.plugin  # noqa: F401  isort: skip  (first: keeps fairseq's import quiet)
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
import torch.nn.functional as F
from fairseq.data import data_utils
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
from ..token_positions import TokenPositions
from . import contenders, report
from .contenders import PAD, Setting
from .machine import DEVICE, PRECISIONS, autocast, environment
from .turns import Step, compared, timed, write

LONGEST = 512
FINETUNE = ["ours", "ours-padded", "fairseq", "hf"]
INFERENCE = ["ours", "ours-padded", "export", "hf", "hf-eager", "modernbert"]
CONTENDERS = list(dict.fromkeys([*FINETUNE, *INFERENCE, "ours-even"]))


class Batch(NamedTuple):
    tokens: Tensor  # [B, L], PAD at the end of shorter texts
    real: Tensor  # [B, L]
    count: int  # of real tokens
    labels: Tensor  # [B]


def texts(data: Path, task: str, split: str) -> Pairs:
    """The texts of a task, of at most `LONGEST` tokens, special ones included. data: folder that `tupe prepare glue`
    wrote. split: "train" or "valid".

    Raises ValueError for an unknown task or one that was not prepared.
    """
    words = load_dictionary(data / "dict.txt")
    name = glue_name(task, data)
    parts = [data / name / f"input{i}" / split for i in range(len(TASKS[name].text))]
    if not parts[0].with_suffix(".idx").exists():
        raise ValueError(f"{data} holds no {name}; `tupe prepare glue` writes it")
    first, *second = (data_utils.load_indexed_dataset(str(part), words) for part in parts)
    return Pairs(first, second[0] if second else None, words, LONGEST)


def count_pieces(texts: Pairs) -> int:
    """How many different pieces the texts have."""
    seen = set()
    for i in range(len(texts)):
        seen.update(texts[i].tolist())
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
    transform: Callable, x: Tensor, positions: TokenPositions, packing: Packing, hiddens: bool, output_indices: Tensor,
    backend: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """`Encoder.transform` whose last layer computes all tokens, too."""
    return transform(x, positions, packing, backend=backend)[0].flatten(0, 1)[output_indices], None


# -------------------------------------------------------------------------------------------------------- measurement


def training_step(model: nn.Module, logits: Callable[[Batch], Tensor]) -> Callable[[Batch, torch.autocast], None]:
    """Forward pass under autocast, backward pass outside it, clipping and AdamW: ours (`optim.FusedAdamW`), or
    PyTorch's fused one as in Hugging Face's Trainer."""
    model.train()
    if isinstance(model, TupeModel):
        optimizer = FusedAdamW(FusedAdamWConfig(lr=[1e-5]), model.parameters())
        clip = partial(optimizer.clip_grad_norm, 1.0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        clip = partial(nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)

    def step(batch: Batch, precision: torch.autocast) -> None:
        with precision:
            loss = F.cross_entropy(logits(batch).float(), batch.labels)
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()

    return step


def inference_step(model: nn.Module, logits: Callable[[Batch], Tensor]) -> Callable[[Batch, torch.autocast], None]:
    """A forward pass without gradients."""
    model.eval()

    def step(batch: Batch, precision: torch.autocast) -> None:
        with torch.inference_mode(), precision:
            logits(batch)

    return step


def on_batches(function: Callable[[Batch, torch.autocast], None], drawn: list[Batch], kind: str, device: str) -> Step:
    """The step of a contender: every turn has a batch."""
    return lambda turn: timed(device, lambda: function(drawn[turn], autocast(device, kind)))(turn)


COLUMNS = {  # of the table -> cell of a row
    "size": "{size}", "lengths": "{task}", "batch": "{batch}", "precision": "{precision}", "padding": "{padding:.0%}",
    "contender": "{contender}", "texts/s": "{texts_per_s:.1f}", "tokens/s": "{tokens_per_s:.0f}",
}  # fmt: skip


def table(rows: list[dict]) -> TextTable:
    """The rows of one list, with the first contender's speed over each."""
    first = rows[0]["contender"]
    ratios = {row["setting"]: {first: 1, **row["times_as_fast"]} for row in rows if row["contender"] == first}
    cells = [
        [*(cell.format_map(row) for cell in COLUMNS.values()), f"{ratios[row['setting']][row['contender']]:.2f}"]
        for row in rows
    ]
    return TextTable.plain([*COLUMNS, f"{first}: times as fast"], cells, align="llrlrlrrr")


def quantities(row: dict, counted: list[Batch]) -> dict:
    """What follows from a contender's times for these batches."""
    texts, tokens = sum(len(batch.tokens) for batch in counted), sum(batch.count for batch in counted)
    seconds, slots = sum(map(sum, row["steps"])), sum(batch.tokens.numel() for batch in counted)
    return {"padding": 1 - tokens / slots, "texts_per_s": texts / seconds, "tokens_per_s": tokens / seconds}


def measure(
    make_step: Callable, split: str, output: Path, data: Path, tasks: list[str], sizes: list[str], batch: list[int],
    vocab_size: int, names: list[str], precision: list[str], turns: int, device: str, seed: int,
) -> None:  # fmt: skip
    """Measure every combination, print a table, and write it after every size."""
    of_task = {task: texts(data, task, split) for task in tasks}
    pieces = {task: count_pieces(of_task[task]) for task in tasks}
    rows, about = [], {"command": command_line(), "pieces": pieces, **environment()}
    for size in sizes:
        for task in tasks:
            functions = {}
            for name in names:
                functions[name] = make_step(*build(name, Setting(size, 0, LONGEST, vocab=vocab_size, device=device)))
            for number, kind in itertools.product(batch, precision):
                drawn = list(batches(of_task[task].sizes, pieces[task], number, turns + 1, vocab_size, device, seed))
                steps = {name: on_batches(function, drawn, kind, device) for name, function in functions.items()}
                setting = {"size": size, "task": task, "batch": number, "precision": kind}
                setting["setting"] = "{size}, {task}, batch {batch}, {precision}".format_map(setting)
                rows += [{**row, **quantities(row, drawn[1:])} for row in compared(steps, turns, setting)]
                click.echo(f"{setting['setting']}: measured", err=True)
        write(output, {"about": about, "rows": rows}, table(rows).markdown(), report.picture(rows))
    click.echo(table(rows).markdown())


def comparison(
    what: str, make_step: Callable, split: str, tasks: str, size: str, batch: str, names: list[str]
) -> click.Command:  # fmt: skip
    """One of the commands."""

    @click.command(cls=Command, help=f"Compare {what}. Nothing else should run on the machine.")
    @options.data("The folder that `tupe prepare glue` wrote.")
    @click.option("--tasks", type=ListOf(str), default=tasks, show_default=True, metavar="NAME,...",
                  help="Tasks whose texts are taken.")  # fmt: skip
    @click.option("--sizes", type=ListOf(list(SIZES)), default=size, show_default=True, metavar="SIZE,...",
                  help="Sizes of the models.")  # fmt: skip
    @click.option("--batch", type=ListOf(int, least=1), default=batch, show_default=True, metavar="B,...",
                  help="Texts of a batch.")  # fmt: skip
    @options.vocab_size()
    @click.option("--contenders", "names", type=ListOf(CONTENDERS), default=",".join(names), show_default=True,
                  help="What is measured.")  # fmt: skip
    @click.option("--precision", type=ListOf(list(PRECISIONS)), default="float32", show_default=True,
                  help="Precisions to measure in.")  # fmt: skip
    @click.option("--turns", type=click.IntRange(1), default=10, show_default=True, help="Measured batches of each.")
    @click.option("--device", type=click.Choice(["cpu", "cuda"]), default=DEVICE,
                  help="Where to measure (default: a GPU if there is one).")  # fmt: skip
    @options.seed(help="The seed of lengths and tokens.")
    @options.output("The files to write: OUTPUT.json, .md and .png.")
    def command(**arguments):
        measure(make_step, split, **arguments)

    return command


finetune = comparison(
    "steps of fine-tuning on texts of real lengths: our encoder, the same with work on padding, fairseq's RoBERTa, "
    "Hugging Face's BERT", training_step, "train", "CoLA,RTE", "mini,base", "32", FINETUNE,
)  # fmt: skip
inference = comparison(
    "forward passes over texts of real lengths: our encoder, the same with work on padding, our export for the "
    "transformers library, Hugging Face's BERT and ModernBERT", inference_step, "valid", "CoLA,MRPC", "base", "1,32",
    INFERENCE,
)  # fmt: skip
