"""The leaderboard: every encoding by one protocol in two blocks, as leaderboard.yaml says, and one of a user's own
beside them. Each is trained at every learning rate with the first seed, then with the other seeds at the best rate.

Runs are those of `lab.execute`. A trial's stage is the block, its model the name of the encoding.
"""

import functools
import hashlib
import math
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import click
import torch
import yaml

from tupe.common.architectures import ELECTRA, preset
from tupe.common.options import split_files
from tupe.common.record import DIVERGENCE, fingerprint, write_atomically
from tupe.common.tables import TextTable
from tupe.evaluate import order
from tupe.evaluate.extrapolate import extrapolation
from tupe.evaluate.loading import HeldOut, text_block
from tupe.modeling_tupe import TupeForMaskedLM
from tupe.positions import Positions
from tupe.sweep import runner
from tupe.sweep.grid import options_in
from tupe.text import TextEncoder

from . import collect
from .estimates import first_below, with_interval
from .execute import train, train_stage
from .plan import Trial, final_losses

PROTOCOL = yaml.safe_load(Path(__file__).with_name("leaderboard.yaml").read_text(encoding="utf-8"))
ENCODINGS, BLOCKS = PROTOCOL["encodings"], PROTOCOL["blocks"]
LENGTH = next(int(word.partition("=")[2]) for word in PROTOCOL["options"] if word.startswith("--tokens-per-sample"))
TURNS = 31  # of the measurement of cost

# ------------------------------------------------------------------------------------------------------------ the runs


def planned(losses: dict[Trial, float], name: str, block: str) -> list[Trial]:
    """The trainings of an encoding in a block: every rate, and once these have run, the other seeds at the best one."""
    first, *others = PROTOCOL["seeds"]
    of = functools.partial(Trial, block, name, PROTOCOL["size"], PROTOCOL["updates"], seed=first)
    trials = [of(lr=rate) for rate in PROTOCOL["learning_rates"]]
    best = best_of(losses, trials)
    return trials + [replace(best, seed=seed) for seed in others if best]


def best_of(losses: dict[Trial, float], trials: list[Trial]) -> Trial | None:
    """The one with the lowest loss; None unless all have run, and if all diverged."""
    if not all(trial in losses for trial in trials):
        return None
    best = min(trials, key=losses.get)
    return best if math.isfinite(losses[best]) else None


def job(trial: Trial, data: Path, output: Path, further: Sequence[str] = (), encodings: dict = ENCODINGS) -> runner.Job:
    """The command that trains it. Raises ValueError for words that the protocol fixes."""
    if named := [word for word in further if word.partition("=")[0] in ("--autocast", "model.autocast")]:
        raise ValueError(f"{named[0].partition('=')[0]}: the protocol fixes it, {PROTOCOL['autocast']}")
    model = {"arch": BLOCKS[trial.stage], **encodings[trial.model]}
    protocol = {"models": {trial.model: model}, "stages": {}, "autocast": PROTOCOL["autocast"]}
    made = trial.job(data, output, further, protocol)
    return replace(made, command=(*made.command, *PROTOCOL["options"]))


def train_entries(
    data: Path, output: Path, entries: Iterable[tuple[str, str]], jobs: int | None, further: Sequence[str] = (),
    encodings: dict = ENCODINGS,
) -> None:  # fmt: skip
    """Train and evaluate what is left of (encoding, block) pairs, two of them at a time for every five jobs. What fails
    is named at the end, with status 1; the others are trained nevertheless."""
    entries, failed = list(entries), []
    at_once = max(1, (jobs or 1) // 2)

    def of(group):
        losses = final_losses(output)
        return [trial for name, block in group for trial in planned(losses, name, block)]

    make = functools.partial(job, encodings=encodings)
    for begin in range(0, len(entries), at_once):
        group = entries[begin : begin + at_once]
        try:
            train_stage(
                functools.partial(of, group),
                lambda new: train(data, output, new, jobs, further, make, evaluate, PROTOCOL["tokens"]),
            )
        except SystemExit as stop:
            if isinstance(stop.code, int):  # a signal
                raise
            failed.append(stop.code)
    if failed:
        raise SystemExit("\n".join(failed))


# ------------------------------------------------------------------------------------------------------ the evaluation


def evaluate(model: TupeForMaskedLM, text: HeldOut, data: Path) -> dict:
    """What evaluation.json holds: that of every run, the loss by multiple of the training length, parameters of the
    encoding and its cost."""
    content = order.evaluate(model, text, TextEncoder(data), PROTOCOL["sentences"], PROTOCOL["tokens"])
    trained, stream = model.config.max_position_embeddings, text_block(text, sys.maxsize).numpy()[1:]
    losses = extrapolation(model, stream, trained, PROTOCOL["multiples"], PROTOCOL["windows"])
    parameters = sum(parameter.numel() for parameter in model.tupe.encoder.positions.parameters())
    further = {
        "length": {str(loss.length // trained): loss.mean for loss in losses},
        "encoding": {"parameters": parameters, "cost": cost(model, trained)},
    }
    return content | {"further": further}


def cost(model: TupeForMaskedLM, length: int, batch: int = 32) -> float:
    """Processor time of the encoder's forward and backward pass, over that of the same without positions: the median
    over turns of both."""
    encoder, ratios = model.tupe.encoder, []
    own = encoder.positions
    contenders = {"own": own, "none": Positions("nopos", own.dims)}
    tokens = torch.randint(5, len(encoder.tokens.weight), (batch, length), generator=torch.Generator().manual_seed(1))
    for turn in range(TURNS + 1):
        seconds = {}
        for name in sorted(contenders, reverse=bool(turn % 2)):
            encoder.positions, begin = contenders[name], time.process_time()
            encoder(tokens)[0].sum().backward()
            seconds[name] = time.process_time() - begin
        if turn:  # the first one warms up
            ratios.append(seconds["own"] / seconds["none"])
    encoder.positions = own
    encoder.zero_grad()
    return statistics.median(ratios)


# ----------------------------------------------------------------------------------------------------------- the tables


class Standings:
    """What tables of `collect` say of the protocol's runs. Raises ValueError if these had different data."""

    def __init__(self, tables: dict[str, list[dict]], encodings: dict = ENCODINGS):
        self.encodings, self.losses = encodings, {}
        for row in tables["runs"]:
            if row["loss"] or row["reason"].startswith(DIVERGENCE):
                self.losses[Trial.parse(row["run"])] = float(row["loss"] or "inf")
        if len(prints := {row["data"] for row in tables["runs"]} - {""}) > 1:
            raise ValueError(f"runs on different data do not compare (fingerprints {', '.join(sorted(prints))})")
        self.curves, self.measures = defaultdict(list), {}
        for row in tables["training"]:
            self.curves[row["run"]].append((int(row["updates"]), float(row["loss"])))
        for row in tables["measures"]:
            self.measures[row["run"], row["measure"], row["part"]] = float(row["value"])

    def best(self, name: str, block: str) -> Trial | None:
        """The run at the best rate with the first seed."""
        rates = planned({}, name, block)
        return best_of(self.losses, rates)

    def finished(self, name: str, block: str) -> list[Trial]:
        """The runs at the best rate that have ended, seed by seed."""
        best = self.best(name, block)
        return [replace(best, seed=seed) for seed in PROTOCOL["seeds"] if best and self.has(replace(best, seed=seed))]

    def has(self, trial: Trial) -> bool:
        return math.isfinite(self.losses.get(trial, math.inf))

    def exit(self, trial: Trial) -> float | None:
        """The update at which a run leaves the plateau; None: it never does."""
        nopos, curve = self.losses[self.best("nopos", trial.stage)], self.curves[str(trial)]
        return first_below(*([point[part] for point in curve] for part in (0, 1)), nopos - PROTOCOL["threshold"])

    def of_runs(self, runs: list[Trial], measure: str, part: str) -> list[float]:
        keys = [(str(trial), measure, part) for trial in runs]
        return [self.measures[key] for key in keys if key in self.measures]

    def row(self, name: str, block: str) -> list[str]:
        """The cells of an encoding; "" for what has not run."""
        done = [trial for trial in planned(self.losses, name, block) if trial in self.losses]
        runs, about = self.finished(name, block), self.encodings[name]
        exits = [self.exit(trial) for trial in runs] if self.best("nopos", block) else []
        at_1 = self.of_runs(runs, "length", "1")
        longer = [self.of_runs(runs, "length", str(multiple)) for multiple in PROTOCOL["multiples"][1:]]
        changes = [[a - b for a, b in zip(values, at_1, strict=True)] for values in longer if values]
        diverged = sum(math.isinf(self.losses[trial]) for trial in done)
        count = f"{len(done)} of {len(PROTOCOL['learning_rates']) + len(PROTOCOL['seeds']) - 1}"
        return [
            f"`{name}`", f"`{about['position']}`" + ", [CLS] untied" * (about.get("cls") == "untied"),
            count + f", {diverged} diverged" * bool(diverged), f"{runs[0].lr:g}" if runs else "",
            with_interval([self.losses[trial] for trial in runs]) if runs else "",
            ", ".join("never" if update is None else f"{update:.0f}" for update in exits),
            ", ".join(f"{100 * value:.1f}" for value in self.of_runs(runs, "order", "accuracy")),
            *(f"{statistics.mean(values):+.2f}" for values in changes),
            *("refused" if runs else "" for values in longer if not values),
            *(f"{value:,.0f}" for value in self.of_runs(runs, "encoding", "parameters")[:1]),
            *(f"{statistics.median(values):.2f}" for values in [self.of_runs(runs, "encoding", "cost")] if values),
            *([] if runs else ["", ""]),
        ]  # fmt: skip

    def table(self, block: str, own: str | None = None) -> TextTable:
        """A row for every encoding, the lowest loss first. own: whose row is bold."""
        lengths = [f"{multiple * LENGTH} tokens" for multiple in PROTOCOL["multiples"][1:]]
        header = ["encoding", "position", "runs", "rate", "loss, bits", "exit updates", "order preferred, %"]
        header += [*lengths, "parameters", "cost"]

        def place(name):
            runs = self.finished(name, block)
            return (not runs, statistics.mean(self.losses[trial] for trial in runs) if runs else 0)

        names = sorted(self.encodings, key=place)
        rows = [("ours" if name == own else "", self.row(name, block)) for name in names]
        return TextTable(header, rows, align="ll" + "r" * (len(header) - 2))


# ------------------------------------------------------------------------------------------------------ a user's own


def name_of(position: str, arch: str, further: Sequence[str] = (), cls: str = "tied") -> str:
    """The name that the runs of an encoding get. further: with an option --position-file, its runs are of that text."""
    files = options_in(further).get("--position-file")
    about = [position, arch] + [cls] * (cls != "tied") + ([fingerprint(split_files(files))] if files else [])
    digest = hashlib.sha256(" ".join(about).encode()).hexdigest()[:6]  # `a+b` and `a:b` are spelt alike below
    return f"own_{re.sub(r'[^A-Za-z0-9.]+', '_', position)}_{digest}"


def run(
    data: Path, output: Path, position: str, arch: str, cls: str, jobs: int | None, further: tuple, folder: Path
) -> None:  # fmt: skip
    """Train an encoding by the protocol and write OUTPUT/leaderboard.md, the table of its block with its row. folder:
    tables of the leaderboard.

    Raises ValueError for an architecture of neither block, for tables without runs, or of other data.
    """
    about = preset(arch)
    block = next((name for name, of in BLOCKS.items() if arch not in ELECTRA and is_alike(preset(of), about)), None)
    if block is None:
        raise ValueError(f"--arch {arch}: valid: {', '.join(BLOCKS.values())}; --cls unties [CLS]")
    known = collect.read(folder)
    theirs, ours = {row["data"] for row in known["runs"]} - {""}, collect.fingerprint(data)
    if not known["runs"]:
        raise ValueError(
            f"{folder} has no runs to compare with; `python -m lab leaderboard --encodings nopos,tupe_r ...` "
            "trains some, `python -m lab standings --runs DIR --tables DIR` makes tables of them"
        )
    if theirs and theirs != {ours}:
        raise ValueError(
            f"{data} (fingerprint {ours}) is not the data of {folder} ({', '.join(theirs)}): losses do not compare; "
            "prepare the same text (docs/leaderboard.md), or train encodings on yours with "
            "`python -m lab leaderboard`"
        )
    name = name_of(position, arch, further, cls)
    encodings = {**ENCODINGS, name: {"position": position, "cls": cls}}
    train_entries(data, output, [(name, block)], jobs, further, encodings)
    standings = Standings(collect.merge(known, collect.collect(output, data)), encodings)
    text = f"# {position}, by the protocol of docs/leaderboard.md\n\n{standings.table(block, name).markdown()}"
    write_atomically(output / "leaderboard.md", text)
    click.echo(text)


def is_alike(one: dict, other: dict) -> bool:
    """Whether two architectures differ in nothing but positions."""
    return all(one.get(key) == other.get(key) for key in {*one, *other} - {"position", "cls"})
