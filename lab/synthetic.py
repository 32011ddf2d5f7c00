"""Synthetic tasks that ask what a position encoding lets attention tell apart.

`equal` is Su's probe (2022): can the model map n equal tokens to 1..n? `identify` and `even` are the two tasks of URPE
(Luo et al., 2022): name the position of every token of a random sequence, and output its even tokens first.

B batch, L sequence length ([CLS] and [SEP] included, if there), n number of words, C model width, K classes.
"""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import torch
import torch.nn.functional as F
from torch import nn

from tupe.attention import NORMALISERS
from tupe.common.options import FILE, Command, ListOf
from tupe.common.tables import TextTable
from tupe.encoder import BLOCKS, Encoder
from tupe.run.folder import write_atomically
from tupe.schemes import SCHEMES

PAD, CLS, SEP, WORDS = 0, 1, 2, 3  # ids from WORDS on are words
SAME = 1e-12  # features that differ less are equal: rounding makes 1e-14, positions at least 1e-7


def equal(n: int, words: int, batch: int, generator: torch.Generator | None = None) -> tuple:
    """n equal tokens -> their positions; one sequence is all there is, whatever the batch."""
    return torch.full((1, n), WORDS), torch.arange(n)[None]


def identify(n: int, words: int, batch: int, generator: torch.Generator | None = None) -> tuple:
    """Random words -> their positions."""
    tokens = torch.randint(words, (batch, n), generator=generator)
    return WORDS + tokens, torch.arange(n).expand(batch, n)


def even(n: int, words: int, batch: int, generator: torch.Generator | None = None) -> tuple:
    """Random words w_1 .. w_n -> w_2, w_4, .., w_n, then the class `words` ("end") for the second half."""
    tokens = torch.randint(words, (batch, n), generator=generator)
    second = tokens[:, 1::2]
    return WORDS + tokens, F.pad(second, (0, n - second.size(1)), value=words)


# name -> (function (n, words, batch, generator) -> tokens [B, n] and targets [B, n]; (n, words) -> number of classes)
TASKS = {
    "equal": (equal, lambda n, words: n),
    "identify": (identify, lambda n, words: n),
    "even": (even, lambda n, words: words + 1),
}


class Prober(nn.Module):
    """An encoder without dropout and a linear layer on every word: tokens [B, n] -> logits [B, n, K].

    special: put [CLS] and [SEP] around the words. layer: the encoder's block, as stored runs call it. Its other options
    are those of `Encoder`.
    """

    def __init__(
        self, position: str, n: int, words: int, classes: int, special: bool = False, layers: int = 2, width: int = 64,
        heads: int = 4, ffn: int = 256, layer: str = "transformer", **options,
    ):  # fmt: skip
        super().__init__()
        self.special = special
        self.encoder = Encoder(
            WORDS + words, PAD, layers=layers, width=width, heads=heads, ffn=ffn, max_positions=n + 2 * special,
            position=position, block=layer, dropout=0.0, attention_dropout=0.0, **options,
        )  # fmt: skip
        self.out = nn.Linear(width, classes)

    def features(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, n] -> [B, n, C]: the last layer's output at the words."""
        if self.special:
            tokens = F.pad(F.pad(tokens, (1, 0), value=CLS), (0, 1), value=SEP)
        x, _ = self.encoder(tokens)
        return x[:, 1:-1] if self.special else x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.features(tokens))


class Structure(NamedTuple):
    spread: float  # largest difference between the features of two positions
    asymmetry: float  # largest difference between a position and its mirror image
    distinct: int  # how many different features there are; no training gets more positions right


def structure(position: str, n: int = 64, seed: int = 1, special: bool = False, **options) -> Structure:
    """The structure of what a `Prober` in float64 with random weights makes of n equal tokens."""
    torch.manual_seed(seed)
    model = Prober(position, n, 1, n, special, **options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        x = model.features(equal(n, 1, 1)[0])[0]  # [n, C]
    spread = (x.amax(0) - x.amin(0)).max().item()
    equal_to = (x[:, None] - x).abs().amax(-1) < SAME  # [n, n]
    first = equal_to.int().argmax(1)  # of the positions that are like it
    return Structure(spread, (x - x.flip(0)).abs().max().item(), len(first.unique()))


def verdict(distinct: int, n: int) -> str:
    """What `structure` means for the task `equal`: "fail", "32 of 64", or "pass" (if training gets there)."""
    return "fail" if distinct == 1 else "pass" if distinct == n else f"{distinct} of {n}"


def train(
    task: str, position: str, *, n: int = 64, words: int = 16, batch: int = 32, steps: int = 1000, lr: float = 1e-3,
    seed: int = 1, special: bool = False, **options,
) -> tuple[float, int]:  # fmt: skip
    """Train a `Prober` and return (accuracy per word, steps taken). It ends early once 100 sequences on end were right
    (`equal` has only one sequence: once that is right).

    Adam, learning rate falling linearly to 0 after a short warm-up. The accuracy is the last step's; the batches of
    `identify` and `even` are new in every step.
    """
    make, classes = TASKS[task]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Prober(position, n, words, classes(n, words), special, **options)
    update = adam(model, steps, lr)
    right, step = 0, 0
    while True:
        step += 1
        tokens, targets = make(n, words, batch, generator)
        logits = model(tokens)
        accuracy = (logits.argmax(-1) == targets).float().mean().item()
        right = right + len(tokens) if accuracy == 1 else 0
        if right >= (1 if task == "equal" else 100) or step == steps:
            return accuracy, step
        update(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def adam(model: nn.Module, steps: int, lr: float) -> Callable[[torch.Tensor], None]:
    """A function that takes a step of Adam for a loss; the learning rate falls linearly to 0 after a short warm-up."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    warmup = max(steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1))
    )

    def update(loss):
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return update


# --------------------------------------------------------------------------------------------- runs in a file of lines

KEYS = ("task", "layer", "position", "normaliser", "special", "seed")
# Options that a stored run names beside its KEYS, with the values of runs that name none.
DEFAULTS = {"n": 64, "words": 16, "layers": 2, "steps": 3000, "lr": 1e-3}


def read_runs(path: Path) -> list[dict]:
    """The runs that a sweep stored, one JSON object per line. Raises ValueError for a file of something else."""
    try:
        runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if not all({"task", "position", "seed"} <= run.keys() for run in runs):
            raise ValueError
        return runs
    except (ValueError, AttributeError):
        raise ValueError(f"{path} holds something other than runs; choose another file") from None


def options_of(run: dict) -> dict:
    """The options that a stored run was trained with; one that names none, with the defaults."""
    return {**DEFAULTS, **run.get("options", {})}


def finished(path: Path, keys: Sequence[str], options: dict) -> dict[tuple, dict]:
    """{values of the keys: stored run} of the runs with these options."""
    options = {**DEFAULTS, **options}
    return {tuple(run[key] for key in keys): run for run in read_runs(path) if options_of(run) == options}


def stored(path: Path, keys: Sequence[str], cells: Iterable[tuple], options: dict, run: Callable) -> Iterator[dict]:
    """Compute the cells, values of the keys, that the file does not hold yet with these options; store each run at once
    and yield it. run: function of a cell to what came out."""
    done = finished(path, keys, options)
    path.parent.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        if cell not in done:
            made = {**dict(zip(keys, cell, strict=True)), **run(*cell), "options": options}
            lines = [json.dumps(each, allow_nan=False) + "\n" for each in [*read_runs(path), made]]
            write_atomically(path, "".join(lines))
            yield made


def sweep(path: Path, cells: Iterable[tuple], **options) -> Iterator[dict]:
    """`stored` runs of cells of KEYS.

    For `equal` the effort follows `structure`. Where training is proven to be in vain, it takes a third of the steps.
    Where it should succeed and the accuracy stays below 0.99, the run is repeated once with half the learning rate and
    twice the steps: the question is what a model can do, not how fast.
    """
    options = {**DEFAULTS, **options}

    def run(task, layer, position, normaliser, special, seed):
        model = {"special": special, "normaliser": normaliser, "layer": layer, "layers": options["layers"]}
        effort = dict(options)
        expected = verdict(structure(position, options["n"], **model).distinct, options["n"]) if task == "equal" else ""
        if expected == "fail":
            effort["steps"] = math.ceil(options["steps"] / 3)
        accuracy, steps = train(task, position, seed=seed, **model | effort)
        if expected == "pass" and accuracy < 0.99:
            effort |= {"lr": options["lr"] / 2, "steps": options["steps"] * 2}
            second, more = train(task, position, seed=seed, **model | effort)
            accuracy, steps = max(accuracy, second), steps + more
        return {"accuracy": accuracy, "steps": steps}

    return stored(path, KEYS, cells, options, run)


def agrees(accuracy: float, distinct: int, n: int) -> bool:
    """Whether a training ended as the structure says: below `at_chance` where all positions are alike, from 0.99 on
    where none are, else at half of what is possible or more, but for luck no higher."""
    if distinct == 1:
        return accuracy < at_chance(n)
    return accuracy >= 0.99 if distinct == n else 0.5 * distinct / n <= accuracy <= (distinct + 1) / n


def at_chance(n: int) -> float:
    """An accuracy that only numbers without a clue stay below: 1 / n is chance."""
    return max(0.2, 1.5 / n)


def deviations(runs: list[dict], n: int = 64, **options) -> list:
    """[(run, the structure's verdict)] of the runs of `equal` that ended otherwise. options: those of `structure`."""

    @functools.cache
    def distinct(position, **model):
        return structure(position, n, **model, **options).distinct

    model = ("position", "normaliser", "special", "layer")
    pairs = [(run, distinct(**{key: run[key] for key in model})) for run in runs]
    return [(run, verdict(number, n)) for run, number in pairs if not agrees(run["accuracy"], number, n)]


def accuracies(runs: list[dict]) -> TextTable:
    """Table of runs of one task and layer, see `table_of`.

    A cell is the accuracy of all seeds, lowest to highest if they differ; bold where every seed reached 0.99. Where
    there are fewer seeds than elsewhere, their number follows in brackets.
    """
    by_cell = {}
    for run in runs:
        by_cell.setdefault((run["position"], run["normaliser"], run["special"]), []).append(run["accuracy"])
    seeds = max((len(values) for values in by_cell.values()), default=0)
    return table_of({cell: summary(values, seeds) for cell, values in by_cell.items()})


def summary(values: list, seeds: int) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    text = f"**{high}**" if min(values) >= 0.99 else high if low == high else f"{low}-{high}"
    return text if len(values) == seeds else f"{text} ({len(values)})"


def table_of(cells: dict) -> TextTable:
    """A row per scheme, a column per normaliser without and with [CLS]/[SEP].

    cells: (position, normaliser, special) -> text.
    """
    columns = list(dict.fromkeys((normaliser, special) for _, normaliser, special in cells))
    heads = [normaliser + (" +CLS/SEP" if special else "") for normaliser, special in columns]
    positions = dict.fromkeys(position for position, _, _ in cells)
    rows = [[position, *(cells.get((position, *column), "") for column in columns)] for position in positions]
    return TextTable.plain(["position", *heads], rows)


# --------------------------------------------------------------------------------------------------------- the command

COMBINED = ["untied+t5", "shaw+shaw_values", "t5+urpe"]
SPECIAL = {"without": False, "with": True}


@click.command(cls=Command)
@click.option("--task", type=click.Choice(list(TASKS)), default="equal", show_default=True, help="The question to ask.")
@click.option("--positions", type=ListOf(str), default=[*SCHEMES, *COMBINED],
              help="Position encodings (default: all, and a few sums).")  # fmt: skip
@click.option("--normalisers", type=ListOf(list(NORMALISERS)), default=list(NORMALISERS),
              help="Normalisers of the attention (default: all).")  # fmt: skip
@click.option("--special", type=ListOf(list(SPECIAL)), default=list(SPECIAL),
              help="Sequences without or with [CLS] and [SEP] around them (default: both).")  # fmt: skip
@click.option("--block", "--layer", "layer", type=click.Choice(list(BLOCKS)), default="transformer", show_default=True,
              help="The kind of layer.")  # fmt: skip
@click.option(
    "--layers", type=click.IntRange(1), default=DEFAULTS["layers"], show_default=True, help="The number of layers."
)
@click.option("--length", type=click.IntRange(1), default=DEFAULTS["n"], show_default=True, help="Words of a sequence.")
@click.option("--seeds", type=ListOf(int), default=[1, 2, 3], help="A run for each of these seeds (default: 1,2,3).")
@click.option("--steps", type=click.IntRange(1), default=DEFAULTS["steps"], show_default=True, help="Updates of a run.")
@click.option("--lr", type=float, default=DEFAULTS["lr"], show_default=True, help="The learning rate.")
@click.option("--structure", "only_structure", is_flag=True,
              help="Ask without training, of random weights in float64: a matter of seconds.")  # fmt: skip
@click.option(
    "--output", type=FILE, help="The file of finished runs, in JSON lines. What it holds is not trained again."
)
def command(task, positions, normalisers, special, layer, layers, length, seeds, steps, lr, only_structure, output):
    """Which position encodings and normalisers can number equal tokens (Su's probe), or solve URPE's two tasks.

    Prints a Markdown table.
    """
    torch.set_num_threads(1)  # the models are so small that more hardly help
    specials = [SPECIAL[word] for word in special]
    if only_structure:
        click.echo(structures(positions, normalisers, specials, n=length, layer=layer, layers=layers), nl=False)
        return
    if output is None:
        raise ValueError("--output FILE is needed to keep the runs (or --structure, which trains nothing)")
    for position in positions:
        Prober(position, length, 1, length)  # an unknown name is refused before anything is trained
    options = {**DEFAULTS, "n": length, "layers": layers, "steps": steps, "lr": lr}
    cells = list(itertools.product([task], [layer], positions, normalisers, specials, seeds))  # in the order of KEYS
    for run in sweep(output, cells, **options):
        click.echo(f"{name_of(run, KEYS)} accuracy {run['accuracy']:.3f} after {run['steps']} steps")
    found = finished(output, KEYS, options)
    runs = [found[cell] for cell in cells]
    click.echo(accuracies(runs).markdown(), nl=False)
    if task == "equal":
        others = deviations(runs, n=length, layers=layers)
        click.echo(f"\n{len(runs) - len(others)} of {len(runs)} runs end as the structure predicts:")
        click.echo(
            f"fail (accuracy below {at_chance(length):.2g}), pass (from 0.99), or at least half of what is possible."
            + " The others:" * bool(others)
        )
        for run, expected in others:
            click.echo(f"{name_of(run, KEYS[2:])} accuracy {run['accuracy']:.3f}, the structure predicts {expected}")


def name_of(run: dict, keys: Sequence[str]) -> str:
    return " ".join(str(run[key]) for key in keys)


def structures(
    positions: Sequence[str], normalisers: Sequence[str], specials: Sequence[bool], n: int, **options
) -> str:
    """Markdown table of the verdicts of `structure`, and the range of its numbers under each verdict."""
    numbers = {
        (position, normaliser, special): structure(position, n, normaliser=normaliser, special=special, **options)
        for position in positions for normaliser in normalisers for special in specials
    }  # fmt: skip
    lines = [table_of({cell: verdict(found.distinct, n) for cell, found in numbers.items()}).markdown()]
    for distinct in sorted({found.distinct for found in numbers.values()}):
        pairs = [found[:2] for found in numbers.values() if found.distinct == distinct]
        spread, asymmetry = (f"{min(side):.1e} to {max(side):.1e}" for side in zip(*pairs, strict=True))
        lines.append(f"{verdict(distinct, n)}: spread {spread}, asymmetry {asymmetry}\n")
    return "".join(lines)
