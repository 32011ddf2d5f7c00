"""What the runs of the second protocol decide (docs/second-protocol.md): the sections of docs/evidence/second.md, from
the committed tables and nothing else. Losses in bits per masked token; a run that diverged has no difference."""

import csv
import gzip
import io
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tupe.common.tables import TextTable
from tupe.experiments.statistics import (
    ALPHA,
    FEWEST,
    Contrast,
    Seeds,
    contrast,
    first_below,
    holm,
    number,
    of_contrast,
    paired,
    shown,
    with_interval,
)

from . import collect, estimates
from .claims import CLAIMS
from .evidence import Evidence
from .plan import BITS, Trial, best_rates, lengths_of, planned_models, trials
from .second_plan import FIRST, PROTOCOL, TABLES, adopted, cooldown_of, known, losses_in, precision

ZORRO, PAIRS = TABLES / "zorro.csv.gz", 200  # pairs of each paradigm, the first ones
MARGIN = 0.1  # bits, of equivalence
DECIDED = {"tiny_decide": "tiny_bundle", "decide": "bundle"}  # stages of D, and those of C that are compared with them
BESIDE = ("tupe_a_tie_cls", "bert_a_d")  # a difference of D that is none of the five contrasts
(CHANGE_BESIDE,) = (entry["change"] for entry in CLAIMS["changes"] if tuple(entry["models"]) == BESIDE)
TOO_FEW = "too few seeds"  # the word where too many runs diverged
EQUIVALENT = (("tupe_a", "tupe_a_tie_cls"), ("tupe_r", "tupe_a"), BESIDE)
LASTING, LASTING_MODELS = ("tiny_lasting", "lasting"), ("tupe_a", "tupe_r")  # stages of E, and what is decided of


def stage_of(name: str) -> dict:
    return PROTOCOL["stages"][name]


class Runs:
    """What the tables hold of this protocol's runs: `losses`, `blocks` and `curves`, each by trial."""

    def __init__(self, tables: Path = TABLES):
        first, mine = collect.read(FIRST), collect.read(tables)
        self.losses, self.first, self.mine = losses_in(first, mine), first, mine
        precisions = {Trial.parse(row["run"]): row["precision"] for row in first["runs"] + mine["runs"]}
        blocks, self.curves = {}, defaultdict(lambda: ([], []))
        for row in first["blocks"] + mine["blocks"]:
            losses, tokens = BITS * np.array(row["nats"].split(), float), np.array(row["tokens"].split(), int)
            blocks[Trial.parse(row["run"])] = losses, tokens
        self.blocks = blocks | adopted({(trial, precisions[trial]): block for trial, block in blocks.items()})
        for row in first["training"] + mine["training"]:
            updates, losses = self.curves[Trial.parse(row["run"])]
            updates.append(int(row["updates"]))
            losses.append(float(row["loss"]))
        self.curves |= adopted({(trial, precisions[trial]): curve for trial, curve in self.curves.items()})

    def planned(self, stage: str, updates: int | None = None) -> list[Trial]:
        """Trials of a stage, at the rates of the plan; updates: of this length only."""
        return [t for t in trials(stage, self.losses, PROTOCOL) if updates is None or t.updates == updates]

    def is_complete(self, stage: str) -> bool:
        """Whether every model of a stage has its rate, and every run has ended."""
        planned, models = self.planned(stage), set(planned_models(stage, PROTOCOL))
        return {t.model for t in planned} == models and all(t in self.losses for t in planned)

    def finals(self, *stages: str, updates: int | None = None) -> dict[str, Seeds]:
        """{model: {seed: final loss}} of the runs that have one."""
        found = defaultdict(dict)
        for stage in stages:
            for trial in self.planned(stage, updates):
                if math.isfinite(self.losses.get(trial, math.inf)):
                    found[trial.model][trial.seed] = self.losses[trial]
        return dict(found)

    def resampled(self, a: str, b: str, *stages: str, updates: int | None = None) -> str:
        """The interval of a - b over seeds and held-out blocks, drawn together; "" where blocks are not stored."""
        of = {a: {}, b: {}}
        for stage in stages:
            for trial in self.planned(stage, updates):
                if trial.model in of and trial in self.blocks:
                    of[trial.model][trial.seed] = self.blocks[trial]
        if len(of[a].keys() & of[b].keys()) < FEWEST:
            return ""
        return "[{:.3f}, {:.3f}]".format(*estimates.bootstrap(of[a], of[b])[1])


# -------------------------------------------------------------------------------------------------------------- A, C, D


def again(runs: Runs) -> list[str]:
    """Stage A, once all of it has run: what the controls of `tupe_a_tie_cls` are with all seeds."""
    if not all(runs.is_complete(stage) for stage in ("again", "again_bf16", "neighbours")):
        return []
    losses = {trial: loss for (trial, of), loss in known(runs.first).items() if of == "float32"}
    first = defaultdict(dict)
    for trial, loss in losses.items():
        if trial.stage == "controls":
            first[trial.model][trial.seed] = loss
    later = runs.finals("again", "neighbours")
    seeds = {model: first[model] | later[model] for model in later}
    mine, rows = seeds["tupe_a_tie_cls"], []
    for model, theirs in seeds.items():
        if model != "tupe_a_tie_cls":
            mean, low, high, p = estimates.welch(theirs.values(), mine.values())
            verdict = "not resolved" if low <= 0 <= high else "lower" if mean < 0 else "higher"
            rows.append([f"`{model}` - `tupe_a_tie_cls`", f"{len(theirs)}, {len(mine)}",
                         shown(mean, (low, high), 3), f"{p:.2g}", verdict])  # fmt: skip
    header = ["difference, all seeds in float32", "seeds", "mean [95 % interval], Welch", "p", "result"]
    one = contrast(runs.finals("again_bf16")["tupe_a_tie_cls"], first["tupe_a_tie_cls"])
    seen = ", ".join(f"{value:.3f}" for value in one.differences.values())
    return [
        "## A: are three equal seeds luck?\n",
        TextTable.plain(header, rows, align="lrrrl").markdown(),
        f"`tupe_a_tie_cls` in bfloat16 minus float32: {seen}; mean {of_contrast(one)}.\n",
    ]


def rates(runs: Runs) -> list[str]:
    """Stage B: the rate of every model that has one."""
    best, _ = best_rates(runs.losses, "mini_rates", PROTOCOL)
    models = planned_models("mini_rates", PROTOCOL)
    rows = [[f"`{model}`", f"{best[model]:g}" if model in best else ""] for model in models]
    return ["## B: rates of mini models\n", TextTable.plain(["model", "rate"], rows).markdown()] if best else []


class Decision(NamedTuple):
    """What came out of a difference of C or D. paired, welch, same: p-values of both tests and of equivalence, None
    where there is none; verdict: the protocol's word."""

    contrast: Contrast | None
    paired: float | None
    welch: float | None
    same: float | None
    verdict: str


Decisions = dict[tuple[str, str], Decision]  # of two models


def contrasts(runs: Runs, stage: str) -> Decisions:
    """{two models: what came out} of a stage of D, once all of it has run: the five contrasts, corrected by Holm, and
    one beside them."""
    if not runs.is_complete(stage):
        return {}
    finals, names = runs.finals(stage), [tuple(entry["models"]) for entry in CLAIMS["contrasts"]]
    of = {pair: paired(finals, *pair) for pair in (*names, BESIDE)}
    enough = [pair for pair, one in of.items() if one and one.p is not None]
    by_t = {pair: of[pair].p for pair in enough}
    by_welch = {(a, b): estimates.welch(finals[a].values(), finals[b].values())[-1] for a, b in enough}
    for test in (by_t, by_welch):
        test.update(zip(names, holm([test.get(pair) for pair in names]), strict=True))
    found, fresh = {}, stage_of(stage).get("fresh", ())
    for pair, one in of.items():
        p, q, same, verdict = by_t.get(pair), by_welch.get(pair), None, TOO_FEW
        if pair in enough:
            same = estimates.equivalence(one.differences.values(), MARGIN) if pair in EQUIVALENT else None
            verdict = verdict_of_claim(one, max(p, q), same, pair == BESIDE, fresh)
        found[pair] = Decision(one, p, q, same, verdict)
    return found


def decided(runs: Runs, stage: str) -> list[str]:
    """The section of a stage of D."""
    of, plan, rows = contrasts(runs, stage), stage_of(stage), []
    if not of:
        return []
    claims = {tuple(entry["models"]): entry["claim"] for entry in CLAIMS["contrasts"]}
    for (a, b), one in of.items():
        rows.append([
            f"`{a}` - `{b}`", claims.get((a, b), CHANGE_BESIDE),
            *shown_by_seed(one.contrast, plan["seeds"]), runs.resampled(a, b, stage),
            of_p(one.paired), of_p(one.welch), of_p(one.same), one.verdict,
        ])  # fmt: skip
    header = ["contrast", "what is added", "differences by seed", "mean [95 % interval]", "seeds and text",
              "p, paired (Holm)", "p, Welch (Holm)", "p, equivalence", "verdict"]  # fmt: skip
    text = f"The last row is not corrected. Equivalence: within {MARGIN} bits.\n"
    table = TextTable.plain(header, rows, align="lllrrrrrl").markdown()
    return [f"## D, {plan['size']}: the contrasts\n", text, table]


def verdict_of_claim(one: Contrast, p: float, same: float | None, beside: bool, fresh: Sequence[int] = ()) -> str:
    """The word of the protocol for a contrast whose claim is that it is below 0. p: the larger one of both tests; same:
    that of equivalence; beside: it is none of the five; fresh: seeds that all have to have the sign of the mean."""
    agree = all(one.differences.get(seed, 0) * one.mean > 0 for seed in fresh)
    if p <= ALPHA and agree and beside:
        return f"{'lower' if one.mean < 0 else 'higher'}, uncorrected"
    if p <= ALPHA and agree:
        return "confirmed" if one.mean < 0 else "refuted"
    return f"no more than {MARGIN} bits" if same is not None and same <= ALPHA else "not resolved"


def differences(runs: Runs, stage: str, neighbours: str) -> Decisions:
    """{two models: what came out} of a stage of C, once it and that of its neighbours have run: two-sided, corrected by
    Holm."""
    if not (runs.is_complete(stage) and runs.is_complete(neighbours)):
        return {}
    finals, found = runs.finals(stage, neighbours), {}
    of = {(a, b): paired(finals, a, b) for a, b in (entry["models"] for entry in PROTOCOL["differences"])}
    for (pair, one), p in zip(of.items(), holm([one and one.p for one in of.values()]), strict=True):
        result = TOO_FEW
        if p is not None:
            result = "not resolved" if p > ALPHA else "lower" if one.mean < 0 else "higher"
        found[pair] = Decision(one, p, None, None, result)
    return found


def bundle(runs: Runs, stage: str, neighbours: str) -> list[str]:
    """The section of a stage of C."""
    of, rows = differences(runs, stage, neighbours), []
    if not of:
        return []
    for entry, ((a, b), one) in zip(PROTOCOL["differences"], of.items(), strict=True):
        found = runs.resampled(a, b, stage, neighbours)
        cells = *shown_by_seed(one.contrast, stage_of(stage)["seeds"]), found, of_p(one.paired), one.verdict
        rows.append([f"`{a}` - `{b}`", entry["asks"], *cells])
    header = ["difference", "asks", "by seed", "mean [95 % interval]", "seeds and text", "p (Holm)", "result"]
    table = TextTable.plain(header, rows, align="lllrrrl").markdown()
    return [f"## C, {stage_of(stage)['size']}: the bundle\n", table]


def of_p(p: float | None) -> str:
    return "" if p is None else f"{p:.2g}"


def shown_by_seed(one: Contrast | None, seeds: Sequence[int]) -> tuple[str, str]:
    """(the difference of each seed, a dash for one that has none; mean and interval)."""
    of = one.differences if one else {}
    return ", ".join(number(of[seed]) if seed in of else "–" for seed in seeds), of_contrast(one)


# -------------------------------------------------------------------------------------------------------------------- E


def gaps(runs: Runs, stage: str) -> dict[str, dict[int, Contrast]]:
    """{model: {budget: BERT-A's final loss minus the model's}}, where at least `FEWEST` seeds have both."""
    found = defaultdict(dict)
    for updates in lengths_of(stage_of(stage)):
        finals = runs.finals(stage, updates=updates)
        for model in finals.keys() - {"bert_a"}:
            one = paired(finals, "bert_a", model)
            if one is not None and len(one.differences) >= FEWEST:
                found[model][updates] = one
    return {model: found[model] for model in planned_models(stage, PROTOCOL) if model in found}


def lasting(runs: Runs, stage: str) -> list[str]:
    """A stage of E: the gap to BERT-A by budget, how much of the first one is gone, and shares of updates."""
    of = gaps(runs, stage)
    if not of:
        return []
    rows, after, seeds = [], after_exit(runs, stage), stage_of(stage)["seeds"]
    verdicts, largest = verdicts_of_gaps(runs, of, stage), lengths_of(stage_of(stage))[-1]
    for model, by_budget in of.items():
        shortest = min(by_budget)
        for updates, one in by_budget.items():
            gone = ""
            if updates > shortest:
                gone = of_contrast(contrast(by_budget[shortest].differences, one.differences))
            found = runs.resampled("bert_a", model, stage, updates=updates)
            verdict = verdicts.get(model, "") if updates == largest else ""
            cells = *shown_by_seed(one, seeds), found, gone, updates_share(runs, stage, model, updates), verdict
            rows.append([f"`{model}`", f"{updates:,}", *cells])
    header = ["model", "updates", "gap by seed", "mean [95 % interval]", "seeds and text", "gone since the first",
              "updates needed, %", "verdict"]  # fmt: skip
    lines = [f"## E, {stage_of(stage)['size']}: does it last?\n", LASTING_TEXT]
    lines.append(TextTable.plain(header, rows, align="lrlrrrrl").markdown())
    if after:
        rates = dict.fromkeys(f"`{t.model}` {t.lr:g}" for t in runs.planned(stage) if t.model in ("bert_a", *after))
        constant = f"each at its constant rate ({', '.join(rates)})"
        costs = ". Where rates differ, the gap also holds what the higher constant rate costs" * has_rates(runs, stage)
        lines.append(f"At equal numbers of updates after each model's exit, {constant}{costs}:\n")
        rows = [[f"`{m}`", f"{n:,}", *shown_by_seed(one, seeds)] for m, (n, one) in after.items()]
        lines.append(TextTable.plain(["model", "updates after exit", "gap by seed", "mean"], rows).markdown())
    return lines


def has_rates(runs: Runs, stage: str) -> bool:
    """Whether the models that a stage of E decides about train at another rate than BERT-A."""
    return len({trial.lr for trial in runs.planned(stage) if trial.model in ("bert_a", *LASTING_MODELS)}) > 1


def lasting_summary(runs: Runs) -> TextTable | str:
    """For docs/results.md: what E has so far of the models that it decides, of each size that has two budgets."""
    rows = [row for stage in LASTING for row in rows_of_summary(runs, stage)]
    header = ["size", "updates", "seeds", *(f"{CLAIMS['names'][model]}'s gain" for model in LASTING_MODELS)]
    return TextTable.plain(header, rows, align="l" + "r" * (len(header) - 1)) if rows else ""


def rows_of_summary(runs: Runs, stage: str) -> list[list[str]]:
    of, after, size = gaps(runs, stage), after_exit(runs, stage), stage_of(stage)["size"]
    budgets = sorted({updates for model in LASTING_MODELS for updates in of.get(model, ())})
    if len(budgets) < 2:
        return []

    def row(label, found):
        seeds = dict.fromkeys(str(len(one.differences)) for one in found if one)
        return [size, label, ", ".join(seeds), *(of_contrast(one, 2) if one else "" for one in found)]

    rows = [row(f"{n:,}", [of.get(model, {}).get(n) for model in LASTING_MODELS]) for n in budgets]
    for n in dict.fromkeys(after[model][0] for model in LASTING_MODELS if model in after):
        found = [after[model][1] if after.get(model, (0,))[0] == n else None for model in LASTING_MODELS]
        confound = ", at twice BERT-A's rate" * has_rates(runs, stage)
        rows.append(row(f"{n:,} after exit{confound}", found))
    if verdicts := verdicts_of_gaps(runs, of, stage):
        rows.append([size, "verdict", "", *(verdicts[model] for model in LASTING_MODELS)])
    return rows


LASTING_TEXT = """The gap is BERT-A's final loss minus the model's. *Gone*: the gap at the shortest budget minus this
one. *Updates needed*: the share of BERT-A's updates after which the model has BERT-A's loss, between its own budgets; ≤
and > where it is outside of them. A verdict needs all seeds.
"""


def verdicts_of_gaps(runs: Runs, of: dict[str, dict[int, Contrast]], stage: str) -> dict[str, str]:
    """{model: the protocol's word for its gap at the largest budget}, once all runs of it have ended that
    `LASTING_MODELS` and BERT-A have there."""
    largest = lengths_of(stage_of(stage))[-1]
    needed = [trial for trial in runs.planned(stage, largest) if trial.model in ("bert_a", *LASTING_MODELS)]
    if not needed or any(trial not in runs.losses for trial in needed):
        return {}
    ends, words = {model: of.get(model, {}).get(largest) for model in LASTING_MODELS}, {}
    for (model, one), p in zip(ends.items(), holm([one and one.p for one in ends.values()]), strict=True):
        same = one and estimates.equivalence(one.differences.values(), MARGIN) <= ALPHA
        if p is None:
            words[model] = TOO_FEW
        elif p <= ALPHA:
            lasts = f"the gain lasts: {one.mean:.2f} bits are left{f', no more than {MARGIN}' * same}"
            words[model] = lasts if one.mean > 0 else "reversed"
        else:
            words[model] = f"no more than {MARGIN} bits are left" if same else "not resolved"
    return words


def updates_share(runs: Runs, stage: str, model: str, updates: int) -> str:
    """ "≤ 50, 61, 58": by seed, the per cent of BERT-A's updates that a model needs for BERT-A's loss."""
    by_length = {length: runs.finals(stage, updates=length) for length in lengths_of(stage_of(stage))}
    texts = []
    for seed, target in sorted(by_length[updates].get("bert_a", {}).items()):
        finals = {length: of[model][seed] for length, of in by_length.items() if seed in of.get(model, ())}
        if finals:
            share = estimates.share_of_schedule({length / updates: loss for length, loss in finals.items()}, target)
            least, most = min(finals) / updates, max(finals) / updates
            if math.isinf(share):
                texts.append(f"> {100 * most:.0f}")
            else:
                texts.append("≤ " * (share < 1.001 * least) + f"{100 * share:.0f}")
    return ", ".join(texts)


def after_exit(runs: Runs, stage: str) -> dict[str, tuple[int, Contrast]]:
    """{model: (n, the gap to BERT-A n updates after the exits of both)}, along the longest runs that at least `FEWEST`
    seeds of both have, before any cool-down."""
    threshold, curves, found = Evidence(runs.first).threshold("controls"), defaultdict(dict), {}
    for trial in runs.planned(stage):
        updates, losses = runs.curves.get(trial, ([], []))
        kept = [(n, loss) for n, loss in zip(updates, losses, strict=True) if n <= trial.updates - cooldown_of(trial)]
        curve = tuple(zip(*kept, strict=True))
        if kept and kept[0][0] == 50 and (exit := first_below(*curve, threshold)) is not None:  # whole from the start
            curves[trial.model, trial.updates][trial.seed] = exit, curve
    for (model, updates), mine in curves.items():  # of each model the longest ones come last
        bert = curves.get(("bert_a", updates), {})
        seeds = mine.keys() & bert.keys()
        ends = [of[seed][1][0][-1] - of[seed][0] for of in (mine, bert) for seed in seeds]
        if model != "bert_a" and len(seeds) >= FEWEST and min(ends) >= 50:
            n = int(min(ends) // 50 * 50)
            at = ({seed: float(np.interp(of[seed][0] + n, *of[seed][1])) for seed in seeds} for of in (bert, mine))
            found[model] = n, contrast(*at)
    return found


# ----------------------------------------------------------------------------------------------------- every run, Zorro


def tables_of_losses(runs: Runs, protocol: int = 2) -> list[str]:
    """A section for each stage of a protocol: final losses by model and rate, a column for each seed."""
    lines = []
    for stage, plan in PROTOCOL["stages"].items():
        if plan.get("protocol", 2) != protocol:
            continue
        rows, planned = defaultdict(dict), runs.planned(stage)
        for trial in planned:
            if trial in runs.losses:
                cell = number(runs.losses[trial]) if math.isfinite(runs.losses[trial]) else "diverged"
                rows[trial.model, f"{trial.lr:g}", f"{trial.updates:,}"][trial.seed] = cell
        done = sum(trial in runs.losses for trial in planned)
        lines.append(f"## {stage}: {plan['size']}, {precision(stage)}\n")
        lines.append(f"{done} of {len(planned)} runs.\n")
        if rows:
            header = ["model", "rate", "updates", *(f"seed {seed}" for seed in plan["seeds"])]
            cells = [[*key, *(row.get(seed, "–") for seed in plan["seeds"])] for key, row in rows.items()]
            lines.append(TextTable.plain(header, cells, align="lrr" + "r" * len(plan["seeds"])).markdown())
    return lines


def zorro_scores() -> dict[str, dict[str, float]]:
    """{run, or folder of a released model: {paradigm: accuracy}}, as committed."""
    scores = defaultdict(dict)
    if ZORRO.exists():
        for row in csv.DictReader(io.StringIO(gzip.decompress(ZORRO.read_bytes()).decode())):
            scores[row["run"]][row["paradigm"]] = float(row["accuracy"])
    return dict(scores)


def zorro_table() -> list[str]:
    """Macro averages over Zorro's paradigms, a row for each model, size, stage and rate."""
    groups = defaultdict(list)
    for name, by_paradigm in sorted(zorro_scores().items()):
        groups[name.rpartition("_seed")[0] or name].append(100 * np.mean(list(by_paradigm.values())))
    rows = [
        [f"`{name}`", str(len(values)), ", ".join(f"{value:.1f}" for value in values), with_interval(values, 1)]
        for name, values in groups.items()
    ]
    text = f"Per cent right of the first {PAIRS} pairs of each paradigm (`phueb/Zorro`), macro average; chance is 50.\n"
    header = ["weights", "seeds", "accuracy", "mean [95 % interval]"]
    return ["## Zorro\n", text, TextTable.plain(header, rows, align="lrrr").markdown()] if rows else []


def zorro_and_loss(runs: Runs) -> tuple[int, float, float, float]:
    """(mini weights whose final loss is below 6.6 bits, points on Zorro per bit, R^2 of the straight line, the largest
    mean residual of an encoding in points): whether any encoding is better at grammar than its loss."""
    losses = {str(trial): loss for (trial, _), loss in (known(runs.first) | known(runs.mine)).items()}
    points = [
        (Trial.parse(name).model, losses[name], 100 * np.mean(list(of.values())))
        for name, of in zorro_scores().items()
        if losses.get(name, math.inf) < 6.6 and Trial.parse(name).size == "mini"
    ]
    models, x, y = zip(*points, strict=True)
    line = np.polyfit(x, y, 1)
    rest = np.array(y) - np.polyval(line, x)
    means = [rest[[other == model for other in models]].mean() for model in set(models)]
    return len(points), -line[0], 1 - rest.var() / np.var(y), float(np.abs(means).max())


def zorro_sentence(runs: Runs) -> str:
    count, slope, r2, most = zorro_and_loss(runs)
    return f"""**Grammar follows the loss.** Of {count} mini weights below 6.6 bits, accuracy on Zorro's minimal pairs
rises by {slope:.1f} points per bit (R^2 {r2:.2f}). No encoding's mean is more than {most:.1f} points from that line: at
equal loss none is better at grammar.
"""


def page() -> str:
    """docs/evidence/second.md, only from the committed tables."""
    runs = Runs()
    lines = [
        "# The second protocol: runs\n",
        "Final losses, bits per masked token, written by `python -m lab page` from the tables in `second/`;\n"
        "[the protocol](../second-protocol.md) says what they decide. *Seeds and text*: an interval that draws both\n"
        "anew; with so few seeds it is too narrow, and no verdict uses it. –: too few runs have stored losses of\n"
        "blocks, which the first experiment did not keep.\n",
        *again(runs),
        *rates(runs),
        *(line for stage in LASTING for line in lasting(runs, stage)),
        *(line for stage in DECIDED for line in decided(runs, stage)),
        *(line for stage, other in DECIDED.items() for line in bundle(runs, other, stage)),
        *tables_of_losses(runs),
        *zorro_table(),
        zorro_sentence(runs),
    ]
    return "\n".join(lines)
