"""What the experiment on TUPE's claims says: numbers and tables of docs/reproduction.md, computed from the compressed
tables in docs/evidence (`tupe.experiments.collect`) and from nothing else.

How each number is computed was written down in that page before the runs. Losses are in bits per masked token.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..evaluation.minimal_pairs import macro_average
from ..tables import Table
from . import collect
from .plan import CLAIMS, Trial, lengths_of
from .statistics import (
    Contrast,
    contrast,
    first_below,
    geometric_share,
    holm,
    mean_interval,
    share_of_schedule,
    share_of_updates,
)

CREDITS = {letter: value for value, letter in collect.LETTERS.items()}
LEVEL = 0.05  # of the corrected p-values
Seeds = dict[int, float]
Measure = Callable[[Trial], float | None]


class Evidence:
    """Tables of `collect`, by run. Raises ValueError if there is no finished run, or if runs of one seed that are to be
    compared have different precisions."""

    def __init__(self, tables: dict[str, list[dict]]):
        self.tables = tables
        facts = {Trial.parse(row["run"]): row for row in self.tables["runs"]}
        self.runs = {trial: row for trial, row in facts.items() if row["state"] == "finished" and row["loss"]}
        self.failed = {trial: row["reason"] for trial, row in facts.items() if row["state"] == "failed"}
        if not self.runs:
            raise ValueError("there is no table of finished runs; `tupe claims --runs DIR` adds them")
        for block, precisions in self.precisions().items():
            if len(precisions) > 1 and block[0] != "pilot":
                raise ValueError(
                    f"stage {block[0]}, seed {block[1]}: {' and '.join(sorted(precisions))}: a block has one precision"
                )

    def precisions(self) -> dict[tuple[str, int], set[str]]:
        """{(stage, seed): precisions of its finished runs}."""
        blocks = defaultdict(set)
        for trial, row in self.runs.items():
            blocks[trial.stage, trial.seed] |= {row["precision"]} - {""}
        return blocks

    @functools.cached_property
    def rows(self) -> dict[str, dict[str, list[dict]]]:
        """{table: {run: rows}}."""
        grouped = {name: defaultdict(list) for name in self.tables}
        for name, rows in self.tables.items():
            for row in rows if name != "paradigms" else ():
                grouped[name][row["run"]].append(row)
        return grouped

    def trials(self, stage: str) -> list[Trial]:
        """Finished runs of a stage that count. Of the main stage, those of whole blocks, all its models with one seed,
        of the longest training that has one; of the first look, those of models with all of its seeds."""
        mine = [trial for trial in self.runs if trial.stage == stage]
        if stage == "main":
            blocks = groups(mine, lambda trial: (trial.updates, trial.seed), lambda trial: trial.model)
            whole = [block for block, models in blocks.items() if models >= set(CLAIMS["stages"]["main"]["models"])]
            longest = max((updates for updates, _ in whole), default=0)
            mine = [trial for trial in mine if trial.updates == longest and (longest, trial.seed) in whole]
        elif stage == "first":
            planned = set(CLAIMS["stages"]["first"]["seeds"])
            seeds = groups(mine, lambda trial: trial.model, lambda trial: trial.seed)
            mine = [trial for trial in mine if trial.seed in planned and seeds[trial.model] >= planned]
        return sorted(mine, key=lambda trial: (list(CLAIMS["models"]).index(trial.model), trial.lr, trial.seed))

    def by_seed(self, stage: str, value: Measure) -> dict[str, Seeds]:
        """{model: {seed: value(trial)}} of a stage, where the value is not None."""
        table = defaultdict(dict)
        for trial in self.trials(stage):
            if (number := value(trial)) is not None:
                table[trial.model][trial.seed] = number
        return dict(table)

    def loss(self, trial: Trial) -> float:
        return float(self.runs[trial]["loss"])

    def finals(self, stage: str) -> dict[str, Seeds]:
        return self.by_seed(stage, self.loss)

    def curve(self, trial: Trial, table: str = "training") -> tuple[list[int], list[float]]:
        """(updates, losses); table: "training" (means over 50 updates) or "validation"."""
        rows = self.rows[table][str(trial)]
        return [int(row["updates"]) for row in rows], [float(row["loss"]) for row in rows]

    def seconds(self, trial: Trial) -> list[float]:
        """Seconds of training at each point of `curve(trial)`."""
        return np.cumsum([float(row["seconds"]) for row in self.rows["training"][str(trial)]]).tolist()

    def threshold(self, stage: str) -> float | None:
        """The loss below which a model of a stage has left the plateau; None without `nopos` to compare with."""
        own = CLAIMS["stages"].get(stage, {}).get("lr")
        by_rate = self.by_rate(stage if own else "pilot").get("nopos", {})
        is_known = set(by_rate) >= ({own} if own else set(CLAIMS["learning_rates"]))
        return min(by_rate.values()) - CLAIMS["threshold"] if is_known else None

    def exit(self, trial: Trial) -> float | None:
        """The update at which the model leaves the plateau; None: it never does, or there is no threshold."""
        threshold = self.threshold(trial.stage)
        return None if threshold is None else first_below(*self.curve(trial), threshold)

    def by_rate(self, stage: str) -> dict[str, dict[float, float]]:
        """{model: {learning rate: mean final loss}} of a stage."""
        losses = defaultdict(lambda: defaultdict(list))
        for trial in self.trials(stage):
            losses[trial.model][trial.lr].append(self.loss(trial))
        return {model: {lr: float(np.mean(values)) for lr, values in by_lr.items()} for model, by_lr in losses.items()}

    def judged(self, stage: str) -> list["Judged"]:
        """The contrasts of the plan, of the final losses of a stage."""
        return judged(self.finals(stage), exploratory=stage != "main")

    def measures(self, trial: Trial, measure: str) -> list[dict]:
        return [row for row in self.rows["measures"][str(trial)] if row["measure"] == measure]

    def final_measure(self, measure: str, part: str) -> Measure:
        """A function from a trial to a number, None where it was not measured."""

        def value(trial):
            return next((float(row["value"]) for row in self.measures(trial, measure) if row["part"] == part), None)

        return value

    def credits(self, trial: Trial, updates: int, only_order: bool, measure: str = "word") -> dict[str, np.ndarray]:
        """{paradigm: credit of each pair}; only_order: of the pairs whose sentences have the same words."""
        flags = {row["paradigm"]: row for row in self.tables["paradigms"]}
        of_paradigm = {}
        for row in self.rows["pairs"][str(trial)]:
            if int(row["updates"]) != updates:
                continue
            values = np.array([CREDITS[letter] for letter in row[measure]])
            if only_order:
                same = flags[row["paradigm"]]
                pairs = zip(same["same_words"], same["same_pieces"], strict=True)
                values = values[np.array([words == "1" and pieces == "0" for words, pieces in pairs][: len(values)])]
            if len(values):
                of_paradigm[row["paradigm"]] = values
        return of_paradigm

    def pairs_accuracy(self, trial: Trial, updates: int, only_order: bool) -> float | None:
        credits = self.credits(trial, updates, only_order)
        return float(np.mean([values.mean() for values in credits.values()])) if credits else None


def groups(items: Iterable, key: Callable, value: Callable) -> dict[Any, set]:
    """{key(item): {value(item), ..}}."""
    grouped = defaultdict(set)
    for item in items:
        grouped[key(item)].add(value(item))
    return grouped


# ------------------------------------------------------------------------------------------------------- the contrasts


@dataclass(frozen=True)
class Judged:
    """A contrast of the plan with what came out. contrast: None without a common seed."""

    a: str
    b: str
    claim: str
    contrast: Contrast | None
    p: float | None  # corrected by Holm for all contrasts of the plan
    exploratory: bool = False  # of another stage than main, which alone decides claims

    @property
    def verdict(self) -> str:
        """ "confirmed", "refuted" (exploratory: "lower", "higher"), "not resolved", or "not run"."""
        if self.contrast is None:
            return "not run"
        if self.p is None or self.p > LEVEL:
            return "not resolved"
        if not self.exploratory and self.contrast.seeds < CLAIMS["required_seeds"]:
            return "not resolved"
        lower, higher = ("lower", "higher") if self.exploratory else ("confirmed", "refuted")
        return lower if self.contrast.mean < 0 else higher


def judged(finals: dict[str, Seeds], exploratory: bool = False) -> list[Judged]:
    """The contrasts of claims.yaml. Holm corrects for all of them, also for those that cannot be computed yet."""
    plan = [(*entry["models"], entry["claim"]) for entry in CLAIMS["contrasts"]]
    computed = [paired(finals, a, b) for a, b, _ in plan]
    adjusted = holm([1.0 if one is None or one.p is None else one.p for one in computed])
    return [
        Judged(*entry, one, None if one is None or one.p is None else p, exploratory)
        for entry, one, p in zip(plan, computed, adjusted, strict=True)
    ]


def paired(finals: dict[str, Seeds], a: str, b: str) -> Contrast | None:
    """a - b, None where they have no common seed."""
    return contrast(finals[a], finals[b]) if set(finals.get(a, ())) & set(finals.get(b, ())) else None


# ------------------------------------------------------------------------------------------------ the share of updates


def paper_shares(evidence: Evidence, stage: str, model: str, without_plateau: bool = False) -> Seeds:
    """{seed: share of BERT-A's updates after which the validation loss of `model` is BERT-A's final one}.

    math.inf: it never gets there. without_plateau: the exit updates of both models are taken off; math.nan where that
    says nothing, because a model never left the plateau, or not before the loss was reached.
    """
    trials = {(trial.model, trial.seed): trial for trial in evidence.trials(stage)}
    shares = {}
    for (name, seed), trial in trials.items():
        bert = trials.get(("bert_a", seed))
        if name != model or bert is None:
            continue
        target = evidence.curve(bert, "validation")[1][-1]
        updates, losses = evidence.curve(trial, "validation")
        share = share_of_updates(updates, losses, target, bert.updates)
        if without_plateau and not math.isinf(share):
            exits = [math.inf if update is None else update for update in (evidence.exit(trial), evidence.exit(bert))]
            after, of = share * bert.updates - exits[0], bert.updates - exits[1]
            share = after / of if after > 0 and of > 0 else math.nan
        shares[seed] = share
    return shares


def schedule_shares(evidence: Evidence, model: str) -> Seeds:
    """{seed: share of the updates with which `model`, trained with full decay, ends at BERT-A's final loss}, at tiny
    size: the shortest share if that is enough, math.inf if all updates are not. Only seeds with all lengths."""
    bert = {trial.seed: trial for trial in evidence.trials("controls") if trial.model == "bert_a"}
    shares = {}
    for seed, trial in bert.items():
        runs = [t for t in evidence.trials("share") + evidence.trials("controls") if (t.model, t.seed) == (model, seed)]
        finals = {run.updates / trial.updates: evidence.loss(run) for run in runs}
        if set(finals) >= {updates / trial.updates for updates in (*lengths_of("share"), trial.updates)}:
            shares[seed] = share_of_schedule(finals, evidence.loss(trial))
    return shares


# ---------------------------------------------------------------------------------------- losses at equal times


def after_exit(evidence: Evidence, stage: str) -> tuple[dict[str, Seeds], int | None]:
    """({model: {seed: training loss n updates after its exit}}, n), n being the largest multiple of 50 that all runs of
    the stage which left the plateau have; None if there is none."""
    exits = {trial: evidence.exit(trial) for trial in evidence.trials(stage)}
    exits = {trial: update for trial, update in exits.items() if update is not None}
    n = int(min((trial.updates - update for trial, update in exits.items()), default=0) // 50 * 50)
    if not n:
        return {}, None
    table = defaultdict(dict)
    for trial, update in exits.items():
        table[trial.model][trial.seed] = float(np.interp(update + n, *evidence.curve(trial)))
    return dict(table), n


def equal_time(evidence: Evidence, stage: str) -> dict[str, Seeds]:
    """{model: {seed: training loss when the quickest run of that seed ended}}: by the seconds per update that are the
    median of the model's runs, since a machine is not equally loaded at all times."""
    trials, per_update = evidence.trials(stage), defaultdict(list)
    for trial in trials:
        seconds = evidence.seconds(trial)
        if seconds:
            per_update[trial.model].append(seconds[-1] / evidence.curve(trial)[0][-1])
    pace = {model: float(np.median(values)) for model, values in per_update.items()}
    if not pace:
        return {}
    budget = min(pace.values()) * max(trial.updates for trial in trials)
    table = defaultdict(dict)
    for trial in trials:
        if trial.model in pace and evidence.curve(trial)[0]:
            table[trial.model][trial.seed] = float(np.interp(budget / pace[trial.model], *evidence.curve(trial)))
    return dict(table)


# ----------------------------------------------------------------------------------------------------------- the tables


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def with_interval(values: Iterable[float], digits: int = 3) -> str:
    """ "6.123 [6.100, 6.146]": mean and 95 % t-interval; the mean alone of a single value."""
    mean, interval = mean_interval(list(values))
    return number(mean, digits) + (f" [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]" if interval else "")


def of_contrast(one: Contrast | None, digits: int = 3) -> str:
    return "" if one is None else with_interval(one.differences.values(), digits)


def seeds_of(table: dict[str, Seeds]) -> list[int]:
    return sorted({seed for values in table.values() for seed in values})


def contrast_table(evidence: Evidence, stage: str) -> Table:
    rows, results = [], evidence.judged(stage)
    seeds = sorted({seed for result in results if result.contrast for seed in result.contrast.differences})
    for result in results:
        differences = result.contrast.differences if result.contrast else {}
        cells = [number(differences.get(seed)) for seed in seeds]
        p = "" if result.p is None else f"{result.p:.2g}"
        rows.append([f"{result.a} - {result.b}", result.claim, *cells, of_contrast(result.contrast), p, result.verdict])
    header = ["contrast", "claim", *(f"seed {seed}" for seed in seeds), "mean [95 % interval]", "p (Holm)", "verdict"]
    return Table.plain(header, rows, align="ll" + "r" * (len(seeds) + 2) + "l")


def stage_table(evidence: Evidence, stage: str, against: bool) -> Table:
    """Final losses of every seed, mean, exit updates. against: also the paired difference from the model that each
    control changes (its architecture)."""
    finals, exits = evidence.finals(stage), evidence.by_seed(stage, evidence.exit)
    seeds, rows = seeds_of(finals), []
    for model, losses in finals.items():
        left = [f"{exits[model][seed]:,.0f}" if seed in exits.get(model, ()) else "never" for seed in sorted(losses)]
        left = left if evidence.threshold(stage) is not None else []
        base = CLAIMS["models"][model]["arch"]
        change = [of_contrast(paired(finals, model, base)) if base != model else ""] if against else []
        cells = [number(losses.get(seed)) for seed in seeds]
        rows.append([model, *cells, with_interval(losses.values()), *change, ", ".join(left)])
    header = ["model", *(f"seed {seed}" for seed in seeds), "mean [95 % interval]"]
    return Table.plain([*header, *(["minus its model"] if against else []), "exit updates"], rows)


def pilot_table(evidence: Evidence) -> Table:
    means = evidence.by_rate("pilot")
    rates = sorted({lr for by_lr in means.values() for lr in by_lr})
    rows = []
    for model, by_lr in means.items():
        best, spread = min(by_lr, key=by_lr.get), ""
        cells = [number(by_lr.get(lr)) for lr in rates]
        if set(by_lr) >= set(CLAIMS["learning_rates"]):
            cells[rates.index(best)] = f"**{cells[rates.index(best)]}**"
            spread = f"{max(by_lr.values()) - by_lr[best]:.2f}"
        rows.append([model, *cells, spread])
    return Table.plain(["model", *(f"{lr:g}" for lr in rates), "worst - best"], rows)


def share_table(evidence: Evidence) -> Table:
    def one(share: float, least: float) -> str:
        if not math.isfinite(share):
            return "> 100" if math.isinf(share) else "–"
        return ("≤ " if share < 1.001 * least else "") + f"{100 * share:.0f}"

    def cell(shares: Seeds, least: float = 0) -> str:
        """least: the share of the shortest training, at which a share is only known to be at most as large."""
        if not shares:
            return ""
        texts = [one(share, least) for share in shares.values()]
        if "–" in texts:
            return f"– ({', '.join(texts)})"
        mean, interval = geometric_share(list(shares.values()))
        if math.isinf(mean):
            return f"> 100 % ({', '.join(texts)})"
        at_most = any(text.startswith("≤") for text in texts)
        bounds = f" [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]" if interval and not at_most else ""
        return f"{'≤ ' * at_most}{100 * mean:.0f} %{bounds} ({', '.join(texts)})"

    rows = []
    for model in CLAIMS["stages"]["share"]["models"]:
        for stage, size in (("main", "mini"), ("controls", "tiny")):
            paper, rest = (paper_shares(evidence, stage, model, off) for off in (False, True))
            fair = schedule_shares(evidence, model) if size == "tiny" else {}
            least = min(lengths_of("share")) / lengths_of("controls")[0]
            rows.append([f"{model}, {size}", cell(paper), cell(fair, least), cell(rest)])
    return Table.plain(["", "(a) as the paper", "(b) full decay", "(c) exit updates taken off"], rows)


def scale_text(evidence: Evidence) -> str:
    """Whether tupe_a_tie_cls is below the best of the scale controls at tiny size."""
    finals = evidence.finals("controls")
    differences = {name: paired(finals, "tupe_a_tie_cls", name) for name in CLAIMS["scale_controls"]}
    if any(one is None or one.seeds < CLAIMS["required_seeds"] for one in differences.values()):
        return "Whether untying itself helps is open until the scale controls have run."
    best = max(differences, key=lambda name: differences[name].mean)
    one = differences[best]
    below = one.interval is not None and one.interval[1] < 0
    first = evidence.judged("main")[0].verdict
    verdict = first if first != "confirmed" or below else "not resolved"
    return (
        f"`tupe_a_tie_cls` minus `{best}`, the best scale control, at tiny size: {of_contrast(one)} bits "
        f"({'below' if below else 'not below'} 0 with its interval). **That untying itself helps: {verdict}.**"
    )


def scale_rows(evidence: Evidence, stage: str) -> list[list[str]]:
    """What was changed, names, difference of final losses, and whether its interval is below or above 0."""
    finals, rows = evidence.finals(stage), []
    for entry in CLAIMS["scale_changes"]:
        one = paired(finals, *entry["models"])
        if one is not None and one.interval is not None:
            low, high = one.interval
            result = "lower" if high < 0 else "higher" if low > 0 else "not resolved"
            names = " - ".join(f"`{name}`" for name in entry["models"])
            rows.append([entry["change"], names, of_contrast(one), f"{result} (exploratory)"])
    return rows


def exploratory_table(evidence: Evidence, stage: str) -> Table:
    """Of a stage: means over pre-training seeds with 95 % intervals. What was not measured has no column."""
    of_stage = functools.partial(evidence.by_seed, stage)
    since_exit, n = after_exit(evidence, stage)
    columns = {
        "order preferred, %": (of_stage(evidence.final_measure("order", "accuracy")), 100, 1),
        "by, nats": (of_stage(evidence.final_measure("order", "margin")), 1, 2),
        "BLiMP, %": (of_stage(lambda t: evidence.pairs_accuracy(t, t.updates, False)), 100, 1),
        "only order, %": (of_stage(lambda t: evidence.pairs_accuracy(t, t.updates, True)), 100, 1),
        "[CLS] to first 8 / uniform": (of_stage(functools.partial(cls_mean, evidence)), 1, 2),
        f"loss {n or 0:,} updates after exit": (since_exit, 1, 3),
        "loss at equal time": (equal_time(evidence, stage) if stage == "main" else {}, 1, 3),
    }
    columns = {title: column for title, column in columns.items() if column[0]}
    rows = []
    for model in evidence.finals(stage):
        cells = [
            with_interval([scale * value for value in values[model].values()], digits) if model in values else ""
            for values, scale, digits in columns.values()
        ]
        rows.append([model, *cells])
    return Table.plain(["model", *columns], rows)


def cls_mean(evidence: Evidence, trial: Trial) -> float | None:
    ratios = [float(row["value"]) for row in evidence.measures(trial, "cls attention")]
    return float(np.mean(ratios)) if ratios else None


def parts_table(evidence: Evidence) -> Table:
    """Losses of the main stage by position and by length, means over seeds."""
    values = defaultdict(lambda: defaultdict(list))
    for trial in evidence.trials("main"):
        for kind in ("position", "length"):
            for row in evidence.measures(trial, f"loss by {kind}"):
                values[trial.model][kind, row["part"]].append(float(row["value"]))
    parts = sorted(
        {part for by_part in values.values() for part in by_part},
        key=lambda part: (part[0] == "length", int(part[1].split("-")[0])),
    )
    rows = [
        [model, *(number(float(np.mean(by_part[part])) if part in by_part else None, 2) for part in parts)]
        for model, by_part in values.items()
    ]
    return Table.plain(["model", *(f"{kind} {part}" for kind, part in parts)], rows)


def pair_errors(evidence: Evidence) -> str:
    """Standard errors of the accuracies of minimal pairs, over pairs and over paradigms, largest of all models."""
    errors = defaultdict(list)
    for trial in evidence.trials("main"):
        for only_order in (False, True):
            if credits := evidence.credits(trial, trial.updates, only_order):
                errors[only_order].append(macro_average(credits)[1:])
    if not errors:
        return "Minimal pairs have not been scored yet."
    all_pairs, order = (np.max(errors[only_order], axis=0) * 100 for only_order in (False, True))
    return (
        f"Standard errors of one model's accuracy, at most: all pairs {all_pairs[0]:.1f} over pairs and "
        f"{all_pairs[1]:.1f} over paradigms, only order {order[0]:.1f} and {order[1]:.1f} (bootstrap)."
    )


def summary(evidence: Evidence) -> str:
    """For the README: every claim and what came out, of the main stage, or before it is complete of the controls, or
    before that of the first look."""
    stage = next((stage for stage in ("main", "controls") if is_complete(evidence, stage)), "first")
    plan, results = CLAIMS["stages"][stage], evidence.judged(stage)
    rows = [
        [result.claim, f"`{result.a}` - `{result.b}`", of_contrast(result.contrast), result.verdict]
        for result in results
    ]
    header = ["claim", "difference of final losses, bits", "mean [95 % interval]", "result"]
    changes = scale_rows(evidence, stage)  # of the main stage, which has none of these models: none
    table = Table.plain(header, rows + changes, align="llrl")
    trials = evidence.trials(stage)
    seeds = len({trial.seed for trial in trials})
    what = f"{plan['size']} models, {plan['updates']:,} updates, {seeds} seeds, differences paired by seed"
    about_scale = " The exploratory rows are about the scale of position logits." if changes else ""
    told = {
        "main": f"Evidence: {what}. {scale_text(evidence)}",
        "controls": f"So far: {what}, each at its own best learning rate. Exploratory: larger models are to decide the "
        f"claims.{about_scale}",
        "first": f"A first look only: {what}, one learning rate for all. It shows who learns faster **early**, not who "
        f"is better in the end.{about_scale}",
    }
    return f"{table.markdown()}\n{told[stage]}\n"


def is_complete(evidence: Evidence, stage: str) -> bool:
    """Whether every contrast has as many seeds as are required."""
    seeds = CLAIMS["required_seeds"]
    return all(result.contrast and result.contrast.seeds >= seeds for result in evidence.judged(stage))


def late(evidence: Evidence, stage: str) -> list[str]:
    """Runs of a stage that had not left the plateau by half of their updates (all models but `nopos`)."""
    runs = [trial for trial in evidence.trials(stage) if trial.model != "nopos"]
    exits = [(trial, evidence.exit(trial)) for trial in runs]
    return sorted({trial.model for trial, update in exits if update is None or update > trial.updates / 2})


def coverage(evidence: Evidence) -> str:
    """What has run, of what is planned, and in which precision."""
    parts = []
    for stage, plan in CLAIMS["stages"].items():
        finished = [trial for trial in evidence.runs if trial.stage == stage]
        models = len(CLAIMS["models"]) if plan["models"] == "all" else len(plan["models"])
        rates = len(CLAIMS["learning_rates"]) if stage == "pilot" else 1
        planned = models * rates * len(plan["seeds"]) * len(lengths_of(stage))
        used = set().union(*(used for block, used in evidence.precisions().items() if block[0] == stage))
        precision = f" ({', '.join(sorted(used))})" if used else ""
        parts.append(f"{stage} {len(finished)}{precision} of {planned}")
    failed = "".join(f" Failed: `{trial}` ({reason})." for trial, reason in evidence.failed.items())
    return f"Finished runs: {'; '.join(parts)}.{failed}"
