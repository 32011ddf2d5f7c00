"""Recomputes the numbers of the finished experiments' pages from the tables in docs/evidence, and names what a page
says otherwise:

    python -m lab recompute

`SAYINGS` has a function for each page: what it has to say, word by word, with the numbers of the tables. `ROWS` names
the stages whose tables of differences and losses are read from a page, row by row. Losses in bits per masked token.
docs/protocol.md and docs/second-protocol.md say how each number is computed.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from tupe.common import options

from .collect import read_table
from .delay import Lead, curve_of, leads, span
from .estimates import (
    ALPHA,
    Contrast,
    Seeds,
    contrast,
    equivalence,
    first_below,
    geometric_mean_interval,
    holm,
    number,
    of_contrast,
    paired,
    shown,
    welch,
    with_interval,
)
from .known import FIRST, TABLES, Runs, step_ratios
from .plan import LATER, Trial
from .third import STEADY, finetuned, medians_of, scores

ROOT = Path(__file__).parents[1]
MARGIN = 0.1  # bits, of equivalence
CONTRASTS = {  # the five of the protocol: the claim is that the first model's loss is lower
    ("tupe_a_tie_cls", "bert_a"): "the bundle of six changes",
    ("tupe_a", "tupe_a_tie_cls"): "[CLS] apart from positions",
    ("bert_r", "bert_a"): "a relative bias, tied",
    ("tupe_r", "bert_r"): "the bundle, beside a relative bias",
    ("tupe_r", "tupe_a"): "a relative bias, untied",
}
BESIDE = ("tupe_a_tie_cls", "bert_a_d")  # a difference of stage D that is none of the five
EQUIVALENT = (("tupe_a", "tupe_a_tie_cls"), ("tupe_r", "tupe_a"), BESIDE)
CHANGES = {tuple(entry["models"]): entry["change"] for entry in LATER["differences"]}  # stage C
TUPES = ("tupe_a", "tupe_r")
BOTH_SIZES = {"decide": "bundle", "tiny_decide": "tiny_bundle"}  # stages of D, and those of C beside them
NAMES = {  # the models of a table of docs/results.md
    "bert_a": "BERT-A", "absolute_halved": "BERT-A, word logits over sqrt(2D)",
    "absolute_0.06": "BERT-A, position vectors three times as large", "bert_r": "BERT-R: BERT-A and a relative bias",
    "both": "BERT-A and TUPE's position logits", "bert_a_d": "BERT-A^d: TUPE and terms of words with positions",
    "tupe_a_tie_cls": "TUPE-A, [CLS] tied", "tupe_a": "TUPE-A", "tupe_r": "TUPE-R: TUPE-A and a relative bias",
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------ as the pages do


def to(values: Iterable[float], digits: int = 0) -> str:
    """ "0.84 to 1.01"."""
    values = list(values)
    return f"{min(values):,.{digits}f} to {max(values):,.{digits}f}"


def gain(one: Contrast) -> str:
    """ "0.56 [0.35, 0.78]": by how much the first model's loss is lower."""
    return cell(one, -1, 2)


def cell(one: Contrast, sign: int = 1, digits: int = 3) -> str:
    return shown(sign * one.mean, one.interval and tuple(sorted(sign * bound for bound in one.interval)), digits)


def share(shares: Seeds) -> str:
    """ "55 % [50, 59]": geometric mean and its interval."""
    mean, (low, high) = geometric_mean_interval(shares.values())
    return f"{100 * mean:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


# ------------------------------------------------------------------------------------------------- what the tables show


class Decision(NamedTuple):
    contrast: Contrast
    verdict: str


def paired_p(a: Seeds, b: Seeds) -> float:
    return contrast(a, b).p


def welch_p(a: Seeds, b: Seeds) -> float:
    return welch(a.values(), b.values())[-1]


def corrected(finals: dict[str, Seeds], pairs: Iterable[tuple[str, str]], test: Callable = paired_p) -> list[float]:
    """p-values of differences, corrected by Holm for their number."""
    return holm([test(finals[a], finals[b]) for a, b in pairs])


def verdicts_of_main(runs: Runs) -> dict[tuple[str, str], Decision]:
    """The five contrasts by the first protocol's one test."""
    finals, found = runs.finals("main"), {}
    for pair, p in zip(CONTRASTS, corrected(finals, CONTRASTS), strict=True):
        one = paired(finals, *pair)
        word = "confirmed" if one.mean < 0 else "refuted"
        found[pair] = Decision(one, word if p <= ALPHA else "not resolved")
    return found


def verdicts_of_d(runs: Runs, stage: str) -> dict[tuple[str, str], Decision]:
    """The five contrasts and the one beside them, by the second protocol's two tests and that of equivalence."""
    finals, found = runs.finals(stage), {}
    for test in (paired_p, welch_p):
        ps = [*corrected(finals, CONTRASTS, test), test(*(finals[model] for model in BESIDE))]
        for pair, p in zip((*CONTRASTS, BESIDE), ps, strict=True):
            found[pair] = max(p, found.get(pair, 0))
    for pair, p in found.items():
        one, word = paired(finals, *pair), "not resolved"
        fresh = (one.differences[seed] for seed in LATER["stages"][stage].get("fresh", ()))
        if p <= ALPHA and all(difference * one.mean > 0 for difference in fresh):
            word = "confirmed" if one.mean < 0 else "refuted"
        elif pair in EQUIVALENT and equivalence(one.differences.values(), MARGIN) <= ALPHA:
            word = f"no more than {MARGIN} bits"
        found[pair] = Decision(one, word)
    return found


def verdicts_of_c(runs: Runs, *stages: str) -> dict[tuple[str, str], Decision]:
    """The parts of the bundle, two-sided, corrected for five."""
    finals, found = runs.finals(*stages), {}
    for pair, p in zip(CHANGES, corrected(finals, CHANGES), strict=True):
        one = paired(finals, *pair)
        found[pair] = Decision(one, "not resolved" if p > ALPHA else "lower" if one.mean < 0 else "higher")
    return found


def gaps(runs: Runs, stage: str, model: str) -> list[Contrast]:
    """BERT-A's final loss minus a model's, after 4,000 and after 8,000 updates."""
    return [paired(runs.finals(stage, updates=updates), "bert_a", model) for updates in (4000, 8000)]


def after_exit(runs: Runs, trials: Iterable[Trial], points: int = 1) -> tuple[dict[str, Seeds], int]:
    """({model: {seed: training loss n updates after its exit}}, n), n being the largest multiple of 50 that all of the
    runs which left the plateau have; points: how many, 50 updates apart and ending there, are averaged."""
    curves = {trial: curve_of(runs, trial) for trial in trials}
    curves = {trial: curve for trial, curve in curves.items() if curve and curve.exit is not None}
    n = int(min(curve.updates[-1] - curve.exit for curve in curves.values()) // 50 * 50)
    found = defaultdict(dict)
    for trial, curve in curves.items():
        at = curve.exit + n - 50 * np.arange(points)
        found[trial.model][trial.seed] = float(np.interp(at, curve.updates, curve.losses).mean())
    return found, n


def gap_after_exit(runs: Runs, stage: str, model: str, points: int = 1) -> tuple[Contrast, int]:
    """(BERT-A's training loss minus a model's, both n updates after their exits, n): on trunks of 8,000 updates."""
    losses, n = after_exit(runs, [t for t in runs.planned(stage, 8000) if t.model in ("bert_a", model)], points)
    return paired(losses, "bert_a", model), n


def shares(runs: Runs, stage: str, model: str) -> Seeds:
    """{seed: share of BERT-A's updates after which the validation loss of a model is BERT-A's last one}."""
    trials, curves = {(t.model, t.seed): t for t in runs.planned(stage)}, runs.curves_of("validation")
    found = {}
    for (name, seed), trial in trials.items():
        bert = trials["bert_a", seed]
        if name == model and trial in curves and bert in curves:
            found[seed] = first_below(*curves[trial], curves[bert][1][-1]) / bert.updates
    return found


def validation(runs: Runs, trials: Iterable[Trial]) -> dict[str, Seeds]:
    """{model: {seed: final loss on the other held-out sample}}."""
    rows, found = {row["run"]: row["validation_loss"] for row in runs.rows["runs"]}, defaultdict(dict)
    for trial in trials:
        if rows.get(str(trial)):
            found[trial.model][trial.seed] = float(rows[str(trial)])
    return found


def zorro() -> dict[str, dict[str, float]]:
    """{run, or released model: {paradigm: accuracy in per cent}}."""
    scores = defaultdict(dict)
    for line in read_table(TABLES / "zorro.csv.gz"):
        scores[line["run"]][line["paradigm"]] = 100 * float(line["accuracy"])
    return scores


def only_order() -> list[float]:
    """Per cent right in BLiMP, of each main model that was scored: macro average over the pairs whose words differ in
    order alone, of paradigms that have ten."""
    kept = {}
    for line in read_table(FIRST / "paradigms.csv.gz"):
        pairs = zip(line["same_words"], line["same_pieces"], strict=True)
        kept[line["paradigm"]] = np.array([words == "1" and pieces == "0" for words, pieces in pairs])
    credits = defaultdict(list)
    for line in read_table(FIRST / "pairs.csv.gz"):
        trial = Trial.parse(line["run"])
        if trial.stage == "main" and int(line["updates"]) == trial.updates:
            values = np.array([{"0": 0.0, "h": 0.5, "1": 1.0}[letter] for letter in line["word"]])
            values = values[kept[line["paradigm"]][: len(values)]]
            if len(values) >= 10:
                credits[trial].append(100 * values.mean())
    return [float(np.mean(of_paradigms)) for of_paradigms in credits.values()]


# ------------------------------------------------------------------------------------------------- what the pages say


class Evidence:
    """The committed runs, and their delays and offsets."""

    def __init__(self):
        self.runs = Runs()
        self.leads = leads(self.runs)

    def of(self, stage: str, model: str) -> list[Lead]:
        return [one for one in self.leads if (one.run.stage, one.run.model) == (stage, model)]

    def exits(self, stage: str, model: str) -> str:
        return span(one.exit for one in self.of(stage, model))

    def gain(self, stage: str, model: str) -> str:
        """The gain over BERT-A in final loss, with its interval."""
        return with_interval([one.gain for one in self.of(stage, model)], 2)

    def gap(self, stage: str, model: str, n: int, sign: int = 1) -> str:
        """... n updates after the exits of both."""
        return with_interval([sign * one.gaps[n] for one in self.of(stage, model)], 2)

    def differences(self, stage: str, a: str, b: str, updates: int | None = None) -> Contrast:
        return paired(self.runs.finals(stage, updates=updates), a, b)


def mean(text: str) -> str:
    """ "0.79", of "0.79 [0.74, 0.84]"."""
    return text.partition(" ")[0]


def readme(e: Evidence) -> Iterator[str]:
    yield f"after {e.exits('decide', 'tupe_a')} updates, of BERT after {e.exits('decide', 'bert_a')}."
    yield f"TUPE-A is {mean(e.gain('decide', 'tupe_a'))} bits per masked token ahead after 5,000 updates."
    short, long = (number(one.mean, 2) for one in gaps(e.runs, "lasting", "tupe_a"))
    yield f"it is {short} ahead after 4,000 updates and {long} after 8,000."
    yield f"at which they begin to use it, TUPE-A is {e.gap('lasting', 'tupe_a', 4000)} ahead (three seeds;"
    late = e.gain("delay", "tupe_a_from_1850")
    yield f"After 5,000 updates it is still {late} ahead (three seeds; this was planned)."


def index(e: Evidence) -> Iterator[str]:
    pairs = [gaps(e.runs, "lasting", model) for model in TUPES]
    kept = [
        100 * long.differences[seed] / short.differences[seed] for short, long in pairs for seed in long.differences
    ]
    yield f"{to(kept)} % of their lead from 4,000 to 8,000"


def start(e: Evidence) -> Iterator[str]:
    stages = {"controls": None, "longer": None, "tiny_decide": None, "tiny_lasting": 8000}
    trials = [t for stage, updates in stages.items() for t in e.runs.planned(stage, updates) if t in e.runs.losses]
    bert, tupe = ([e.runs.exit(t) for t in trials if t.model == model] for model in ("bert_a", "tupe_r"))
    count, seeds = len(bert), len({t.seed for t in trials})
    assert (count, seeds) == (len(tupe), 8)
    yield f"left after {to(bert)} updates, TUPE-R after {to(tupe)} ({count} runs each, of eight seeds)"


def results(e: Evidence) -> Iterator[str]:
    runs = e.runs
    delays = [one.delay for stage in ("decide", "lasting") for model in TUPES for one in e.of(stage, model)]
    yield f"a head start of {round(np.mean(delays), -2):,.0f} updates, which longer training wears away"
    yield f"as in BERT, leaves it after {e.exits('decide', 'bert_a')} updates."
    yield f"have logits of their own, leaves it after {e.exits('decide', 'tupe_a')}."
    first = mean(e.gain("decide", "tupe_a"))
    yield f"TUPE-A is {first} bits per masked token ahead after 5,000 updates with a rate that decays (five seeds)."
    short, long = (number(one.mean, 2) for one in gaps(runs, "lasting", "tupe_a"))
    yield f"At a constant rate it is {short} bits ahead after 4,000 updates, and {long} after 8,000 (three seeds)."
    near, far = (mean(e.gap("lasting", "tupe_a", n)) for n in (1000, 4000))
    yield f"Then TUPE-A is {near} bits ahead after 1,000 more updates, and {far} after 4,000."
    fits = [one.fit for one in e.of("lasting", "tupe_a")]
    offset = with_interval([fit.offset for fit in fits], 2)
    yield f"BERT-A's curve is TUPE-A's, {span(fit.delay for fit in fits)} updates later and {offset} bits higher"
    late, given = "tupe_a_from_1850", "bert_a_trained"
    yield f"it still ended {e.gain('delay', late)} bits per masked token below BERT-A."
    medians = medians_of(finetuned(scores()))
    tupe_a, tupe_r, cola = (
        of_contrast(contrast(medians[task][model], medians[task]["bert_a"]), 1)
        for task, model in (("average", "tupe_a"), ("average", "tupe_r"), ("CoLA", "tupe_a"))
    )
    yield f"mini TUPE-A scores {tupe_a} points more than BERT-A on average"
    yield f"TUPE-A's average is {tupe_a} points above BERT-A's, and TUPE-R's {tupe_r}."
    yield f"{cola} of TUPE-A on CoLA."
    yield f"It left the plateau after {e.exits('delay', late)} updates, BERT-A after {e.exits('delay', 'bert_a')}."
    later = span(-one.delay for one in e.of("delay", late))
    yield f"it was {e.gain('delay', late)} bits ahead, though it had left {later} updates later. We had predicted 0.25."
    early, gained = e.exits("delay", given), e.gain("delay", given)
    yield f"It left after {early} updates, as early as TUPE-A, and gained {gained} bits."
    yield f"it is level with BERT-A: {e.gap('delay', given, 2000)} bits ahead."
    yield f"With them, mini models left the plateau {span(one.delay for one in e.of('delay', given))} updates earlier."
    near, far = (e.gap("tiny_same_rate", "tupe_a", n) for n in (1000, 3000))
    yield f"its lead is {near} bits 1,000 updates after the exits, and {far} after 3,000"
    known, fresh = ([one for model in TUPES for one in e.of(stage, model)] for stage in ("lasting", "drift"))
    of_a, of_r = (with_interval([one.drift for one in known + fresh if one.run.model == model]) for model in TUPES)
    yield f"the gap to BERT-A changes by {of_a} bits in 1,000 updates for TUPE-A, and by {of_r} for TUPE-R."
    yield f"We had set {STEADY} as the margin of no change"
    changes = [[one.gaps[4400] - one.gaps[2000] for one in ones] for ones in (known, fresh)]
    yield f"the gaps of the two new seeds fall by {to([-change for change in changes[1]], 2)} bits, and"
    yield f"those of the known ones change by {to(changes[0], 2)}."
    lead = to([one.gain for one in e.of("drift", "tupe_a")], 2)
    yield f"leaves after {e.exits('drift', 'bert_a')} updates, and TUPE-A is {lead} bits ahead after 8,000."
    yield f"three times as large leaves after {e.exits('bundle', 'absolute_0.06')} updates, and gains "
    larger, behind = e.gain("bundle", "absolute_0.06"), e.gap("bundle", "absolute_0.06", 2000, -1)
    yield f"gains {larger} bits. But 2,000 updates after the exit it is {behind} bits *behind*"
    for model, name in NAMES.items():
        stage = "decide" if e.of("decide", model) else "bundle"
        more = ["–", "–"] if model == "bert_a" else [e.gain(stage, model), e.gap(stage, model, 2000)]
        yield row(name, str(len(e.of(stage, model))), e.exits(stage, model), *more)
    both, bundle = mean(e.gain("bundle", "both")), mean(e.gain("decide", "tupe_a_tie_cls"))
    yield f"that gains {both} of {bundle} bits."
    glue = published_glue()
    yield f"for GLUE scores that are higher by {glue['TUPE-A tie-cls'] - glue['BERT-A^d']:.2f}, without an interval."
    times = [cost(model, length) for model in ("BERT-A^d", "TUPE-A") for length in (512, 1024)]
    yield "takes {} and {} times as long as one without positions; TUPE-A's takes {} and {} times".format(*times)
    mini, tiny = (verdicts_of_d(runs, stage) for stage in BOTH_SIZES)
    for pair, one in verdicts_of_main(runs).items():
        cells = (text for of in (one, mini[pair], tiny[pair]) for text in (gain(of.contrast), of.verdict))
        yield row(CONTRASTS[pair], "`{}` over `{}`".format(*pair), *cells)
    paper = share(shares(runs, "main", "tupe_r"))
    needed = "share of BERT-A's updates after which TUPE-R's running loss is BERT-A's last one (paper, for GLUE: 30 %)"
    yield row(needed, "`tupe_r`, `bert_a`", paper, *["–"] * 5)
    mini, tiny = (verdicts_of_d(runs, d) | verdicts_of_c(runs, c, d) for d, c in BOTH_SIZES.items())
    for pair, change in {**CHANGES, BESIDE: "no terms of words and positions together"}.items():
        yield row(change, *(text for of in (mini, tiny) for text in (gain(of[pair].contrast), of[pair].verdict)))
    yield f"mini models left the plateau after {e.exits('bundle', 'untied_raw')} of 5,000 updates"
    for stage, name, n in (
        ("tiny_lasting", "tiny, TUPE at twice BERT-A's rate", 3000), ("tiny_same_rate", "tiny, at one rate", 3000),
        ("lasting", "mini, at one rate", 4000),
    ):  # fmt: skip
        if stage != "tiny_same_rate":  # scored on other text than its BERT-A
            for updates, *ones in zip((4000, 8000), *(gaps(runs, stage, m) for m in TUPES), strict=True):
                yield row(name, f"{updates:,}", "3", *(cell(one, digits=2) for one in ones))
        after = [e.gap(stage, model, n) if e.of(stage, model) else "–" for model in TUPES]
        yield row(name, f"{n:,} after exit", "3", *after)
    short, long = (
        to([e.differences(stage, "bert_a", m).differences[seed] for m in TUPES for seed in (1, 2)], 2)
        for stage in ("controls", "longer")
    )
    yield f"TUPE's lead is {short} bits after 5,000 updates (float32) and {long} after 20,000 (bfloat16)."
    yield f"In training loss, {left_in_training(runs)} bits are left at the end."
    count, slope, r2, most, models = zorro_and_loss(runs)
    yield f"In {count} mini models with a loss below 6.6 bits, accuracy on Zorro's minimal pairs ("
    yield f"rises by {slope:.1f} points per bit of lower loss (R^2 {r2:.2f})."
    yield f"No encoding's mean is more than {most:.1f} points from"
    yield f"with {models} models of each, smaller differences"


def published_glue() -> dict[str, float]:
    """{model: its average on GLUE} of the paper's first table."""
    tables = json.loads((ROOT / "tupe/sweep/published.json").read_text(encoding="utf-8"))["tables"]
    return {line["name"]: line["average"] for line in tables[0]["rows"]}


def cost(model: str, length: int) -> str:
    """The time of a model's training step over that of one without positions, at base size, on a CPU."""
    (ratios,) = (ratios for label, ratios in step_ratios()[length].items() if label.endswith(f"({model})"))
    return number(np.median(ratios), 2)


def left_in_training(runs: Runs) -> str:
    """The share of TUPE's lead that is left at the end of the longest training."""
    ends = {(trial.model, trial.seed): runs.curves[trial][1][-1] for trial in runs.planned("longer")}
    return to([ends["bert_a", seed] - ends[model, seed] for model in TUPES for seed in (1, 2)], 2)


def zorro_and_loss(runs: Runs) -> tuple[int, float, float, float, str]:
    """(mini weights whose final loss is below 6.6 bits, points on Zorro per bit, R^2 of the straight line, the largest
    mean residual of an encoding in points, weights of an encoding): whether any is better at grammar than its loss."""
    losses = {row["run"]: float(row["loss"]) for row in runs.rows["runs"] if row["loss"]}
    points = [
        (Trial.parse(name).model, losses[name], np.mean([*of.values()]))
        for name, of in zorro().items()
        if losses.get(name, np.inf) < 6.6 and Trial.parse(name).size == "mini"
    ]
    models, x, y = zip(*points, strict=True)
    line = np.polyfit(x, y, 1)
    rest = np.array(y) - np.polyval(line, x)
    means = [rest[[other == model for other in models]].mean() for model in set(models)]
    counts = to(map(models.count, set(models)))
    return len(points), -line[0], 1 - rest.var() / np.var(y), float(np.abs(means).max()), counts


def details(e: Evidence) -> Iterator[str]:
    runs, tie, bert, larger = e.runs, "tupe_a_tie_cls", "bert_a", "absolute_0.06"
    of = e.differences
    yield f"{tie}` ends {cell(of('main', tie, bert), -1)} bits below BERT-A"
    other = corrected(validation(runs, runs.planned("main")), CONTRASTS)
    yield f"on the other held-out sample p is {other[0]:.2g}"
    yield f"{cell(of('slower', tie, 'bert_a_d'))} at one rate; with two more seeds"
    yield f"{cell(of('main', tie, 'bert_a_d'))}, which is worse"
    glue = published_glue()
    of_paper = [f"{glue[name]:.2f}" for name in ("BERT-A", "BERT-A^d", "TUPE-A tie-cls")]
    yield "GLUE averages of {} (BERT-A), {} (BERT-A^d) and {} (TUPE-A, [CLS] tied)".format(*of_paper)
    yield f"[CLS] tied): {glue['TUPE-A tie-cls'] - glue['BERT-A^d']:.2f} for it, without an interval"
    yield f"leaves it after {e.exits('main', bert)} of 5,000 updates, `{tie}` after {e.exits('main', tie)}."

    slower = runs.finals("slower")
    gains = [contrast(runs.finals("main")[model], slower[model]) for model in (tie, "tupe_a", "bert_r", "tupe_r")]
    assert sum(one.interval[0] > 0 for one in gains) == 1
    yield f"{to([one.mean for one in gains], 2)} bits lower (means; one of four intervals excludes 0)"
    means = {pair: paired(slower, *pair).mean for pair in CONTRASTS}
    yield f"positions apart ({means[tie, bert]:.3f}), a relative bias on BERT-A ({means['bert_r', bert]:.3f})"
    yield f"positions apart beside a relative bias ({means['tupe_r', 'bert_r']:.3f})"
    yield f"[CLS] apart ({means['tupe_a', tie]:.3f}; "
    yield f"a relative bias on TUPE-A ({cell(paired(slower, 'tupe_r', 'tupe_a'))})"
    cls = cell(of("tiny_decide", "tupe_a", tie))
    yield f"not resolved either ({cell(of('controls', 'tupe_a', tie))}; five other seeds: {cls})"
    later = [cell(of("decide", *pair)) for pair in ((tie, bert), ("bert_r", bert), ("tupe_r", "bert_r"))]
    yield "the three are {}, {} and {} and pass both of its tests".format(*later)
    same = [cell(of("decide", *pair)) for pair in EQUIVALENT]
    yield f"[CLS] apart ({same[0]}) and a relative bias on TUPE-A ({same[1]}) change the loss by no more than 0.1"
    yield f"with two more seeds {same[2]}, no more than 0.1 bits; in the main stage"
    parts = {pair: cell(one.contrast) for pair, one in verdicts_of_c(runs, "bundle", "decide").items()}
    yield f"beside positions in the input ({parts['both', bert]} against BERT-A), and the norm on p"
    yield f"the norm on p ({parts[tie, 'untied_raw']} against raw vectors"
    yield f"Not resolved: positions out of the input ({parts[tie, 'both']}), vectors three times as large"
    yield f"three times as large ({parts[larger, bert]}), word logits over sqrt(2D)"
    yield f"word logits over sqrt(2D) in BERT-A ({parts['absolute_halved', bert]})."
    rates = {(t.model, t.lr): loss for t, loss in runs.losses.items() if t.stage == "mini_rates"}
    worse = [rates[model, 5e-4] - rates[model, 1e-3] for model, rate in rates if rate == 5e-4]
    yield f"all six lose {to(worse, 2)} bits by it"

    left = {}
    for stage in ("slower", "main"):
        after, finals = after_exit(runs, runs.planned(stage))[0], runs.finals(stage)
        left[stage] = to(100 * paired(after, m, bert).mean / paired(finals, m, bert).mean for m in finals if m != bert)
    yield f"{left['slower']} % of each model's distance from BERT-A is left at one rate ({left['main']} %"

    def longer(model, stage="longer"):
        return [f"{abs(of(stage, model, bert).differences[seed]):.2f}" for seed in (1, 2)]

    yield "TUPE-A is {} and {} bits below BERT-A, where it was {} and {} after 5,000 (same seeds)".format(
        *longer("tupe_a"), *longer("tupe_a", "controls")
    )
    yield "TUPE-R {} and {} below".format(*longer("tupe_r"))
    yield "BERT-R {} above and {} below".format(*longer("bert_r"))
    tiny = [number(gap_after_exit(runs, "tiny_lasting", model)[0].mean, 2) for model in TUPES]
    yield "without a decay, {} (TUPE-A) and {} bits (TUPE-R)".format(*tiny)
    (a4, a8), (r4, r8) = pairs = [gaps(runs, "lasting", model) for model in TUPES]
    yield f"TUPE-A is {cell(a4)} bits below BERT-A after 4,000 updates and {cell(a8)} after 8,000"
    yield f"TUPE-R {cell(r4)} and {cell(r8)}"
    pairs += [gaps(runs, "tiny_lasting", model) for model in TUPES]
    gone = [cell(contrast(short.differences, long.differences)) for short, long in pairs]
    yield "What is gone is {} and {}, at tiny size {} and {}".format(*gone)
    kept = [f"{100 * long.mean / short.mean:.0f}" for short, long in pairs]
    yield "mini models kept {} and {} % of the mean gap, tiny ones {} and {} %".format(*kept)
    over = [cell(of("tiny_lasting", larger, model, n)) for model in TUPES for n in (4000, 8000)]
    yield "TUPE-A gains {} bits after 4,000 updates and {} after 8,000. It depends on the text".format(*over)
    yield "TUPE-R gains {} and {}.".format(*over[2:])
    yield f"In training loss {left_in_training(runs)} bits are left for TUPE"
    (after_a, n), (after_r, _) = (gap_after_exit(runs, "lasting", model) for model in TUPES)
    yield f"At {n:,} updates after the exit {cell(after_a)} and {cell(after_r)} are left, in training loss"
    averaged = [cell(gap_after_exit(runs, "lasting", model, points=10)[0]) for model in TUPES]
    yield "averaged over the last ten points {} and {}".format(*averaged)

    curves, leads_of = runs.curves_of("validation"), defaultdict(list)
    for trial in runs.planned("longer"):
        updates, losses = curves[trial]
        leads_of[trial.model].append((losses[updates.index(10000)] - losses[-1], trial.seed))
    moved = [abs(change - of_bert) for model in leads_of if model != bert
             for (change, _), (of_bert, _) in zip(leads_of[model], leads_of[bert], strict=True)]  # fmt: skip
    yield f"the validation sample, are within {np.ceil(100 * max(moved)) / 100:.2f} bits of those at update 10,000"

    main, one_rate = (share(shares(runs, stage, "tupe_r")) for stage in ("main", "slower"))
    yield f"after {main} of the updates in the main stage, {one_rate} at one rate"
    tiny = [
        f"{100 * value:.0f}" for stage in ("controls", "longer") for value in shares(runs, stage, "tupe_r").values()
    ]
    yield "at tiny size after {}, {} and {} % of 5,000 updates, {} and {} % of 20,000".format(*tiny)

    finals = runs.finals("controls")
    trail = [of("controls", bert, model).differences for model in (larger, tie)]
    yield "recovers {:.0f}, {:.0f} and {:.0f} % (by seed)".format(*(100 * trail[0][n] / trail[1][n] for n in (1, 2, 3)))
    yield f"and {cell(of('controls', tie, larger), -1)} bits remain"
    yield f"ten times as large end {cell(of('controls', 'absolute_0.2', larger))} above that"
    pilot = {(t.model, t.lr): loss for t, loss in runs.losses.items() if t.stage == "pilot"}
    yield f"end at {np.mean([*finals['untied_raw'].values()]):.2f} bits at 4e-3"
    raw, raw_slower = (pilot["untied_raw", rate] for rate in (2e-3, 1e-3))
    yield f"at 2e-3 ({raw:.2f}; {pilot[larger, 2e-3]:.2f}) and at 1e-3 still on the plateau ({raw_slower:.2f})"

    three = [runs.finals("tiny_lasting", updates=8000), validation(runs, runs.planned("tiny_lasting", 8000)), {}]
    for trial in (trial for trial in runs.planned("tiny_lasting", 8000) if trial in runs.losses):
        three[2].setdefault(trial.model, {})[trial.seed] = float(np.mean(runs.curves[trial][1][-10:]))
    over = [cell(paired(losses, larger, "tupe_a")) for losses in three]
    yield "the latter is {}, in training loss, averaged over the last ten points, {}.".format(*over[1:])
    over = [cell(paired(losses, bert, larger)) for losses in three]
    yield "larger vectors gain over BERT-A: {}, {} and {}.".format(*over)
    spread = np.ptp([*finals[tie].values()])
    yield f"lie within {np.ceil(200 * spread) / 200:.3f} bits of each other"
    again, neighbours = runs.finals("again")[tie], runs.finals("neighbours")
    nine = [*finals[tie].values(), *again.values()]
    yield f"between {min(nine):.3f} and {max(nine):.3f} bits, with a standard deviation of {np.std(nine, ddof=1):.3f}"
    for model in ("cls_zero", "factored", "nonparametric", "untied_raw_large"):
        difference, low, high, _ = welch(nine, [*finals[model].values(), *neighbours[model].values()])
        yield shown(difference, (low, high), 3)
    yield f"{cell(contrast(runs.finals('again_bf16')[tie], finals[tie]))} bits (three seeds)"

    yield f"no model can be told from chance on BLiMP ({to(only_order(), 1)} %)"
    scores = zorro()
    tupe, bert_scores = (scores[f"models/{name}_mini"] for name in ("tupe_r", "bert_a"))
    yield "released TUPE-R scores {:.1f} %, BERT-A {:.1f} %".format(
        *(np.mean([*s.values()]) for s in (tupe, bert_scores))
    )
    ahead = [tupe[paradigm] - bert_scores[paradigm] for paradigm in tupe]
    yield f"{with_interval(ahead, 1)} over paradigms, a third of it from one (+{max(ahead):.1f})"

    def on_zorro(stage, size, updates, rates, seeds):
        found = {
            model: {n: np.mean([*scores[f"{stage}/{model}/{size}_{updates}_lr{rate}_seed{n}"].values()]) for n in seeds}
            for model, rate in rates.items()
        }
        return [cell(paired(found, model, "bert_a"), digits=1) for model in TUPES]

    rates = {"bert_a": 0.002, "tupe_a": 0.004, "tupe_r": 0.004}
    ahead = on_zorro("tiny_decide", "tiny", 5000, rates, (6, 7, 8))
    yield "TUPE-A scores {} points above BERT-A on Zorro, TUPE-R {}".format(*ahead)
    (a4, r4), (a8, r8) = (
        on_zorro("lasting", "mini", updates, dict.fromkeys(rates, 0.001), (1, 2, 3)) for updates in (4000, 8000)
    )
    yield f"TUPE-A scores {a4} points above BERT-A after 4,000 updates, {a8} after 8,000; TUPE-R {r4} and {r8}."
    released = [runs.losses[Trial(stage, "tupe_r", "mini", 5000, rate, 101)]
                for stage, rate in (("released", 1e-3), ("rates", 1e-3), ("rates", 2e-3))]  # fmt: skip
    yield f"run at 1e-3 in float32 ({released[0]:.3f} bits)"
    yield "ended at {:.3f} in bfloat16, at {:.3f} at 2e-3".format(*released[1:])


def card(e: Evidence, folder: Path) -> Iterator[str]:
    """The sentences of a released model's card, which names its run."""
    run = re.search(r"one run, `(.*)`", (folder / "README.md").read_text(encoding="utf-8"))[1]
    (found,) = (row for row in e.runs.rows["runs"] if row["run"] == run)
    yield row("held-out loss, bits per masked token", number(float(found["loss"])))
    order = {row["part"]: float(row["value"]) for row in e.runs.rows["measures"]
             if (row["run"], row["measure"]) == (run, "order")}  # fmt: skip
    yield row("original sentence preferred to two swapped words (0.5: chance)", number(order["accuracy"]))
    yield row("... by how much, nats per sentence", number(order["margin"]))
    yield f"macro average (50 %: chance) | {np.mean([*zorro()[f'models/{folder.name}'].values()]):.1f} % |"


SAYINGS: dict[str, Callable[[Evidence], Iterator[str]]] = {
    "README.md": readme, "docs/index.md": index, "docs/start.md": start, "docs/results.md": results,
    "docs/evidence/details.md": details,
}  # fmt: skip

# ------------------------------------------------------------------------------------------------- tables of the pages

ROWS = {  # page -> {heading: the stages whose runs its tables show}
    "contrasts": {
        "Main stage, mini: the five contrasts": ["main"], "Main stage: final losses": ["main"],
        "One learning rate for all, mini": ["slower"],
    },
    "controls": {"The controls": ["controls"]},
    "first": {"The first look": ["first"]},
    "longer": {"Longer training": ["longer"]},
    "second": {
        "E, tiny: does it last?": ["tiny_lasting"], "E, mini: does it last?": ["lasting"],
        "D, tiny: the contrasts": ["tiny_decide"], "D, mini: the contrasts": ["decide"],
        "C, tiny: the bundle": ["tiny_bundle", "tiny_decide"], "C, mini: the bundle": ["bundle", "decide"],
        **{stage: [stage] for stage, plan in LATER["stages"].items() if plan.get("protocol") != 3},
    },
}  # fmt: skip


def tables(text: str) -> Iterator[tuple[str, list[list[str]]]]:
    """(heading, rows of cells with the header first) of every table of a page."""
    for section in re.split(r"^#+ ", text, flags=re.MULTILINE)[1:]:
        for found in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
            rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in found.splitlines()]
            yield section.partition("\n")[0], [rows[0], *rows[2:]]


def wrong_rows(runs: Runs, page: str, text: str) -> Iterator[str]:
    """The rows of a page that are not those of the tables in docs/evidence."""
    for heading, (header, *rows) in tables(text):
        stages = ROWS[page].get(heading) or ROWS[page].get(heading.partition(":")[0])
        if not stages or not any("seed" in name or "mean" in name for name in header):
            continue
        expected = [expected_cells(runs, stages, dict(zip(header, cells, strict=True))) for cells in rows]
        differences = {index: one.p for index, (one, _) in enumerate(expected) if isinstance(one, Contrast)}
        ps = [*differences.values()]
        ps = dict(zip(differences, holm(ps[:5]) + ps[5:], strict=True))  # stage D has one more, which is not corrected
        for index, (cells, (_, wanted)) in enumerate(zip(rows, expected, strict=True)):
            found = dict(zip(header, cells, strict=True))
            for name in ("p (Holm)", "p, paired (Holm)"):
                if name in found and ps.get(index) is not None:
                    wanted[name] = f"{ps[index]:.2g}"
            if wrong := [name for name in wanted if found.get(name, wanted[name]) != wanted[name]]:
                yield f"{heading}: {row(*cells)}: {', '.join(f'{name} is {wanted[name]}' for name in wrong)}"


def expected_cells(runs: Runs, stages: Sequence[str], found: dict[str, str]) -> tuple[Contrast | None, dict[str, str]]:
    """(the difference that a row shows, if it does, {column: what has to stand there}). found: the row as it is."""
    names = re.match(r"`?([\w.]+)`? - `?([\w.]+)`?", found.get("difference") or [*found.values()][0])
    updates = int(found["updates"].replace(",", "")) if "updates" in found else None
    if "updates after exit" in found:
        one, n = gap_after_exit(runs, stages[0], found["model"].strip("`"))
        wanted = {"updates after exit": f"{n:,}", "mean": of_contrast(one)}
    elif names or "gap by seed" in found:
        a, b = names.groups() if names else ("bert_a", found["model"].strip("`"))
        one = paired(runs.finals(*stages, updates=updates), a, b)
        wanted = one and {"mean [95 % interval]": of_contrast(one)}
    else:
        return None, expected_losses(runs, stages[0], found, updates)
    if one is None:
        return None, dict.fromkeys(("contrast", "difference", "model"), "none of the stage's")
    shown = {seed: number(difference) for seed, difference in one.differences.items()}
    wanted |= {f"seed {seed}": text for seed, text in shown.items()}
    for name in ("by seed", "differences by seed", "gap by seed"):
        if name in found:
            wanted[name] = ", ".join([*shown.values(), *["–"] * (found[name].count(",") + 1 - len(shown))])
    return one, wanted


def expected_losses(runs: Runs, stage: str, found: dict[str, str], updates: int | None) -> dict[str, str]:
    """{column: what has to stand there} of the row of a model."""
    trials = {
        trial.seed: trial
        for trial in runs.planned(stage, updates)
        if trial in runs.losses and trial.model == found["model"] and found.get("rate") in (None, f"{trial.lr:g}")
    }
    if not trials:
        return {"model": "none of the stage's"}
    wanted = {f"seed {seed}": number(runs.losses[trial]) for seed, trial in trials.items()}
    wanted["mean [95 % interval]"] = with_interval(runs.losses[trial] for trial in trials.values())
    if stage != "first":  # which has a threshold of its own
        exits = [runs.exit(trial) for trial in trials.values()]
        wanted["exit updates"] = ", ".join("never" if exit is None else f"{exit:,.0f}" for exit in exits)
    if stage == "controls":
        pilot = replace(next(iter(trials.values())), stage="pilot", seed=101)
        wanted["the pilot's run"] = number(runs.losses[pilot])
    return wanted


# --------------------------------------------------------------------------------------------------------- the command


def unsaid(text: str, sayings: Iterable[str]) -> list[str]:
    """What a page does not say."""
    words = " ".join(text.split())
    return [saying for saying in sayings if " ".join(saying.split()) not in words]


def faults(root: Path = ROOT) -> Iterator[str]:
    """What the pages in a clone say otherwise than the tables."""
    evidence = Evidence()
    sayings = {page: of(evidence) for page, of in SAYINGS.items()}
    sayings |= {f"models/{folder.name}/README.md": card(evidence, folder) for folder in (ROOT / "models").iterdir()}
    for page, of in sayings.items():
        for saying in unsaid((root / page).read_text(encoding="utf-8"), of):
            yield f"{page} does not say: {saying}"
    for page in ROWS:
        path = root / FIRST.relative_to(ROOT) / f"{page}.md"
        for wrong in wrong_rows(evidence.runs, page, path.read_text(encoding="utf-8")):
            yield f"{path.name}: {wrong}"


@click.command("recompute", cls=options.QuietCommand)
def command():
    """Recompute the numbers of the finished experiments' pages from the tables in docs/evidence."""
    if found := list(faults()):
        raise ValueError("\n".join(found))
    click.echo("The pages say what the tables do.")
