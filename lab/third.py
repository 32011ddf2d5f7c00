"""What the runs of the third protocol decide (docs/third-protocol.md): the last sections of docs/evidence/delay.md,
each computed once all of its runs have ended."""

from __future__ import annotations

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tupe.common.tables import TextTable
from tupe.run.folder import write_atomically

from . import estimates
from .estimates import ALPHA, Contrast, Seeds, contrast, holm, number, of_contrast, paired
from .known import TABLES, Runs
from .plan import BITS, LATER, PRECISIONS, THIRD, Trial, autocast

if TYPE_CHECKING:
    from .delay import Lead

MARGIN = 0.1  # bits, of equivalence
LAST = 4400  # updates after the exit, up to which (b) looks at the gap
STEADY = 0.02  # bits per 1,000 updates: the margin of equivalence of a drift
DELAYED = "tupe_a_from_"  # how the delayed models of TUPE-A are called
SEEDS_OF_DRIFT = (1, 2, 3, 4, 5)
# Of (d): tasks, seeds and rate of the fine-tunings, and the stage whose runs of each model they start from.
TASKS, FINETUNING_SEEDS, RATE = ("RTE", "CoLA", "STS-B", "MRPC"), (1, 2, 3, 4, 5), 2e-4
MODELS = {"bert_a": "delay", "tupe_a": "downstream", "tupe_r": "downstream"}
STAGES = LATER["stages"]
STOPPED = {"delay_pilot": "Both runs were stopped when they had left the plateau ([curves](second/delay_pilot.csv))."}


class Score(NamedTuple):
    """Of a fine-tuning: on the development set, times 100, at the best and at the last epoch."""

    trial: Trial  # the pre-training
    task: str
    rate: float
    seed: int
    best: float
    last: float


def outcomes(runs: Runs, found: Sequence[Lead]) -> list[str]:
    """All sections that there are."""
    lines = [*intervention(runs, found), *drift(runs, found), *same_rate(runs, found), *downstream(scores())]
    return ["## The third protocol\n", *lines, *tables_of_losses(runs)]


def tables_of_losses(runs: Runs) -> list[str]:
    """A section for each stage: final losses by model and rate, a column for each seed."""
    lines = []
    for stage in THIRD:
        rows, planned, seeds = defaultdict(dict), runs.planned(stage), STAGES[stage]["seeds"]
        for trial in planned:
            if trial in runs.losses:
                cell = number(runs.losses[trial]) if math.isfinite(runs.losses[trial]) else "diverged"
                rows[trial.model, f"{trial.lr:g}", f"{trial.updates:,}"][trial.seed] = cell
        done = sum(trial in runs.losses for trial in planned)
        lines.append(f"### {stage}: {STAGES[stage]['size']}, {precisions(stage)}\n")
        lines.append(f"{STOPPED.get(stage) or f'{done} of {len(planned)} runs.'}\n")
        if rows:
            header = ["model", "rate", "updates", *(f"seed {seed}" for seed in seeds)]
            cells = [[*key, *(row.get(seed, "–") for seed in seeds)] for key, row in rows.items()]
            lines.append(TextTable.plain(header, cells, align="lrr" + "r" * len(seeds)).markdown())
    return lines


def precisions(stage: str) -> str:
    """What a stage trains in, with the seeds, where they differ."""
    seeds = defaultdict(list)
    for seed in STAGES[stage]["seeds"]:
        seeds[PRECISIONS[autocast(STAGES[stage], seed, LATER)]].append(str(seed))
    if len(seeds) == 1:
        return next(iter(seeds))
    return ", ".join(f"{name} ({'seeds' if len(of) > 1 else 'seed'} {', '.join(of)})" for name, of in seeds.items())


def shown_by_seed(one: Contrast, seeds: Sequence[int]) -> tuple[str, str]:
    """(the difference of each seed, a dash for one that has none; mean and interval)."""
    of = one.differences
    return ", ".join(number(of[seed]) if seed in of else "–" for seed in seeds), of_contrast(one)


def same(one: Contrast, margin: float) -> bool:
    return estimates.equivalence(one.differences.values(), margin) <= ALPHA


def verdict_of_delayed(one: Contrast) -> str:
    """(a): the delayed TUPE-A's final loss minus BERT-A's."""
    low, high = one.interval
    if one.mean < -MARGIN and high < 0:
        return "an offset that is no delay"
    return "the delay is all" if same(one, MARGIN) else "not resolved"


def missing(one: Contrast | None, seeds: Iterable[int]) -> str:
    """Why there is no verdict, "" where every seed has a value."""
    without = sorted(set(seeds) - set(one.differences if one else ()))
    return f"not resolved: no value of seed {', '.join(map(str, without))}" if without else ""


def by_document(runs: Runs, stage: str, model: str) -> estimates.Blocks:
    """{seed: (summed loss of each held-out document in bits, its masked tokens)} of a stage's runs."""
    found = {}
    for trial in (trial for trial in runs.planned(stage) if trial.model == model):
        sums = [
            [float(row["value"]) for row in runs.rows["measures"]
             if row["run"] == str(trial) and row["measure"] == f"{name} by document"]
            for name in ("nats", "tokens")
        ]  # fmt: skip
        if sums[0]:
            found[trial.seed] = BITS * np.array(sums[0]), np.array(sums[1])
    return found


def intervention(runs: Runs, found: Sequence[Lead]) -> list[str]:
    if not runs.is_complete("delay"):
        return []
    seeds, finals = STAGES["delay"]["seeds"], runs.finals("delay")
    of = {(lead.run.model, lead.run.seed): lead for lead in found if lead.run.stage == "delay"}

    def exits(model: str) -> str:
        leads = [of.get((model, seed)) for seed in seeds]  # None: it diverged
        return ", ".join("–" if one is None else "never" if one.exit is None else f"{one.exit:,.0f}" for one in leads)

    def after(model: str, n: int) -> str:
        gaps = [of[model, seed].gaps.get(n) if (model, seed) in of else None for seed in seeds]
        return ", ".join("–" if gap is None else number(-gap) for gap in gaps)

    def drawn(model: str) -> str:
        _, (low, high) = estimates.bootstrap(*(by_document(runs, "delay", name) for name in (model, "bert_a")))
        return f"[{low:.3f}, {high:.3f}]"

    rows = [["`bert_a`", "", "", "", "", exits("bert_a"), ""]]
    for model in STAGES["delay"]["rates"]:
        if model == "bert_a":
            continue
        one = paired(finals, model, "bert_a")
        cells = [*shown_by_seed(one, seeds), drawn(model)] if one else ["–"] * 3
        verdict = missing(one, seeds) or verdict_of_delayed(one) if model.startswith(DELAYED) else ""
        rows.append([f"`{model}` - `bert_a`", *cells, after(model, 2000), exits(model), verdict])
    header = ["difference", "final losses, by seed", "mean [95 % t-interval]", "seeds and documents drawn anew [95 %]",
              "2,000 updates after the exits, by seed", "leaves the plateau at, by seed", "verdict"]  # fmt: skip
    narrow = "Seeds drawn anew give too narrow an interval: with three of them, about 75 % instead of 95 %.\n"
    return ["### (a) The intervention\n", TextTable.plain(header, rows, align="lrrrrrl").markdown(), narrow]


def verdict_of_drift(one: Contrast, p: float, fresh: Sequence[int]) -> str:
    """(b). p: corrected; fresh: the seeds that were not known, which have to have the sign of the mean."""
    if p <= ALPHA and all(one.differences[seed] * one.mean > 0 for seed in fresh):
        return "the offset shrinks" if one.mean < 0 else "the offset grows"
    return f"the offset stays, up to {LAST:,} updates after the exit" if same(one, STEADY) else "not resolved"


def drift(runs: Runs, found: Sequence[Lead]) -> list[str]:
    if not runs.is_complete("drift"):
        return []
    of = {model: {} for model in ("tupe_a", "tupe_r")}  # {model: {seed: its lead}}
    for lead in found:
        if lead.run.stage in ("lasting", "drift") and lead.run.model in of:
            of[lead.run.model][lead.run.seed] = lead
    drifts = [{seed: lead.drift for seed, lead in leads.items() if lead.drift is not None} for leads in of.values()]
    ones = [contrast(slopes, dict.fromkeys(SEEDS_OF_DRIFT, 0.0)) for slopes in drifts]
    rows = []
    for (model, leads), one, p in zip(of.items(), ones, holm([one.p for one in ones]), strict=True):
        verdict = missing(one, SEEDS_OF_DRIFT) or verdict_of_drift(one, p, STAGES["drift"]["seeds"])
        gaps = [leads[seed].gaps.get(LAST) if seed in leads else None for seed in SEEDS_OF_DRIFT]
        last = ", ".join("–" if gap is None else number(gap) for gap in gaps)
        rows.append([f"`{model}`", *shown_by_seed(one, SEEDS_OF_DRIFT), f"{p:.2g}", verdict, last])
    header = ["model", "drift by seed, bits per 1,000 updates", "mean [95 % interval]", "p (Holm)", "verdict",
              f"`bert_a` - model, {LAST:,} updates after the exits, by seed"]  # fmt: skip
    return ["### (b) The drift\n", TextTable.plain(header, rows, align="lrrrlr").markdown()]


def verdict_of_rate(one: Contrast) -> str:
    """(c): BERT-A's loss minus TUPE-A's, 3,000 updates after the exits."""
    if one.interval[0] > 0:
        return "an offset, which the rate had hidden"
    if same(one, MARGIN):
        return "no offset at tiny size"
    return "reversed" if one.interval[1] < 0 else "not resolved"


def same_rate(runs: Runs, found: Sequence[Lead]) -> list[str]:
    if not runs.is_complete("tiny_same_rate"):
        return []
    gaps = {lead.run.seed: lead.gaps[3000] for lead in found if lead.run.stage == "tiny_same_rate"}
    one = contrast(gaps, dict.fromkeys(gaps, 0.0))
    row = ["`bert_a` - `tupe_a`", *shown_by_seed(one, sorted(gaps)), verdict_of_rate(one)]
    header = ["3,000 updates after the exits", "by seed", "mean [95 % interval]", "verdict"]
    return ["### (c) Tiny models at one rate\n", TextTable.plain(header, [row], align="llrl").markdown()]


# --------------------------------------------------------------------------------------------------- (d), fine-tunings


def scores(tables: Path = TABLES) -> list[Score]:
    """Of the committed fine-tunings."""
    path = tables / "finetuned.csv"
    rows = csv.DictReader(path.open(encoding="utf-8")) if path.exists() else ()
    return [
        Score(Trial.parse(row["run"]), row["task"], float(row["rate"]), int(row["seed"]), float(row["best"]),
              float(row["last"]))
        for row in rows
    ]  # fmt: skip


def add_scores(new: Iterable[Score], tables: Path = TABLES) -> None:
    """To the committed ones, of which they replace those of the same fine-tuning."""
    found = {one[:4]: one for one in [*scores(tables), *new]}
    rows = [
        [str(trial), task, f"{rate:g}", str(seed), *(number(value, 2) for value in values)]
        for trial, task, rate, seed, *values in sorted(found.values(), key=lambda one: (str(one.trial), *one[1:]))
    ]
    write_atomically(tables / "finetuned.csv", TextTable.plain(["run", *Score._fields[1:]], rows).csv())


def finetuned(found: Sequence[Score]) -> dict[tuple[str, int, str], Seeds]:
    """{(model, pre-training seed, task): {fine-tuning seed: score}} of (d)."""
    of = {(model, seed, task): {} for model in MODELS for seed in STAGES["downstream"]["seeds"] for task in TASKS}
    planned = {(stage, model) for model, stage in MODELS.items()}
    for one in found:
        if (one.trial.stage, one.trial.model) in planned and one.rate == RATE and one.seed in FINETUNING_SEEDS:
            of[one.trial.model, one.trial.seed, one.task][one.seed] = one.best
    return of


def medians_of(of: dict[tuple[str, int, str], Seeds]) -> dict[str, dict[str, Seeds]]:
    """{task: {model: {pre-training seed: median over fine-tuning seeds}}}; "average": of the four tasks."""
    median = {key: statistics.median(scores.values()) for key, scores in of.items()}
    seeds = STAGES["downstream"]["seeds"]
    medians = {task: {m: {s: median[m, s, task] for s in seeds} for m in MODELS} for task in TASKS}
    medians["average"] = {m: {s: statistics.mean(medians[t][m][s] for t in TASKS) for s in seeds} for m in MODELS}
    return medians


def downstream(found: Sequence[Score]) -> list[str]:
    """(d): medians over fine-tuning seeds, and differences from BERT-A paired by the pre-training seed. A sentence that
    says how many there are, until all are."""
    of, seeds = finetuned(found), STAGES["downstream"]["seeds"]
    done, needed = sum(map(len, of.values())), len(of) * len(FINETUNING_SEEDS)
    lines = ["### (d) Downstream\n", f"{done} of {needed} fine-tunings.\n"]
    if done < needed:
        return lines
    medians = medians_of(of)

    def spread(task: str, model: str) -> str:
        return number(statistics.mean(statistics.stdev(of[model, seed, task].values()) for seed in seeds), 1)

    def of_seeds(values: Seeds) -> str:
        return ", ".join(number(values[seed], 1) for seed in seeds)

    rows = []
    for task, by_model in medians.items():
        for model, values in by_model.items():
            against = contrast(values, by_model["bert_a"]) if model != "bert_a" else None
            cells = of_seeds(values), number(statistics.mean(values.values()), 1)
            rows.append([
                task, f"`{model}`", *cells, spread(task, model) if task in TASKS else "",
                estimates.shown(against.mean, against.interval, 1) if against else "",
            ])  # fmt: skip
    header = ["task", "model", "median, by pre-training seed", "mean", "s.d. of fine-tuning seeds",
              "minus `bert_a` [95 %]"]  # fmt: skip
    return [*lines, TextTable.plain(header, rows, align="llrrrr").markdown()]
