"""Tasks of length generalisation for encoders: trained on strings of up to 40 symbols, tested on up to 500.

Nine of the fifteen tasks of Ruoss et al. (2023), as their paper describes them. As there, the model reads a string and
behind it one empty token for each symbol of the answer, in whose places it gives the whole answer at once; the
score is the accuracy per symbol, averaged over the tested lengths; and random positions are drawn in tests too.

B batch, n length of a string, m length of an answer, L = n + m.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from tupe.common.options import FILE, Command, ListOf
from tupe.common.tables import TextTable
from tupe.token_positions import SAMPLINGS

from .synthetic import WORDS, Prober, adam, finished, stored


def symbols(count: int, n: int, batch: int, generator: Generator | None) -> Tensor:
    """[B, n] random symbols 0 .. count-1."""
    return torch.randint(count, (batch, n), generator=generator)


def even_pairs(n: int, batch: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """Whether the number of neighbours that differ is odd."""
    string = symbols(2, n, batch, generator)
    return string, (string[:, 1:] != string[:, :-1]).sum(1, keepdim=True) % 2


def modular_arithmetic(n: int, batch: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """An expression of the digits 0 .. 4 with + (5), - (6) and * (7), modulo 5; an even n is lowered by 1."""
    terms = (n + 1) // 2
    digits, operators = symbols(5, terms, batch, generator), 5 + symbols(3, terms - 1, batch, generator)
    total, product = torch.zeros(batch, dtype=torch.long), digits[:, 0]
    for digit, operator in zip(digits[:, 1:].T, operators.T, strict=True):
        times = operator == 7
        total = torch.where(times, total, total + product)
        product = torch.where(times, product * digit % 5, torch.where(operator == 6, -digit, digit))
    string = torch.empty(batch, 2 * terms - 1, dtype=torch.long)
    string[:, ::2], string[:, 1::2] = digits, operators
    return string, (total + product)[:, None] % 5


def parity_check(n: int, batch: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """Whether the number of ones is odd."""
    string = symbols(2, n, batch, generator)
    return string, string.sum(1, keepdim=True) % 2


def cycle_navigation(n: int, batch: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """The place on a circle of 5 after steps to the left (0), none (1) and to the right (2)."""
    string = symbols(3, n, batch, generator)
    return string, (string - 1).sum(1, keepdim=True) % 5


def reverse_string(n: int, batch: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    string = symbols(2, n, batch, generator)
    return string, string.flip(1)


def duplicate_string(n: int, batch: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    string = symbols(2, n, batch, generator)
    return string, string.repeat(1, 2)


def missing_duplicate(n: int, batch: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """The symbol that is hidden (2) in a string that stands there twice; an odd n is filled up with 3, 1 is raised to
    2."""
    string = symbols(2, max(n // 2, 1), batch, generator).repeat(1, 2)
    hidden = torch.randint(string.size(1), (batch, 1), generator=generator)
    answer = string.gather(1, hidden)
    return F.pad(string.scatter(1, hidden, 2), (0, max(n, 2) % 2), value=3), answer


def odds_first(n: int, batch: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """The symbols at odd places, counted from 0 as in the authors' code, then the others."""
    string = symbols(2, n, batch, generator)
    return string, torch.cat([string[:, 1::2], string[:, ::2]], dim=1)


def bucket_sort(n: int, batch: int, generator: Generator | None = None) -> tuple[Tensor, Tensor]:
    """Five symbols in order."""
    string = symbols(5, n, batch, generator)
    return string, string.sort(1).values


class Task(NamedTuple):
    make: Callable  # (n, batch, generator) -> strings [B, about n], answers [B, m]
    symbols: int  # of strings
    classes: int  # of answers


TASKS = {
    "even_pairs": Task(even_pairs, 2, 2),
    "modular_arithmetic": Task(modular_arithmetic, 8, 5),
    "parity_check": Task(parity_check, 2, 2),
    "cycle_navigation": Task(cycle_navigation, 3, 5),
    "reverse_string": Task(reverse_string, 2, 2),
    "duplicate_string": Task(duplicate_string, 2, 2),
    "missing_duplicate": Task(missing_duplicate, 4, 2),
    "odds_first": Task(odds_first, 2, 2),
    "bucket_sort": Task(bucket_sort, 5, 5),
}  # fmt: skip


def answer_logits(model: Prober, task: Task, n: int, batch: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """(logits [B, m, classes], answers [B, m]) for new strings of length n."""
    strings, answers = task.make(n, batch, generator)
    m = answers.size(1)
    tokens = F.pad(WORDS + strings, (0, m), value=WORDS + task.symbols)  # [B, n + m]
    return model(tokens)[:, -m:], answers


def train(
    name: str, position: str, places: str, *, seed: int, lr: float, steps: int, batch: int, trained: int, span: int,
    **sizes,
) -> Prober:  # fmt: skip
    """A model trained on strings of 1 .. `trained` symbols, one length per batch. span: the positions that there are.

    It stays in training mode: without dropout, all that this means is that random positions are drawn in tests too.
    """
    task = TASKS[name]
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Prober(position, span, task.symbols + 1, task.classes, places=places, **sizes)
    update = adam(model, steps, lr)
    for n in torch.randint(1, trained + 1, (steps,), generator=generator).tolist():
        logits, answers = answer_logits(model, task, n, batch, generator)
        update(F.cross_entropy(logits.flatten(0, 1), answers.flatten()))
    return model


@torch.no_grad()
def accuracies(model: Prober, name: str, lengths: Sequence[int], batch: int) -> dict[int, float]:
    """{length: share of the symbols that are right}, the same strings for every model."""
    generator = torch.Generator().manual_seed(0)
    shares = {}
    for n in lengths:
        logits, answers = answer_logits(model, TASKS[name], n, batch, generator)
        shares[n] = (logits.argmax(-1) == answers).float().mean().item()
    return shares


KEYS = ("task", "position", "places", "lr", "seed")
SETTING = {
    "batch": 32,
    "trained": 40,
    "span": 2048,
}  # strings of an update, the longest of them, positions to draw from
SIZES = {"layers": 5, "width": 64, "heads": 8, "ffn": 256}
LONGEST = 500  # string of the tests


def sweep(path: Path, cells: Sequence[tuple], tests: int, longest: int, **options) -> Iterator[dict]:
    """`stored` runs of cells of KEYS."""
    trained, batch = options["trained"], options["batch"]
    lengths = np.unique(np.linspace(trained + 1, longest, tests).round().astype(int)).tolist()

    def run(task, position, places, lr, seed):
        model = train(task, position, places, lr=lr, seed=seed, **options)
        short = list(accuracies(model, task, range(1, trained + 1), batch).values())
        shares = accuracies(model, task, lengths, batch)
        return {"score": float(np.mean(list(shares.values()))), "short": float(np.mean(short)), "accuracies": shares}

    return stored(path, KEYS, cells, {**options, "tests": tests, "longest": longest}, run)


def tabulate(runs: Sequence[dict]) -> TextTable:
    """A row per task, a column per encoding and places: the best score of all rates and seeds in per cent, as in the
    paper, and in brackets that run's accuracy on lengths of the training."""
    best = {}
    for run in runs:
        column = run["position"] + (f", {run['places']}" if run["places"] != "consecutive" else "")
        key = run["task"], column
        best[key] = max(best.get(key, (0.0, 0.0)), (run["score"], run["short"]))
    columns = list(dict.fromkeys(column for _, column in best))
    tasks = [task for task in TASKS if any(task == key[0] for key in best)]

    def cell(score: float, short: float) -> str:
        return f"{100 * score:.1f} ({100 * short:.0f})"

    rows = [[task, *(cell(*best[task, c]) if (task, c) in best else "" for c in columns)] for task in tasks]
    return TextTable.plain(["task", *columns], rows)


@click.command(cls=Command)
@click.option("--tasks", type=ListOf(list(TASKS)), default=list(TASKS), help="Tasks to train (default: all).")
@click.option("--positions", type=ListOf(str), default="nopos,sinusoidal,transformer_xl,alibi,rope,t5,untied",
              show_default=True, help="Position encodings.")  # fmt: skip
@click.option("--places", type=ListOf(list(SAMPLINGS)), default="consecutive,random", show_default=True,
              help="Positions in a row, or drawn at random.")  # fmt: skip
@click.option("--seeds", type=ListOf(int), default="1", show_default=True, help="A run for each of these seeds.")
@click.option(
    "--lrs", type=ListOf(float), default="1e-3", show_default=True, help="Learning rates; the best one counts."
)
@click.option("--steps", type=click.IntRange(1), default=3000, show_default=True, help="Updates of a run.")
@click.option("--tests", type=click.IntRange(1), default=24, show_default=True,
              help="The number of tested lengths, evenly spaced.")  # fmt: skip
@click.option("--output", type=FILE, required=True,
              help="The file of finished runs, in JSON lines. What it holds is not trained again.")  # fmt: skip
def command(tasks, positions, places, seeds, lrs, steps, tests, output):
    """Which encodings solve tasks on longer strings than they were trained on (Ruoss et al., 2023).

    Prints a Markdown table: accuracy in per cent over the tested lengths, of the best run, and in brackets its
    accuracy on lengths of the training. A run takes minutes.
    """
    torch.set_num_threads(1)  # the models are so small that more hardly help
    for position in positions:
        Prober(position, SETTING["span"], 1, 2, **SIZES)  # an unknown name is refused before anything is trained
    options = {"steps": steps, **SETTING, **SIZES}
    cells = list(itertools.product(tasks, positions, places, lrs, seeds))  # in the order of KEYS
    for run in sweep(output, cells, tests, LONGEST, **options):
        shown = " ".join(str(run[key]) for key in KEYS)
        click.echo(f"{shown} accuracy {run['score']:.3f}, up to {SETTING['trained']} symbols {run['short']:.3f}")
    found = finished(output, KEYS, {**options, "tests": tests, "longest": LONGEST})
    click.echo(tabulate([found[cell] for cell in cells]).markdown(), nl=False)
