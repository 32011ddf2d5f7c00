"""Synthetic tasks that ask what a position encoding lets attention tell apart.

`equal` is Su's probe (2022): can the model map n equal tokens to 1..n? `identify` and `even` are the two tasks of URPE
(Luo et al., 2022): name the position of every token of a random sequence, and output its even tokens first.

B batch, L sequence length ([CLS] and [SEP] included, if there), n number of words, C model width, K classes.
"""

import itertools
import json
import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ..encoder import Encoder
from ..positions import overrides
from ..schemes import SCHEMES

PAD, CLS, SEP, WORDS = 0, 1, 2, 3  # ids from WORDS on are words


def equal(n, words, batch, generator=None):
    """n equal tokens -> their positions; one sequence is all there is, whatever the batch."""
    return torch.full((1, n), WORDS), torch.arange(n)[None]


def identify(n, words, batch, generator=None):
    """Random words -> their positions."""
    tokens = torch.randint(words, (batch, n), generator=generator)
    return WORDS + tokens, torch.arange(n).expand(batch, n)


def even(n, words, batch, generator=None):
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

    special: put [CLS] and [SEP] around the words. The encoder's options are those of `Encoder`.
    """

    def __init__(self, position, n, words, classes, special=False, layers=2, width=64, heads=4, ffn=256, **options):
        super().__init__()
        self.special = special
        self.encoder = Encoder(
            WORDS + words, PAD, layers=layers, width=width, heads=heads, ffn=ffn, max_positions=n + 2 * special,
            position=position, dropout=0.0, attention_dropout=0.0, **options,
        )  # fmt: skip
        self.out = nn.Linear(width, classes)

    def features(self, tokens):
        """[B, n] -> [B, n, C]: the last layer's output at the words."""
        if self.special:
            tokens = F.pad(F.pad(tokens, (1, 0), value=CLS), (0, 1), value=SEP)
        x, _ = self.encoder(tokens)
        return x[:, 1:-1] if self.special else x

    def forward(self, tokens):
        return self.out(self.features(tokens))


def structure(position, n=64, seed=1, special=False, **options):
    """(spread, asymmetry) of what a `Prober` in float64 with random weights makes of n equal tokens.

    spread: largest difference between the features of two positions; 0 means that no training can tell any two
    positions apart. asymmetry: largest difference between a position and its mirror image; 0 means that left and right
    cannot be told apart.
    """
    torch.manual_seed(seed)
    model = Prober(position, n, 1, n, special, **options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        x = model.features(equal(n, 1, 1)[0])[0]  # [n, C]
    spread = (x.amax(0) - x.amin(0)).max().item()
    return spread, (x - x.flip(0)).abs().max().item()


def verdict(spread, asymmetry):
    """What `structure` says about the task `equal`: "fail", "half" or "pass" (unless training does not get there)."""
    return "fail" if spread < 1e-12 else "half" if asymmetry < 1e-12 else "pass"


def predicted(position, normaliser, special):
    """The same, from which hooks the schemes fill in; None where that is not enough (symmetric schemes).

    A row of softmax weights sums to 1, so equal values give equal outputs whatever the logits are; position has to
    enter some other way, or there have to be values that differ: [CLS] and [SEP].
    """
    schemes = [SCHEMES[name] for name in position.split("+")]
    if any(overrides(scheme, "embed", "gate", "value", "unrotate") for scheme in schemes):
        return "pass"
    if not any(overrides(scheme, "bias", "content", "rotate") for scheme in schemes):
        return "fail"
    if special:
        return "pass"
    return "fail" if normaliser == "softmax" else None


def train(task, position, *, n=64, words=16, batch=32, steps=1000, lr=1e-3, seed=1, special=False, **options):
    """Train a `Prober` and return (accuracy per word, steps taken). It ends early once 100 sequences on end were right
    (`equal` has only one sequence: once that is right).

    Adam, learning rate falling linearly to 0 after a short warm-up. The accuracy is the last step's; the batches of
    `identify` and `even` are new in every step.
    """
    make, classes = TASKS[task]
    if steps < 1:
        raise ValueError(f"{steps} steps of training; valid: 1 or more")
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Prober(position, n, words, classes(n, words), special, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    warmup = max(steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1))
    )
    right, step = 0, 0
    while True:
        step += 1
        tokens, targets = make(n, words, batch, generator)
        logits = model(tokens)
        accuracy = (logits.argmax(-1) == targets).float().mean().item()
        right = right + len(tokens) if accuracy == 1 else 0
        if right >= (1 if task == "equal" else 100) or step == steps:
            return accuracy, step
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def read_results(path):
    """Runs stored by `sweep`, one JSON object per line; a last line that was cut off is none."""
    lines = Path(path).read_text().splitlines(keepends=True) if Path(path).exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def options_of(run):
    """The options that a stored run was trained with; one that says nothing of them, with the defaults."""
    return {**DEFAULTS, **run.get("options", {})}


def sweep(path, task, positions, normalisers, specials, seeds, layer="transformer", **options):
    """Train every combination that the file does not hold yet, with these options; append each to it and yield it.

    For `equal` the effort follows `structure`. Where training is proven to be in vain, it takes a third of the steps.
    Where it should succeed and the accuracy stays below 0.99, the run is repeated once with half the learning rate and
    twice the steps: the question is what a model can do, not how fast.
    """
    options = {**DEFAULTS, **options}
    done = {tuple(run[key] for key in KEYS) for run in read_results(path) if options_of(run) == options}
    if Path(path).exists():
        whole = Path(path).read_bytes().rpartition(b"\n")
        os.truncate(path, len(whole[0] + whole[1]))  # takes away what a killed process had not written to its end
    for position, normaliser, special, seed in itertools.product(positions, normalisers, specials, seeds):
        key = (task, layer, position, normaliser, special, seed)
        if key in done:
            continue
        cell = {"special": special, "normaliser": normaliser, "layer": layer, "seed": seed, **options}
        model = {key: value for key, value in cell.items() if key not in ("words", "steps", "lr", "seed")}
        effort = verdict(*structure(position, **model)) if task == "equal" else None
        if effort == "fail":
            cell["steps"] = math.ceil(cell["steps"] / 3)
        accuracy, steps = train(task, position, **cell)
        if effort == "pass" and accuracy < 0.99:
            second, more = train(task, position, **{**cell, "lr": cell["lr"] / 2, "steps": cell["steps"] * 2})
            accuracy, steps = max(accuracy, second), steps + more
        run = {**dict(zip(KEYS, key, strict=True)), "accuracy": accuracy, "steps": steps, "options": options}
        with open(path, "a") as file:
            file.write(json.dumps(run) + "\n")
        yield run


def reached(accuracy):
    """The verdict of training: "fail" below 0.2, "pass" from 0.99, between them "half"."""
    return "fail" if accuracy < 0.2 else "pass" if accuracy >= 0.99 else "half"


def deviations(runs, **options):
    """[(run, what `structure` says)] of the runs of `equal` that ended otherwise. options: those of `structure`."""
    cells = {(run["position"], run["normaliser"], run["special"], run["layer"]) for run in runs}
    said = {
        cell: verdict(*structure(cell[0], normaliser=cell[1], special=cell[2], layer=cell[3], **options))
        for cell in cells
    }
    found = [(run, said[run["position"], run["normaliser"], run["special"], run["layer"]]) for run in runs]
    return [(run, expected) for run, expected in found if reached(run["accuracy"]) != expected]


KEYS = ("task", "layer", "position", "normaliser", "special", "seed")
# Options that a stored run names beside its KEYS, with the values of runs that name none.
DEFAULTS = {"n": 64, "words": 16, "layers": 2, "steps": 3000, "lr": 1e-3}


def table(runs):
    """Markdown table of runs of one task and layer, see `table_of`.

    A cell is the accuracy of all seeds, lowest to highest if they differ; bold where every seed reached 0.99. Where
    there are fewer seeds than elsewhere, their number follows in brackets.
    """
    found = {}
    for run in runs:
        found.setdefault((run["position"], run["normaliser"], run["special"]), []).append(run["accuracy"])
    seeds = max((len(accuracies) for accuracies in found.values()), default=0)
    return table_of({cell: summary(accuracies, seeds) for cell, accuracies in found.items()})


def summary(accuracies, seeds):
    low, high = f"{min(accuracies):.2f}", f"{max(accuracies):.2f}"
    text = f"**{high}**" if min(accuracies) >= 0.99 else high if low == high else f"{low}-{high}"
    return text if len(accuracies) == seeds else f"{text} ({len(accuracies)})"


def table_of(cells):
    """Markdown: a row per scheme, a column per normaliser without and with [CLS]/[SEP]. Empty where nothing is known.

    cells: (position, normaliser, special) -> text.
    """
    columns = list(dict.fromkeys((normaliser, special) for _, normaliser, special in cells))
    heads = [normaliser + (" +CLS/SEP" if special else "") for normaliser, special in columns]
    lines = ["| position | " + " | ".join(heads) + " |", "|---|" + "--:|" * len(heads)]
    for position in dict.fromkeys(position for position, _, _ in cells):
        row = (cells.get((position, *column), "") for column in columns)
        lines.append(f"| {position} | " + " | ".join(row) + " |")
    return "\n".join(lines)
