"""The tables and sentences of docs/results.md and the README on TUPE's claims: how the numbers of `claims` are
shown."""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np

from ..common.architectures import SIZES
from ..common.tables import Table
from ..evaluation.minimal_pairs import macro_average
from .claims import (
    Evidence,
    Judged,
    Seeds,
    after_exit,
    equal_time,
    is_complete,
    paired,
    paper_shares,
    schedule_shares,
    worst_minus_best,
)
from .plan import CLAIMS, Trial, lengths_of, trials
from .statistics import Contrast, geometric_share, mean_interval

SHARES = {  # stages that shares of updates are shown of, and how they are called there
    "main": "mini", "slower": "mini, one rate", "controls": "tiny",
    "longer": f"tiny, {lengths_of('longer')[0]:,} updates",
}  # fmt: skip


def number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{round(float(value), digits) + 0.0:.{digits}f}"  # + 0.0: no minus before a zero


def with_interval(values: Iterable[float], digits: int = 3) -> str:
    """ "6.123 [6.100, 6.146]": mean and 95 % t-interval; the mean alone of fewer than three values."""
    return shown(*mean_interval(list(values)), digits)


def shown(mean: float, interval: tuple[float, float] | None, digits: int) -> str:
    bounds = f" [{', '.join(number(bound, digits) for bound in interval)}]" if interval else ""
    return number(mean, digits) + bounds


def plus_minus(values: list[float], digits: int) -> str:
    """ "6.12 ± 0.02": mean and half the width of the 95 % t-interval."""
    mean, interval = mean_interval(values)
    return number(mean, digits) + (f" ± {number(interval[1] - mean, digits)}" if interval else "")


def percent(values: Iterable[float]) -> str:
    return with_interval([100 * value for value in values], 1)


def geometric(values: Iterable[float]) -> str:
    """As `with_interval`, of positive ratios: geometric mean, interval on logarithms."""
    mean, interval = mean_interval([math.log(value) for value in values])
    return shown(math.exp(mean), interval and (math.exp(interval[0]), math.exp(interval[1])), 2)


def of_contrast(one: Contrast | None, digits: int = 3) -> str:
    return "" if one is None else shown(one.mean, one.interval, digits)


def seeds_of(table: dict[str, Seeds]) -> list[int]:
    return sorted({seed for values in table.values() for seed in values})


def contrast_table(evidence: Evidence, stage: str) -> Table:
    rows, results = [], evidence.judged(stage)
    if stage == "longer":  # it has not the models of all contrasts
        results = [result for result in results if result.contrast]
    seeds = sorted({seed for result in results if result.contrast for seed in result.contrast.differences})
    for result in results:
        differences = result.contrast.differences if result.contrast else {}
        cells = [number(differences.get(seed)) for seed in seeds]
        p = "" if result.p is None else f"{result.p:.2g}"
        rows.append([f"{result.a} - {result.b}", result.claim, *cells, of_contrast(result.contrast), p, result.verdict])
    header = ["contrast", "claim", *(f"seed {seed}" for seed in seeds), "mean [95 % interval]", "p (Holm)", "verdict"]
    if len(seeds) > CLAIMS["required_seeds"]:
        header.append(f"of {CLAIMS['required_seeds']} seeds")
        for row, result in zip(rows, evidence.judged(stage, required=True), strict=True):
            row.append(result.verdict)
    return Table.plain(header, rows, align="ll" + "r" * (len(seeds) + 2) + "l" * (len(header) - len(seeds) - 4))


def stage_table(evidence: Evidence, stage: str, against: str = "") -> Table:
    """Final losses of every seed, mean, exit updates. against: also paired differences, "changed": from the model that
    each control changes (its architecture); a stage: from the same model there. Of the controls, which train at the
    pilot's rates, also the pilot's run."""
    finals, exits = evidence.finals(stage), evidence.by_seed(stage, evidence.exit)
    title = {"": [], "changed": ["minus the model it changes"]}.get(against, [f"minus the {against} stage's"])
    seeds, rows = seeds_of(finals), []
    for model, losses in finals.items():
        left = [
            "–" if seed not in losses else f"{exits[model][seed]:,.0f}" if seed in exits.get(model, ()) else "never"
            for seed in seeds
        ]
        left = left if evidence.threshold(stage) is not None else []
        change = [difference_from(evidence, stage, model, against)] if against else []
        if stage == "controls":
            change.insert(0, number(pilot_loss(evidence, model)))
        cells = [number(losses.get(seed)) for seed in seeds]
        rows.append([model, *cells, with_interval(losses.values()), *change, ", ".join(left)])
    header = ["model", *(f"seed {seed}" for seed in seeds), "mean [95 % interval]"]
    pilot = ["the pilot's run"] if stage == "controls" else []
    return Table.plain([*header, *pilot, *title, "exit updates"], rows)


def pilot_loss(evidence: Evidence, model: str) -> float | None:
    """Final loss of the pilot's run of a model at the rate of its controls."""
    return evidence.by_rate("pilot").get(model, {}).get(evidence.best_rates.get(model))


def pilot_text(evidence: Evidence) -> str:
    """The models whose controls agree among themselves far better than with the pilot's run."""
    far = {}
    for model, losses in evidence.finals("controls").items():
        values, pilot = list(losses.values()), pilot_loss(evidence, model)
        if pilot is not None and len(values) > 1 and np.std(values, ddof=1):
            far[model] = abs(pilot - np.mean(values)) / np.std(values, ddof=1)
    names = [f"`{model}` ({sds:.0f})" for model, sds in sorted(far.items(), key=lambda item: -item[1]) if sds > 5]
    if not names:
        return ""
    return (
        "The pilot's runs had the same rate, another seed and bfloat16 autocast. More than five standard deviations of "
        f"their model's three seeds from these seeds' mean: {', '.join(names)}. So these seeds agree by luck, or "
        "precision matters: intervals of differences from these models claim more than is known.\n"
    )


def difference_from(evidence: Evidence, stage: str, model: str, against: str) -> str:
    """See `stage_table`; "" where there is nothing to compare with."""
    finals = evidence.finals(stage)
    if against == "changed":
        base = CLAIMS["models"][model]["arch"]
        difference = of_contrast(paired(finals, model, base)) if base != model else ""
        return difference and f"{difference} (`{base}`)"
    if model in CLAIMS["stages"][stage]["includes"][against]:
        return ""
    both = {"here": finals[model], "there": evidence.finals(against).get(model, {})}
    return of_contrast(paired(both, "here", "there"))


def of_rate(loss: float) -> str:
    return "diverged" if math.isinf(loss) else number(loss)


def rates_table(evidence: Evidence) -> Table:
    """Losses of the pilot by learning rate; the best in bold once half and twice that rate have run."""
    means = evidence.by_rate("pilot")
    rates = sorted({lr for by_lr in means.values() for lr in by_lr})
    rows = []
    for model, by_lr in means.items():
        cells = {lr: of_rate(loss) for lr, loss in by_lr.items()}
        if best := evidence.best_rates.get(model):
            cells[best] = f"**{cells[best]}**"
        rows.append([model, *(cells.get(lr, "") for lr in rates), number(worst_minus_best(by_lr), 2)])
    return Table.plain(["model", *(f"{lr:g}" for lr in rates), "worst - best of the planned"], rows)


def rate_shares_table(evidence: Evidence) -> Table:
    """Losses of the stage `rates` by the share of the pilot's rate, and their mean where all its models have run."""
    plan, losses = CLAIMS["stages"]["rates"], defaultdict(dict)
    runs = {trial: evidence.loss(trial) for trial in evidence.trials("rates")}
    runs |= {trial: math.inf for trial in evidence.diverged if trial.stage == "rates"}
    for trial, loss in runs.items():
        if trial.model in evidence.best_rates:
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
    return Table.plain(["model", *(f"{share:g}" for share in shares)], rows)


def share_cell(shares: Seeds, least: float = 0) -> str:
    """ "35 % [30, 41] (34, 38, 33)": geometric mean, interval, every seed. least: the share of the shortest training,
    at which a share is only known to be at most as large."""
    if not shares:
        return ""

    def one(share: float) -> str:
        if not math.isfinite(share):
            return "> 100" if math.isinf(share) else "–"
        return ("≤ " if share < 1.001 * least else "") + f"{100 * share:.0f}"

    texts = [one(share) for share in shares.values()]
    if "–" in texts:
        return f"– ({', '.join(texts)})"
    mean, interval = geometric_share(list(shares.values()))
    if math.isinf(mean):
        return f"> 100 % ({', '.join(texts)})"
    at_most = any(text.startswith("≤") for text in texts)
    bounds = f" [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]" if interval and not at_most else ""
    if len(texts) == 1:
        return f"{'≤ ' * at_most}{100 * mean:.0f} % (one seed)"
    return f"{'≤ ' * at_most}{100 * mean:.0f} %{bounds} ({', '.join(texts)})"


def share_table(evidence: Evidence) -> Table:
    """A row for each model and size that has run beside BERT-A."""
    rows = []
    for model in CLAIMS["stages"]["share"]["models"]:
        for stage, size in SHARES.items():
            paper, rest = (paper_shares(evidence, stage, model, off) for off in (False, True))
            fair = schedule_shares(evidence, model) if stage == "controls" else {}
            least = min(lengths_of("share")) / lengths_of("controls")[0]
            if paper:
                rows.append([f"{model}, {size}", share_cell(paper), share_cell(fair, least), share_cell(rest)])
    return Table.plain(["", "(a) running loss", "(b) full decay", "(c) exit updates taken off"], rows)


def scale_text(evidence: Evidence) -> str:
    """tupe_a_tie_cls beside the best of the planned scale controls, at tiny size."""
    finals = evidence.finals("controls")
    differences = {name: paired(finals, "tupe_a_tie_cls", name) for name in CLAIMS["scale_controls"]}
    if None in differences.values():
        return ""
    best = max(differences, key=lambda name: differences[name].mean)
    return (
        f"`tupe_a_tie_cls` minus `{best}`, the better of the planned controls of scale: "
        f"{of_contrast(differences[best])} bits. No such control has run at mini size.\n"
    )


def at_both_rates(evidence: Evidence) -> dict[str, str]:
    """{stage: title} of the main stage and of that at one rate, if they are complete."""
    titles = {"main": "main stage", "slower": "one rate"}
    return {stage: title for stage, title in titles.items() if is_complete(evidence, stage)}


def sensitivity_table(evidence: Evidence) -> Table:
    """Corrected p-values of the five contrasts by other tests than the protocol's."""
    rows, tests = [], {}
    for stage, title in at_both_rates(evidence).items():
        tests = evidence.sensitivity(stage)
        cells = zip(*(["" if p is None else f"{p:.2g}" for p in ps] for ps in tests.values()), strict=True)
        names = [f"{result.a} - {result.b}" for result in evidence.judged(stage)]
        rows += [[f"{name}, {title}", *row] for name, row in zip(names, cells, strict=True)]
    return Table.plain(["contrast", *tests], rows)


def after_exit_table(evidence: Evidence) -> Table:
    """What is left of each model's distance from BERT-A when both are as many updates past their exits."""
    header, rows = ["minus BERT-A's"], defaultdict(list)
    for stage, title in at_both_rates(evidence).items():
        (losses, n), finals = after_exit(evidence, stage), evidence.finals(stage)
        header += [f"{title}: {n or 0:,} updates after exit", "final loss", "left"]
        for model in finals:
            after, final = paired(losses, model, "bert_a"), paired(finals, model, "bert_a")
            if model != "bert_a" and after and final:
                rows[model] += [of_contrast(after), of_contrast(final), f"{100 * after.mean / final.mean:.0f} %"]
    whole = [[model, *cells] for model, cells in rows.items() if len(cells) == len(header) - 1]
    return Table.plain(header, whole)


def change_rows(evidence: Evidence, stage: str) -> list[list[str]]:
    """What was changed, names, difference of final losses, and where its interval lies."""
    finals, rows = evidence.finals(stage), []
    for entry in CLAIMS["changes"]:
        one = paired(finals, *entry["models"])
        if one is not None:
            names = " - ".join(f"`{name}`" for name in entry["models"])
            rows.append([entry["change"], names, of_contrast(one), side(one)])
    return rows


def side(one: Contrast) -> str:
    """Where an interval lies."""
    if one.interval is None:
        return "too few seeds"
    return "below 0" if one.interval[1] < 0 else "above 0" if one.interval[0] > 0 else "includes 0"


def exploratory_table(evidence: Evidence, stage: str) -> Table:
    """Of a stage: means over pre-training seeds with 95 % intervals. What was not measured has no column."""
    of_stage = functools.partial(evidence.by_seed, stage)
    since_exit, n = after_exit(evidence, stage)
    columns = {
        "order preferred, %": (of_stage(evidence.final_measure("order", "accuracy")), percent),
        "margin, nats": (
            of_stage(evidence.final_measure("order", "margin")), functools.partial(with_interval, digits=2)
        ),
        "BLiMP, %": (of_stage(lambda t: evidence.pairs_accuracy(t, t.updates, False)), percent),
        "only order, %": (of_stage(lambda t: evidence.pairs_accuracy(t, t.updates, True)), percent),
        f"training loss {n or 0:,} updates after exit": (since_exit, with_interval),
        "training loss at equal time": (equal_time(evidence, stage) if stage == "main" else {}, with_interval),
        "[CLS] to first 8 / uniform": (of_stage(functools.partial(cls_mean, evidence)), geometric),
    }  # fmt: skip
    columns = {title + only_seed(column[0]): column for title, column in columns.items() if column[0]}
    rows = [
        [model, *(show(values[model].values()) if model in values else "" for values, show in columns.values())]
        for model in evidence.finals(stage)
    ]
    return Table.plain(["model", *columns], rows)


def only_seed(values: dict[str, Seeds]) -> str:
    """Return " (seed 1)" where all that was measured has one seed."""
    seeds = seeds_of(values)
    return f" (seed {seeds[0]})" if len(seeds) == 1 else ""


def cls_mean(evidence: Evidence, trial: Trial) -> float | None:
    ratios = [float(row["value"]) for row in evidence.measures(trial, "cls attention")]
    return float(np.mean(ratios)) if ratios else None


def text_error(evidence: Evidence) -> str:
    """The largest standard error that the choice of the held-out text gives to a loss of the main stage."""
    errors = [float(error) for trial in evidence.trials("main") if (error := evidence.runs[trial].get("loss_error"))]
    if not errors:
        return ""
    return (
        f"The choice of the held-out text gives each loss a further standard error of at most {max(errors):.3f} "
        "(bootstrap over blocks); it is largely shared, so differences have less of it.\n"
    )


def parts_table(evidence: Evidence) -> Table:
    """Losses of the main stage by position and by length, means over seeds and half the width of their 95 %
    t-intervals; a model without all seeds says so."""
    values, counts = defaultdict(lambda: defaultdict(list)), Counter()
    for trial in evidence.trials("main"):
        counts[trial.model] += 1
        for kind in ("position", "length"):
            for row in evidence.measures(trial, f"loss by {kind}"):
                if int(row["count"]) >= 500:  # masked tokens; fewer say little
                    values[trial.model][kind, row["part"]].append(float(row["value"]))
    parts = sorted(
        {part for by_part in values.values() for part in by_part},
        key=lambda part: (part[0] == "length", int(part[1].split("-")[0])),
    )
    rows = [
        [
            model + f" ({counts[model]} of {max(counts.values())} seeds)" * (counts[model] < max(counts.values())),
            *(plus_minus(by_part[part], 2) if part in by_part else "" for part in parts),
        ]
        for model, by_part in values.items()
    ]
    return Table.plain(["model", *(f"{kind} {part}" for kind, part in parts)], rows)


def pair_errors(evidence: Evidence) -> str:
    """Standard errors of the accuracies of minimal pairs, over pairs and over paradigms, largest of all models."""
    scores = defaultdict(list)
    for trial in evidence.trials("main"):
        for only_order in (False, True) if evidence.are_scored(trial, trial.updates) else ():
            if credits := evidence.credits(trial, trial.updates, only_order):
                scores[only_order].append(macro_average(credits))
    if not scores:
        return "Minimal pairs have not been scored yet."
    all_pairs, order = (100 * np.max(scores[only_order], axis=0)[1:] for only_order in (False, True))
    text = (
        f"Standard errors of one model's accuracy, at most: all pairs {all_pairs[0]:.1f} over pairs and "
        f"{all_pairs[1]:.1f} over paradigms, only order {order[0]:.1f} and {order[1]:.1f} (bootstrap)."
    )
    if all(abs(mean - 0.5) < 2 * over_paradigms for mean, _, over_paradigms in scores[True]):
        text += " Where only order differs, every model is at chance (50 %, within two standard errors over paradigms)."
    return text


def summary(evidence: Evidence) -> str:
    """For the README: the five contrasts of the main stage, and what the tables say, in three sentences."""
    rows = [
        [result.claim, f"`{result.a}` - `{result.b}`", of_contrast(result.contrast, 2), verdicts(result, first)]
        for result, first in zip(evidence.judged("main"), evidence.judged("main", required=True), strict=True)
    ]
    header = ["what is added", "difference of two models", "bits [95 % interval]", "verdict"]
    one_rate = is_complete(evidence, "slower")
    if one_rate:
        header.append("at one rate")
        for row, result in zip(rows, evidence.judged("slower"), strict=True):
            row.append(f"{number(result.contrast and result.contrast.mean, 2)} {result.verdict}")
    counted, plan = evidence.trials("main"), CLAIMS["stages"]["main"]
    layers, width, *_ = SIZES[plan["size"]]
    what = (
        f"Masked-LM loss, negative is better; {plan['size']} models ({layers} layers, width {width}), "
        f"{max((trial.updates for trial in counted), default=plan['updates']):,} updates, "
        f"{len({trial.seed for trial in counted})} seeds. Verdicts are corrected for five tests (Holm)."
    )
    what += " The last column, exploratory, has one learning rate for all." * one_rate
    sentences = [text for f in (earlier, apart, longer_text) if (text := f(evidence))]
    table = Table.plain(header, rows, align="llrl" + "r" * one_rate).markdown()
    return f"{what}\n\n{table}\n{' '.join(sentences)}\n"


def earlier(evidence: Evidence) -> str:
    """The sentence on the first contrast, if it is confirmed and every exit is earlier than every one of BERT-A's."""
    exits = evidence.by_seed("main", evidence.exit)
    ours, theirs = ([*exits.get(model, {}).values()] for model in ("tupe_a_tie_cls", "bert_a"))
    if evidence.judged("main")[0].verdict != "confirmed" or not (ours and theirs and max(ours) < min(theirs)):
        return ""
    return (
        "With the positions kept apart from the words, a small model sooner leaves the plateau that all models start "
        f"on (after {min(ours):,.0f} to {max(ours):,.0f} updates; BERT-A after {min(theirs):,.0f} to "
        f"{max(theirs):,.0f}), and ends a short training at a lower loss."
    )


def apart(evidence: Evidence) -> str:
    """The sentence on what drops the terms of words and positions together and changes nothing else, if it does not
    lower the loss."""
    pairs = [paired(evidence.finals(stage), "tupe_a_tie_cls", "bert_a_d") for stage in ("slower", "main")]
    if any(one is None or one.interval is None or one.interval[1] < 0 for one in pairs):
        return ""
    return (
        "Six things differ between the two models; dropping the terms of words and positions together, by itself, "
        f"shows no gain ({of_contrast(pairs[0], 2)} bits at one rate), as in the paper's own Table 1."
    )


def longer_text(evidence: Evidence) -> str:
    """The sentence on the stage `longer`, once all its runs have finished, if less than half of TUPE-A's lead is left
    with each seed."""
    plan = CLAIMS["stages"]["longer"]
    short, long = (paired(evidence.finals(stage), "tupe_a", "bert_a") for stage in ("controls", "longer"))
    if long is None or short is None or not set(plan["seeds"]) <= set(long.differences) & set(short.differences):
        return ""
    if any(abs(long.differences[seed]) > abs(short.differences[seed]) / 2 for seed in plan["seeds"]):
        return ""

    def of_seeds(one):
        return " and ".join(number(one.differences[seed], 2) for seed in plan["seeds"])

    times = plan["updates"] // lengths_of("controls")[0]
    return (
        f"Most of the difference is gone after {times} times the training (TUPE-A - BERT-A, {plan['size']}, "
        f"{len(plan['seeds'])} seeds: {of_seeds(short)} bits, then {of_seeds(long)}); GLUE, which the paper measures, "
        "is not tested."
    )


def verdicts(result: Judged, first: Judged) -> str:
    """A verdict, and that of the seeds which are required where it was another one."""
    seeds = f" ({CLAIMS['required_seeds']} seeds: {first.verdict})"
    return result.verdict + seeds * (first.verdict != result.verdict)


def coverage(evidence: Evidence) -> str:
    """What has run, of what is planned, and in which precision."""
    parts = []
    for stage, plan in CLAIMS["stages"].items():
        all_planned = trials(stage, dict.fromkeys(CLAIMS["models"], 0.0))  # at whatever rate
        finished = [trial for trial in evidence.runs if trial.stage == stage]
        planned = [
            trial
            for trial in finished
            if trial.seed in plan["seeds"] and trial.updates in lengths_of(stage) and evidence.has_planned_rate(trial)
        ]
        more = f" and {len(finished) - len(planned)} more" if len(finished) > len(planned) else ""
        used = {evidence.runs[trial]["precision"] for trial in finished} - {""}
        precision = f" ({', '.join(sorted(used))})" if used else ""
        parts.append(f"{stage} {len(planned)} of {len(all_planned)}{more}{precision}")
    failed = "".join(f" Failed: `{trial}` ({reason})." for trial, reason in evidence.failed.items())
    return f"Finished runs: {'; '.join(parts)}.{failed}"
