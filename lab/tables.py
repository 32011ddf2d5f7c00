"""The tables and numbers in the text of the first protocol's pages, by the functions that their templates call."""

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable

import numpy as np

from tupe.common.tables import TextTable
from tupe.evaluation.minimal_pairs import macro_average
from tupe.experiments.statistics import (
    Contrast,
    Seeds,
    mean_interval,
    number,
    of_contrast,
    paired,
    shown,
    with_interval,
)

from .claims import (
    CLAIMS,
    after_exit,
    corrected,
    credits,
    equal_time,
    judged,
    late,
    pairs_accuracy,
    paper_shares,
    schedule_shares,
)
from .estimates import geometric_mean_interval
from .evidence import Evidence, worst_minus_best
from .plan import PLAN, Trial, lengths_of, planned_models
from .second_page import (
    BESIDE,
    CHANGE_BESIDE,
    DECIDED,
    LASTING_MODELS,
    Decision,
    Decisions,
    Runs,
    contrasts,
    differences,
)
from .second_plan import PROTOCOL

SHARES = {  # stages that shares of updates are shown of, and how they are called there
    "main": "mini", "slower": "mini, one rate", "controls": "tiny",
    "longer": f"tiny, {PLAN['stages']['longer']['updates']:,} updates",
}  # fmt: skip
AT_BOTH_RATES = {"main": "main stage", "slower": "one rate"}


def plus_minus(values: list[float], digits: int) -> str:
    """ "6.12 ± 0.02": mean and half the width of the 95 % t-interval."""
    mean, interval = mean_interval(values)
    return number(mean, digits) + (f" ± {number(interval[1] - mean, digits)}" if interval else "")


def percent(values: Iterable[float]) -> str:
    return with_interval([100 * value for value in values], 1)


def of_rate(loss: float) -> str:
    return "diverged" if math.isinf(loss) else number(loss)


# -------------------------------------------------------------------------------------------------- losses of one stage


def contrast_table(evidence: Evidence, stage: str) -> TextTable:
    results, rows = judged(evidence, stage), []
    seeds = sorted({seed for result in results for seed in result.contrast.differences})
    for result in results:
        cells = [number(result.contrast.differences.get(seed)) for seed in seeds]
        p = "" if result.p is None else f"{result.p:.2g}"
        rows.append([f"{result.a} - {result.b}", result.claim, *cells, of_contrast(result.contrast), p, result.verdict])
    header = ["contrast", "claim", *(f"seed {seed}" for seed in seeds), "mean [95 % interval]", "p (Holm)", "verdict"]
    return TextTable.plain(header, rows, align="ll" + "r" * (len(seeds) + 2) + "l")


def stage_table(evidence: Evidence, stage: str, against: str = "") -> TextTable:
    """Final losses of every seed, mean, exit updates. against: also paired differences, "changed": from the model that
    each control changes (its architecture); a stage: from the same model there. Of the controls, which train at the
    pilot's rates, also the pilot's run."""
    finals, exits = evidence.finals(stage), evidence.by_seed(stage, evidence.exit)
    seeds, rows = sorted({seed for losses in finals.values() for seed in losses}), []
    for model, losses in finals.items():
        left = [
            "–" if seed not in losses else f"{exits[model][seed]:,.0f}" if seed in exits.get(model, ()) else "never"
            for seed in seeds
        ]
        change = [difference_from(evidence, stage, model, against)] if against else []
        if stage == "controls":
            change.insert(0, number(pilot_loss(evidence, model)))
        cells = [number(losses.get(seed)) for seed in seeds]
        rows.append([model, *cells, with_interval(losses.values()), *change, ", ".join(left)])
    header = ["model", *(f"seed {seed}" for seed in seeds), "mean [95 % interval]"]
    header += ["the pilot's run"] if stage == "controls" else []
    header += ["minus the model it changes" if against == "changed" else f"minus the {against} stage's"] * bool(against)
    return TextTable.plain([*header, "exit updates"], rows)


def difference_from(evidence: Evidence, stage: str, model: str, against: str) -> str:
    """See `stage_table`; "" where there is nothing to compare with."""
    finals = evidence.finals(stage)
    if against == "changed":
        base = PLAN["models"][model]["arch"]
        difference = of_contrast(paired(finals, model, base)) if base != model else ""
        return difference and f"{difference} (`{base}`)"
    if model in PLAN["stages"][stage]["includes"][against]:
        return ""
    both = {"here": finals[model], "there": evidence.finals(against).get(model, {})}
    return of_contrast(paired(both, "here", "there"))


def change_table(evidence: Evidence, stage: str) -> TextTable:
    """What was changed, names, difference of final losses, and where its interval lies."""
    finals, rows = evidence.finals(stage), []
    for entry in CLAIMS["changes"]:
        one = paired(finals, *entry["models"])
        if one is not None:
            names = " - ".join(f"`{name}`" for name in entry["models"])
            rows.append([entry["change"], names, of_contrast(one), side(one)])
    return TextTable.plain(["change", "difference", "mean [95 % interval]", "interval is"], rows, align="llrl")


def side(one: Contrast) -> str:
    """Where an interval lies."""
    if one.interval is None:
        return "too few seeds"
    return "below 0" if one.interval[1] < 0 else "above 0" if one.interval[0] > 0 else "includes 0"


def exploratory_table(evidence: Evidence, stage: str) -> TextTable:
    """Of a stage: means over pre-training seeds with 95 % intervals. What was not measured has no column."""
    of_stage = functools.partial(evidence.by_seed, stage)
    since_exit, n = after_exit(evidence, stage)
    columns = {
        "order preferred, %": (of_stage(evidence.final_measure("order", "accuracy")), percent),
        "margin, nats": (
            of_stage(evidence.final_measure("order", "margin")), functools.partial(with_interval, digits=2)
        ),
        "BLiMP, %": (of_stage(lambda t: pairs_accuracy(evidence, t, t.updates, False)), percent),
        "only order, %": (of_stage(lambda t: pairs_accuracy(evidence, t, t.updates, True)), percent),
        f"training loss {n:,} updates after exit": (since_exit, with_interval),
        "training loss at equal time": (equal_time(evidence, stage) if stage == "main" else {}, with_interval),
        "[CLS] to first 8 / uniform": (
            of_stage(functools.partial(cls_mean, evidence)),
            lambda ratios: shown(*geometric_mean_interval(ratios), 2),
        ),
    }  # fmt: skip
    columns = {title + only_seed(column[0]): column for title, column in columns.items() if column[0]}
    rows = [
        [model, *(show(values[model].values()) if model in values else "" for values, show in columns.values())]
        for model in evidence.finals(stage)
    ]
    return TextTable.plain(["model", *columns], rows)


def only_seed(values: dict[str, Seeds]) -> str:
    """Return " (seed 1)" where all that was measured has one seed."""
    seeds = {seed for by_seed in values.values() for seed in by_seed}
    return f" (seed {min(seeds)})" if len(seeds) == 1 else ""


def cls_mean(evidence: Evidence, trial: Trial) -> float | None:
    ratios = [float(row["value"]) for row in evidence.measures(trial, "cls attention")]
    return float(np.mean(ratios)) if ratios else None


# ------------------------------------------------------------------------------------------- the pilot, rates, controls


def rates_table(evidence: Evidence) -> TextTable:
    """Losses of the pilot by learning rate; the best in bold once half and twice that rate have run."""
    means = evidence.by_rate("pilot")
    rates = sorted({lr for by_lr in means.values() for lr in by_lr})
    rows = []
    for model, by_lr in means.items():
        cells = {lr: of_rate(loss) for lr, loss in by_lr.items()}
        if best := evidence.best_rates.get(model):
            cells[best] = f"**{cells[best]}**"
        rows.append([model, *(cells.get(lr, "") for lr in rates), number(worst_minus_best(by_lr), 2)])
    return TextTable.plain(["model", *(f"{lr:g}" for lr in rates), "worst - best of the planned"], rows)


def rate_shares_table(evidence: Evidence) -> TextTable:
    """Losses of the stage `rates` by the share of the pilot's rate, and their mean where all its models have run."""
    plan, losses = PLAN["stages"]["rates"], defaultdict(dict)
    runs = {trial: evidence.loss(trial) for trial in evidence.trials("rates")}
    runs |= {trial: math.inf for trial in evidence.diverged if trial.stage == "rates"}
    for trial, loss in runs.items():
        share = round(trial.lr / evidence.best_rates[trial.model], 6)
        losses[share][trial.model] = loss, "" if trial.seed in plan["seeds"] else f" (seed {trial.seed})"
    shares = sorted(losses, reverse=True)
    rows = []
    for model in plan["models"]:
        cells = [losses[share].get(model) for share in shares]
        rows.append([model, *("" if cell is None else of_rate(cell[0]) + cell[1] for cell in cells)])
    complete = [losses[share].keys() >= set(plan["models"]) for share in shares]
    means = [of_rate(float(np.mean([loss for loss, _ in losses[share].values()]))) for share in shares]
    rows.append(["mean", *(mean if whole else "" for mean, whole in zip(means, complete, strict=True))])
    return TextTable.plain(["model", *(f"{share:g}" for share in shares)], rows)


def pilot_loss(evidence: Evidence, model: str) -> float | None:
    """Final loss of the pilot's run of a model at the rate of its controls."""
    return evidence.by_rate("pilot").get(model, {}).get(evidence.best_rates.get(model))


def far_from_pilot(evidence: Evidence) -> str:
    """The models whose controls agree among themselves far better than with the pilot's run, and how many standard
    deviations it is away."""
    far = {}
    for model, losses in evidence.finals("controls").items():
        values, pilot = list(losses.values()), pilot_loss(evidence, model)
        if pilot is not None and len(values) > 1 and np.std(values, ddof=1):
            far[model] = abs(pilot - np.mean(values)) / np.std(values, ddof=1)
    return ", ".join(f"`{model}` ({sds:.0f})" for model, sds in sorted(far.items(), key=lambda x: -x[1]) if sds > 5)


def best_scale_control(evidence: Evidence) -> tuple[str, str]:
    """(the better of the planned controls of scale, `tupe_a_tie_cls` minus it) at tiny size."""
    finals = evidence.finals("controls")
    differences = {name: paired(finals, "tupe_a_tie_cls", name) for name in CLAIMS["scale_controls"]}
    best = max(differences, key=lambda name: differences[name].mean)
    return best, of_contrast(differences[best])


# ---------------------------------------------------------------------------------------------------- beside the stages


def coverage(evidence: Evidence) -> str:
    """What has run, of what is planned, and in which precision."""
    parts = []
    for stage, plan in PLAN["stages"].items():
        rates = PLAN["learning_rates"] if stage == "pilot" else plan.get("shares", [1])
        all_planned = len(planned_models(stage)) * len(plan["seeds"]) * len(lengths_of(plan)) * len(rates)
        finished = [trial for trial in evidence.runs if trial.stage == stage]
        planned = [
            trial
            for trial in finished
            if trial.seed in plan["seeds"] and trial.updates in lengths_of(plan) and evidence.has_planned_rate(trial)
        ]
        more = f" and {len(finished) - len(planned)} more" if len(finished) > len(planned) else ""
        used = {evidence.runs[trial]["precision"] for trial in finished} - {""}
        precision = f" ({', '.join(sorted(used))})" if used else ""
        parts.append(f"{stage} {len(planned)} of {all_planned}{more}{precision}")
    failed = "".join(f" Failed: `{trial}` ({reason})." for trial, reason in evidence.failed.items())
    return f"Finished runs: {'; '.join(parts)}.{failed}"


def late_models(evidence: Evidence) -> str:
    """ "model (stage); ..": see `late`."""
    named = {stage: ", ".join(late(evidence, stage)) for stage in ("main", "slower", "controls", "longer")}
    return "; ".join(f"{names} ({stage})" for stage, names in named.items() if names)


def rates_of(evidence: Evidence, stage: str) -> str:
    return " and ".join(f"{lr:g}" for lr in sorted({trial.lr for trial in evidence.trials(stage)}))


def sensitivity_table(evidence: Evidence) -> TextTable:
    """Corrected p-values of the five contrasts by other tests than the protocol's."""
    rows, tests = [], {}
    for stage, title in AT_BOTH_RATES.items():
        tests = corrected(evidence, stage)
        cells = zip(*(["" if p is None else f"{p:.2g}" for p in ps] for ps in tests.values()), strict=True)
        names = [" - ".join(entry["models"]) for entry in CLAIMS["contrasts"]]
        rows += [[f"{name}, {title}", *row] for name, row in zip(names, cells, strict=True)]
    return TextTable.plain(["contrast", *tests], rows)


def after_exit_table(evidence: Evidence) -> TextTable:
    """What is left of each model's distance from BERT-A when both are as many updates past their exits."""
    header, rows = ["minus BERT-A's"], defaultdict(list)
    for stage, title in AT_BOTH_RATES.items():
        (losses, n), finals = after_exit(evidence, stage), evidence.finals(stage)
        header += [f"{title}: {n:,} updates after exit", "final loss", "left"]
        for model in finals:
            after, final = paired(losses, model, "bert_a"), paired(finals, model, "bert_a")
            if model != "bert_a" and after and final:
                rows[model] += [of_contrast(after), of_contrast(final), f"{100 * after.mean / final.mean:.0f} %"]
    whole = [[model, *cells] for model, cells in rows.items() if len(cells) == len(header) - 1]
    return TextTable.plain(header, whole)


def share_cell(shares: Seeds, least: float = 0) -> str:
    """ "35 % [30, 41] (34, 38, 33)": geometric mean, interval, every seed. least: the share of the shortest training,
    at which a share is only known to be at most as large."""
    if not shares:
        return ""
    texts = ["≤ " * (share < 1.001 * least) + f"{100 * share:.0f}" for share in shares.values()]
    mean, interval = geometric_mean_interval(shares.values())
    at_most = any(text.startswith("≤") for text in texts)
    bounds = f" [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]" if interval and not at_most else ""
    return f"{'≤ ' * at_most}{100 * mean:.0f} %{bounds} ({', '.join(texts)})"


def share_table(evidence: Evidence) -> TextTable:
    """A row for each model and size."""
    rows = []
    for model in PLAN["stages"]["share"]["models"]:
        for stage, size in SHARES.items():
            paper, rest = (paper_shares(evidence, stage, model, off) for off in (False, True))
            fair = schedule_shares(evidence, model) if stage == "controls" else {}
            least = min(PLAN["stages"]["share"]["updates"]) / PLAN["stages"]["controls"]["updates"]
            rows.append([f"{model}, {size}", share_cell(paper), share_cell(fair, least), share_cell(rest)])
    return TextTable.plain(["", "(a) running loss", "(b) full decay", "(c) exit updates taken off"], rows)


def largest_text_error(evidence: Evidence) -> str:
    """The largest standard error that the choice of the held-out text gives to a loss of the main stage."""
    return number(max(float(evidence.runs[trial]["loss_error"]) for trial in evidence.trials("main")))


def parts_table(evidence: Evidence) -> TextTable:
    """Losses of the main stage by position and by length, means over seeds and half the width of their 95 %
    t-intervals."""
    values = defaultdict(lambda: defaultdict(list))
    for trial in evidence.trials("main"):
        for kind in ("position", "length"):
            for row in evidence.measures(trial, f"loss by {kind}"):
                if int(row["count"]) >= 500:  # masked tokens; fewer say little
                    values[trial.model][kind, row["part"]].append(float(row["value"]))
    parts = sorted(
        {part for by_part in values.values() for part in by_part},
        key=lambda part: (part[0] == "length", int(part[1].split("-")[0])),
    )
    rows = [
        [model, *(plus_minus(by_part[part], 2) if part in by_part else "" for part in parts)]
        for model, by_part in values.items()
    ]
    return TextTable.plain(["model", *(f"{kind} {part}" for kind, part in parts)], rows)


def pair_errors(evidence: Evidence) -> tuple[list[str], list[str], bool]:
    """(standard errors of the accuracies of minimal pairs over pairs and over paradigms, largest of all models: of all
    pairs, of those where only order differs; whether every model is at chance there, within two standard errors)."""
    scores = [
        [macro_average(scored) for trial in evidence.trials("main")
         if (scored := credits(evidence, trial, trial.updates, only_order))]
        for only_order in (False, True)
    ]  # fmt: skip
    errors = [[number(100 * error, 1) for error in np.max(of_models, axis=0)[1:]] for of_models in scores]
    return *errors, all(abs(mean - 0.5) < 2 * over_paradigms for mean, _, over_paradigms in scores[True])


def claims_table(evidence: Evidence, mini: Decisions, tiny: Decisions) -> TextTable:
    """The five contrasts as gains, so that positive is good for the claim, and the paper's 30 %. mini, tiny: what came
    out of these models in the second protocol."""
    rows = []
    for main in judged(evidence, "main"):
        cells = [of_gain(main.contrast), main.verdict]
        for of in (mini, tiny):
            cells += cells_of(of[main.a, main.b])
        rows.append([main.claim, f"`{main.a}` over `{main.b}`", *cells])
    share = share_cell(paper_shares(evidence, "main", "tupe_r")).partition(" (")[0]
    rows.append(["running loss at BERT-A's last (paper, on GLUE: 30 %)", "`tupe_r`, `bert_a`", share, *[""] * 5])
    header = ["what is added", "models", "gain, bits [95 %]", "verdict"]
    header += ["mini, five seeds", "verdict", "tiny, five seeds", "verdict"]
    return TextTable.plain(header, rows, align="llrlrlrl")


def changes_table(runs: Runs) -> TextTable:
    """What parts of the bundle bring, as gains: stage C of the second protocol at both sizes, and a difference of D."""
    changes = {tuple(entry["models"]): entry["change"] for entry in PROTOCOL["differences"]}
    changes[BESIDE], rows = CHANGE_BESIDE, []
    sizes = [contrasts(runs, stage) | differences(runs, of, stage) for stage, of in reversed(DECIDED.items())]
    for pair, change in changes.items():
        rows.append([change, *(cell for of in sizes for cell in cells_of(of[pair]))])
    return TextTable.plain(["part of the bundle", "mini", "result", "tiny", "result"], rows, align="lrlrl")


def cells_of(one: Decision) -> tuple[str, str]:
    return "" if one.paired is None else of_gain(one.contrast), one.verdict


def of_gain(one: Contrast) -> str:
    """ "0.56 [0.35, 0.78]": how much lower the first model's loss is."""
    low, high = sorted(-bound for bound in one.interval)
    return f"{number(-one.mean, 2)} [{number(low, 2)}, {number(high, 2)}]"


def gains_of_tupe(evidence: Evidence, stage: str) -> str:
    """ "0.84 to 1.01": by how much the tiny models of TUPE end below BERT-A, with the seeds of the longest training."""
    finals, seeds = evidence.finals(stage), evidence.finals("longer")["bert_a"]
    return span([finals["bert_a"][seed] - finals[model][seed] for model in LASTING_MODELS for seed in seeds], 2)


def span(values: Collection[float], digits: int = 0) -> str:
    return f"{min(values):,.{digits}f} to {max(values):,.{digits}f}"
