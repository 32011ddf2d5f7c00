"""Delay and offset of every model of both experiments: docs/evidence/delay.csv, a row for each run, and delay.md, from
the committed tables and nothing else. Training losses, in bits per masked token.

A model's delay is by how many updates BERT-A leaves the plateau later. Its offset is what is left of its lead when both
are as many updates past their exits. At a constant rate both can also be fitted, to
BERT-A(u) = model(u - delay) + offset, which knows nothing of the exits.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from tupe.common.tables import TextTable

from . import third
from .estimates import first_below, number, with_interval
from .known import Runs
from .plan import LATER, PLAN, THIRD, Trial, cooldown_of

EVERY = 50  # updates between two points of a curve
AFTER = (1000, 2000, 3000, 4000)  # updates after the exit, at which the gap is shown
# The drift is that of the gap from the first to the last of these updates after the exit. A trunk may end earlier, but
# not before the second.
DRIFT = (500, 3000, third.LAST)
SMOOTH, STEP = 10, 25  # points that are averaged; updates between tried delays
SETTLED = 1000  # updates left out after the exit
STAGES = ["controls", "main", "slower", "longer"]  # whose runs have a row
STAGES += [stage for stage in LATER["stages"] if stage not in ("again", "again_bf16", "neighbours", "released")]
# Stages whose BERT-A another one has.
BERT_OF = {
    "bundle": "decide", "tiny_bundle": "tiny_decide", "slower": "main", "tiny_same_rate": "tiny_lasting",
    "downstream": "delay",
}  # fmt: skip


class Curve(NamedTuple):
    updates: np.ndarray
    losses: np.ndarray
    exit: float | None
    constant: bool  # the rate, behind the warm-up


@dataclass
class Lead:
    """What the curve of a run says beside BERT-A's of the same seed. None: not there, or not to be had."""

    run: Trial
    schedule: str
    exit: float | None
    gain: float | None = None  # BERT-A's final held-out loss minus the run's
    delay: float | None = None
    gaps: dict[int, float] = field(default_factory=dict)  # {n: BERT-A's loss minus the run's, n after each one's exit}
    fit: "Fit | None" = None
    drift: float | None = None  # of the gap, per 1,000 updates; see `DRIFT`


class Fit(NamedTuple):
    delay: float
    offset: float
    residual: float  # standard deviation
    without: float  # the same, of the best delay without an offset


def smooth(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """(updates, mean loss of the `SMOOTH` points that end there)."""
    kernel = np.ones(SMOOTH) / SMOOTH
    return curve.updates[SMOOTH - 1 :], np.convolve(curve.losses, kernel, "valid")


def at(curve: Curve, updates: float) -> float:
    """The mean loss of the `SMOOTH` points, 50 updates apart, that end at an update."""
    points = updates - EVERY * np.arange(SMOOTH)
    return float(np.interp(points, curve.updates, curve.losses).mean())


def fit(bert: Curve, model: Curve) -> Fit | None:
    """See the top; by least squares, to BERT-A's curve from `SETTLED` updates after its exit on. None where that leaves
    fewer than 20 points."""
    (u, target), (v, losses) = smooth(bert), smooth(model)
    kept = u >= bert.exit + SETTLED
    u, target = u[kept], target[kept]
    if len(u) < 20:
        return None
    best, alone = None, math.inf
    most = int(bert.exit + SETTLED - v[0])  # what keeps the earliest point on the model's curve
    for delay in range(0, most + 1, STEP):
        rest = target - np.interp(u - delay, v, losses)
        alone = min(alone, float(np.sqrt((rest**2).sum() / (len(rest) - 1))))
        sd = float(rest.std(ddof=2))
        if best is None or sd < best.residual:
            best = Fit(delay, float(rest.mean()), sd, 0.0)
    return best._replace(without=alone)


def curve_of(runs: Runs, trial: Trial) -> Curve | None:
    """The curve of a run up to its cool-down; None without one that is whole."""
    updates, losses = map(np.array, runs.curves.get(trial, ((), ())))
    cooldown = cooldown_of(trial)
    kept = updates <= trial.updates - cooldown
    if not kept.any() or updates[0] != EVERY:
        return None
    updates, losses = updates[kept], losses[kept]
    return Curve(updates, losses, first_below(updates.tolist(), losses.tolist(), runs.threshold), bool(cooldown))


def trials_of(runs: Runs, stage: str) -> list[Trial]:
    """The runs of a stage that have a final loss: with cool-downs only the longest ones, whose trunk holds the
    others'."""
    done = [t for t in runs.planned(stage) if t.stage == stage and math.isfinite(runs.losses.get(t, math.inf))]
    if stage in PLAN["stages"]:
        models = list(PLAN["models"])
        done.sort(key=lambda trial: (models.index(trial.model), trial.lr, trial.seed))
    longest = {(trial.model, trial.lr, trial.seed): trial for trial in done}
    return [trial for trial in done if longest[trial.model, trial.lr, trial.seed] == trial]


def leads(runs: Runs | None = None) -> list[Lead]:
    """Delay and offset of every run of the experiments that has a curve."""
    runs, found = runs or Runs(), []
    planned = {stage: trials_of(runs, stage) for stage in STAGES}
    curves = {trial: curve_of(runs, trial) for trials in planned.values() for trial in trials}
    curves = {trial: curve for trial, curve in curves.items() if curve}
    for stage, trials in planned.items():
        for trial in (trial for trial in trials if trial in curves):
            of_bert = "bert_a", BERT_OF.get(stage, stage), trial.seed
            berts = {t.lr: t for t in curves if (t.model, t.stage, t.seed) == of_bert}
            # at the same rate, or at the only one that it has
            bert = berts.get(trial.lr) or (next(iter(berts.values())) if len(berts) == 1 else None)
            one = lead(trial, curves[trial], curves.get(bert))
            # the third protocol's final losses are of all held-out text, those before of its first 400,000 tokens
            same_text = bert and (bert.stage in THIRD) == (trial.stage in THIRD)
            if bert and same_text and bert.updates == trial.updates and bert != trial:
                one.gain = runs.losses[bert] - runs.losses[trial]
            found.append(one)
    return found


def lead(trial: Trial, curve: Curve, bert: Curve | None, after: Collection[int] = (*AFTER, DRIFT[-1])) -> Lead:
    """after: updates after the exits, at which the gap is taken where both curves go so far."""
    one = Lead(trial, "constant" if curve.constant else "decay", curve.exit)
    if trial.model == "bert_a" or bert is None or bert.exit is None or curve.exit is None:
        return one
    one.delay = bert.exit - curve.exit
    end = min(bert.updates[-1] - bert.exit, curve.updates[-1] - curve.exit)
    one.gaps = {n: at(bert, bert.exit + n) - at(curve, curve.exit + n) for n in after if n <= end}
    if curve.constant and bert.constant:
        one.fit = fit(bert, curve)
        one.drift = drift(bert, curve, end)
    return one


def drift(bert: Curve, model: Curve, end: float) -> float | None:
    """The slope of the gap per 1,000 updates; see `DRIFT`. end: updates after the exit at which a trunk ends."""
    first, least, last = DRIFT
    if end < least:
        return None
    n = np.arange(first, min(last, end) // EVERY * EVERY + 1, EVERY)
    gap = np.subtract(*(np.interp(curve.exit + n, curve.updates, curve.losses) for curve in (bert, model)))
    return float(np.polyfit(n / 1000, gap, 1)[0])


# ------------------------------------------------------------------------------------------------------------- as text

COLUMNS = (
    "run", "schedule", "exit", "gain", "delay", *(f"gap_{n}" for n in AFTER), "fit_delay", "fit_offset", "residual",
    "residual_without_offset", "drift",
)  # fmt: skip


def table_of_runs(found: list[Lead]) -> str:
    """docs/evidence/delay.csv."""
    rows = []
    for one in found:
        gaps = [number(one.gaps.get(n)) for n in AFTER]
        fitted = ["", "", "", ""]
        if one.fit:
            fitted = [f"{one.fit.delay}", number(one.fit.offset), number(one.fit.residual), number(one.fit.without)]
        cells = number(one.exit, 0), number(one.gain), number(one.delay, 0), *gaps, *fitted, number(one.drift, 4)
        rows.append([str(one.run), one.schedule, *cells])
    return TextTable.plain(list(COLUMNS), rows).csv()


def by_model(found: list[Lead]) -> dict[Trial, list[Lead]]:
    """Leads that differ in nothing but the seed, by the first of them."""
    groups = defaultdict(list)
    for one in found:
        groups[replace(one.run, seed=0)].append(one)
    return {ones[0].run: ones for ones in groups.values()}


def interval(values: Iterable[float | None], digits: int = 2) -> str:
    """Mean and interval of what is there; "" unless all of it is."""
    values = list(values)
    return "" if None in values else with_interval(values, digits)


def span(values: Iterable[float | None]) -> str:
    """ "1,840 to 1,929" updates; "never" where a run has not left."""
    values = list(values)
    if None in values:
        return "never"
    low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
    return low if low == high else f"{low} to {high}"


def constant_table(found: list[Lead]) -> TextTable:
    """Runs at a constant rate: delay by the exits and by the fit, offset, what the fit leaves, drift."""
    rows = []
    for trial, ones in by_model([one for one in found if one.schedule == "constant"]).items():
        fits = [one.fit for one in ones]
        cells = [trial.stage, f"`{trial.model}`", f"{trial.lr:g}", f"{len(ones)}", span(one.exit for one in ones)]
        cells += [span(one.delay for one in ones)] if all(one.delay for one in ones) else [""]
        if all(fits):
            cells += [
                span(one.delay for one in fits), interval(one.offset for one in fits),
                to(one.residual for one in fits), to(one.without for one in fits),
                interval((one.drift for one in ones), 3),
            ]  # fmt: skip
        rows.append(cells + [""] * (11 - len(cells)))
    header = ["stage", "model", "rate", "seeds", "leaves the plateau at", "delay, by the exits", "delay, fitted",
              "offset, fitted [95 %]", "residual", "without an offset", "drift per 1,000 [95 %]"]  # fmt: skip
    return TextTable.plain(header, rows, align="ll" + "r" * 9)


def to(values: Iterable[float]) -> str:
    values = list(values)
    return f"{min(values):.3f} to {max(values):.3f}"


def decay_table(found: list[Lead], stages: Collection[str]) -> TextTable:
    """Runs whose rate decays: exits, delay, gaps after the exit, and the gain in final loss."""
    rows = []
    for trial, ones in by_model([one for one in found if one.run.stage in stages]).items():
        gaps = [interval(one.gaps.get(n) for one in ones) if trial.model != "bert_a" else "" for n in AFTER]
        delays = span(one.delay for one in ones) if all(one.delay for one in ones) else ""
        gain = interval(one.gain for one in ones)
        cells = [trial.stage, f"`{trial.model}`", f"{trial.lr:g}", f"{trial.updates:,}", f"{len(ones)}"]
        rows.append([*cells, span(one.exit for one in ones), delays, *gaps, gain])
    header = ["stage", "model", "rate", "updates", "seeds", "leaves the plateau at", "delay",
              *(f"gap {n:,} after exit" for n in AFTER), "gain, final loss [95 %]"]  # fmt: skip
    return TextTable.plain(header, rows, align="ll" + "r" * (len(header) - 2))


# --------------------------------------------------------------------------------------------------------- its own page


PAGE = """# Delays and offsets

Written by `python -m lab page` from the committed tables; `delay.csv` beside this page has a row for each run.
Bits per masked token.

A model *leaves the plateau* at the update at which its training loss, averaged over 50 updates, falls below
{threshold:.2f} bits. Its **delay** is the number of updates by which BERT-A of the same seed leaves later. Its
**offset** is what it is ahead of BERT-A when both are as many updates past their own exits. Delay and offset were
noticed after the runs of the first two experiments had ended, so their rows decide nothing.
[A third protocol](../third-protocol.md) planned further stages, whose verdicts are [below](#the-third-protocol):
{third}.

## At a constant rate

Both can be read from the exits, and fitted without them: BERT-A(u) = model(u - delay) + offset, by least squares on
means of {smooth} points, from {settled:,} updates after BERT-A's exit to the end of the trunk (6,400 updates).
*Residual*: the standard deviation that the fit leaves; *without an offset*: what the best delay alone leaves. *Drift*:
the slope of the gap at equal numbers of updates after the exits, from {begin} to {last:,}, or to the end of a trunk
that ends earlier. A row is of all seeds of a stage that have run. Stages called `tiny_` have tiny models, the others
have mini ones.

{constant}
**In the mini models of `lasting`, where all have one rate, a delay alone does not describe the curves; a delay and an
offset do**, and the gap does not shrink as far as those runs go. **In `tiny_lasting` the rates differ**: TUPE trained
at twice BERT-A's constant rate, and a higher constant rate costs at the end. So its offsets are confounded with the
rate, but for `absolute_0.06`. `tiny_same_rate` has TUPE-A at BERT-A's rate.

## With a decay

Where the rate decays, a model that leaves late makes its updates after the exit at lower rates: with less noise, and
with less progress. So the gaps are no clean offsets, and nothing is fitted. *Gap*: mean of {smooth} points that end
there, BERT-A's minus the model's.

{decay}
**The offset is not one number for all rates.** Where the models of the stage `main` trained at 2e-3 and BERT-A at 1e-3,
hardly anything is left 2,000 updates after the exit. At 5e-4 (`mini_rates`, one seed) more is left than at 1e-3. With
one seed, BERT-A's exit hardly depends on the rate: {bert_rates}.
"""


def page(runs: Runs | None = None) -> tuple[str, str]:
    """(docs/evidence/delay.md, docs/evidence/delay.csv)."""
    runs = runs or Runs()
    found = leads(runs)
    of_rates = ((one.run.lr, one.exit) for one in found if str(one.run).startswith("mini_rates/bert_a/"))
    rates = ", ".join(f"{exit:,.0f} ({lr:g})" for lr, exit in sorted(of_rates))
    text = PAGE.format(
        threshold=runs.threshold, smooth=SMOOTH, settled=SETTLED, begin=DRIFT[0], last=DRIFT[-1],
        third=", ".join(f"`{stage}`" for stage in THIRD),
        constant=constant_table(found).markdown(),
        decay=decay_table(found, {one.run.stage for one in found if one.schedule == "decay"}).markdown(),
        bert_rates=rates,
    )  # fmt: skip
    return "\n".join([text, *third.outcomes(runs, found)]), table_of_runs(found)
