"""The tables and sentences of docs/results.md and the README on TUPE's claims: how the numbers of `claims` are
shown."""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np

from ..architectures import SIZES
from ..evaluation.minimal_pairs import macro_average
from ..tables import Table
from .claims import (
    Evidence,
    Judged,
    Seeds,
    after_exit,
    compared_models,
    equal_time,
    is_complete,
    late,
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
    return "" if value is None else f"{value:z.{digits}f}"  # z: no minus before a zero


def with_interval(values: Iterable[float], digits: int = 3) -> str:
    """ "6.123 [6.100, 6.146]": mean and 95 % t-interval; the mean alone of a single value."""
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
    return "" if one is None else with_interval(one.differences.values(), digits)


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
    each control changes (its architecture); a stage: from the same model there."""
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
        cells = [number(losses.get(seed)) for seed in seeds]
        rows.append([model, *cells, with_interval(losses.values()), *change, ", ".join(left)])
    header = ["model", *(f"seed {seed}" for seed in seeds), "mean [95 % interval]"]
    return Table.plain([*header, *title, "exit updates"], rows)


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
    verdict = "open until larger models have run" if first == "not run" else first
    verdict = verdict if first != "confirmed" or below else "not resolved"
    return (
        f"`tupe_a_tie_cls` minus `{best}`, the best scale control, at tiny size: {of_contrast(one)} bits "
        f"({'below' if below else 'not below'} 0 with its interval; exploratory). **That untying itself helps: "
        f"{verdict}.**"
    )


def provisional(evidence: Evidence) -> str:
    """What keeps the verdicts of the main stage from being final; "" if nothing does."""
    if evidence.threshold("main") is None:
        reason = "whether all left the plateau by half of their updates is known once the pilot of `nopos` has run"
    elif names := late(evidence, "main"):
        reason = f"{', '.join(names)} had not left the plateau by half of the updates, so all models get twice as many"
    else:
        return ""
    return f"The verdicts are provisional: {reason}."


def change_rows(evidence: Evidence, stage: str) -> list[list[str]]:
    """What was changed, names, difference of final losses, and whether its interval is below or above 0."""
    finals, rows = evidence.finals(stage), []
    for entry in CLAIMS["changes"]:
        one = paired(finals, *entry["models"])
        if one is not None and one.interval is not None:
            low, high = one.interval
            result = "lower" if high < 0 else "higher" if low > 0 else "not resolved"
            names = " - ".join(f"`{name}`" for name in entry["models"])
            rows.append([entry["change"], names, of_contrast(one), result])
    return rows


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
    errors = defaultdict(list)
    for trial in evidence.trials("main"):
        for only_order in (False, True) if evidence.are_scored(trial, trial.updates) else ():
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
        [result.claim, f"`{result.a}` - `{result.b}`", of_contrast(result.contrast), verdicts(result, first)]
        for result, first in zip(results, evidence.judged(stage, required=True), strict=True)
    ]
    header = ["claim", "difference of final losses, bits", "mean [95 % interval]", "result"]
    changes = change_rows(evidence, stage) if stage != "main" else []  # verdicts alone, once there are any
    one_rate = stage == "main" and is_complete(evidence, "slower")
    if one_rate:
        header.append("at one learning rate (exploratory)")
        for row, result in zip(rows, evidence.judged("slower"), strict=True):
            row.append(f"{of_contrast(result.contrast)} {result.verdict}")
    table = Table.plain(header, rows + changes, align="llrl" + "r" * one_rate)
    counted = evidence.trials(stage)
    seeds, updates = len({trial.seed for trial in counted}), max((trial.updates for trial in counted), default=0)
    layers, width, *_ = SIZES[plan["size"]]
    what = (
        f"{plan['size']} models ({layers} layers, width {width}), {updates or plan['updates']:,} updates, {seeds} "
        "seeds, differences paired by seed"
    )
    needed = CLAIMS["required_seeds"] * len(compared_models())
    others = f" The rows after the first {len(results)} are exploratory and not corrected for their number."
    undecided = (
        f"**No claim is decided yet**: that takes the {needed} runs of the main stage, of which "
        f"{len(evidence.blocks('main')) * len(compared_models())} count so far."
    )
    told = {
        "main": f"Evidence: {what}. Confirmed: significant after correction for five contrasts (Holm).",
        "controls": f"{undecided} So far: {what}, each at its best learning rate as far as that is known.",
        "first": f"{undecided} A first look only: {what}, one learning rate for all. It shows who learns faster "
        "**early**, not who is better in the end.",
    }
    legend = "Negative: the first model has the lower loss."
    legend += " *Lower* and *higher*: significant (Holm)." * (stage != "main") + others * bool(changes)
    scale = f"{scale_text(evidence)} {provisional(evidence)}".strip() if stage == "main" else ""
    shares, rest = ({} if stage == "first" else paper_shares(evidence, stage, "tupe_r", off) for off in (False, True))
    share = (
        f"TUPE-R's running loss is BERT-A's final one after {share_cell(shares)} of the updates, as the paper counts, "
        "which found about 30 %."
    ) * bool(shares)
    if rest and not any(map(math.isnan, rest.values())):
        share += f" Without the updates before each left the plateau: {share_cell(rest)}."
    if one_rate:
        share += f" At one learning rate: {share_cell(paper_shares(evidence, 'slower', 'tupe_r'))}."
    after = " ".join(text for text in (scale, share, longer_text(evidence)) if text)
    return f"{told[stage]} {legend}\n\n{table.markdown()}\n{after}\n"


def longer_text(evidence: Evidence) -> str:
    """Final losses and share of updates of the stage `longer`; "" before all its runs have finished."""
    plan, finals = CLAIMS["stages"]["longer"], evidence.finals("longer")
    if any(set(plan["seeds"]) - set(finals.get(model, ())) for model in plan["models"]):
        return ""
    means = {model: float(np.mean(list(finals[model].values()))) for model in plan["models"]}
    losses = ", ".join(f"`{model}` {number(mean, 2)}" for model, mean in means.items())
    return (
        f"After {plan['updates']:,} updates ({plan['size']}, {len(plan['seeds'])} seeds, exploratory): {losses} bits; "
        f"TUPE-R reaches BERT-A's loss after {share_cell(paper_shares(evidence, 'longer', 'tupe_r'))} of the updates."
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
