"""What the experiment on TUPE's claims says: the numbers of docs/results.md, computed from the compressed tables
in docs/evidence (`tupe.experiments.collect`) and from nothing else.

docs/reproduction.md says how each number is computed. Losses are in bits per masked token.
"""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..common.record import DIVERGENCE
from ..evaluation.minimal_pairs import MINIMUM
from . import collect
from .plan import BITS, CLAIMS, Trial, best_rates, lengths_of, untried, with_models
from .statistics import (
    Contrast,
    Seeds,
    contrast,
    first_below,
    holm,
    pooled,
    share_of_schedule,
    share_of_updates,
    welch,
)

CREDITS = {letter: value for value, letter in collect.LETTERS.items()}
ALPHA = 0.05  # of the corrected p-values
PAIRED, WELCH, POOLED = "paired t, the protocol's", "Welch", "pooled variance"
OTHER_SAMPLE = "paired t, other held-out sample"
Measure = Callable[[Trial], float | None]


class Evidence:
    """Tables of `collect`, by run. own: models beside the plan's, whose runs count too (see `plan.with_models`).

    Raises ValueError if there is no finished run, if runs had different data, or if those of one seed that are to be
    compared have different precisions."""

    def __init__(self, tables: dict[str, list[dict]], own: dict | None = None):
        self.tables, self.own = tables, own or {}
        self.models = [*with_models(own)["models"]]
        facts = {Trial.parse(row["run"]): row for row in self.tables["runs"]}
        facts = {trial: row for trial, row in facts.items() if trial.model in self.models}
        self.runs = {trial: row for trial, row in facts.items() if row["state"] == "finished" and row["loss"]}
        self.failed = {trial: row["reason"] for trial, row in facts.items() if row["state"] == "failed"}
        self.diverged = {trial for trial, reason in self.failed.items() if reason.startswith(DIVERGENCE)}
        if not self.runs:
            raise ValueError("there is no table of finished runs; `tupe claims --runs DIR` adds them")
        if len(prints := {row["data"] for row in self.runs.values()} - {""}) > 1:
            raise ValueError(f"runs on different data do not compare (fingerprints {', '.join(sorted(prints))})")
        for block, precisions in self.precisions().items():
            if len(precisions) > 1 and block[0] != "pilot":
                raise ValueError(
                    f"stage {block[0]}, seed {block[1]}: {' and '.join(sorted(precisions))}: a block has one precision"
                )

    def precisions(self) -> dict[tuple[str, int], set[str]]:
        """{(stage, seed): precisions of its finished runs}."""
        blocks = defaultdict(set)
        for stage in CLAIMS["stages"]:
            for trial in self.runs:
                if is_of(trial, stage):
                    blocks[stage, trial.seed] |= {self.runs[trial]["precision"]} - {""}
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
        """Finished runs of a stage that count: at the rate that follows from the pilot, where it is known. Of the main
        stage, those of the `blocks`; of the first look, those of models with all of its seeds."""
        mine = [trial for trial in self.runs if is_of(trial, stage) and self.has_its_rate(trial)]
        if stage == "main":
            blocks = self.blocks(stage)
            mine = [trial for trial in mine if (trial.updates, trial.seed) in blocks]
        elif stage == "first":
            planned = set(CLAIMS["stages"]["first"]["seeds"])
            seeds = groups(self.over(stage), lambda trial: trial.model, lambda trial: trial.seed)
            mine = [trial for trial in mine if trial.seed in planned and seeds[trial.model] >= planned]
        return sorted(mine, key=lambda trial: (self.models.index(trial.model), trial.lr, trial.seed))

    def over(self, stage: str) -> list[Trial]:
        """Runs of a stage, at the rate that counts, that have ended: one that diverged has, too."""
        return [trial for trial in {*self.runs, *self.diverged} if is_of(trial, stage) and self.has_its_rate(trial)]

    def blocks(self, stage: str) -> set[tuple[int, int]]:
        """{(updates, seed)} of whole blocks, all models of the contrasts with one seed: of the longest training that
        has as many as are required, or else of the one with most. More than are required count once all that are
        planned have run, so that nobody stops where it looks best."""
        models = groups(self.over(stage), lambda trial: (trial.updates, trial.seed), lambda trial: trial.model)
        whole = [block for block, names in models.items() if names >= compared_models()]
        counts, enough = Counter(updates for updates, _ in whole), CLAIMS["required_seeds"]
        length = max(counts, key=lambda n: (min(counts[n], enough), n if counts[n] >= enough else -n), default=0)
        planned = [seed for seed in CLAIMS["stages"][stage]["seeds"] if (length, seed) in whole]
        all_of_them = len(planned) == len(CLAIMS["stages"][stage]["seeds"])
        return {(length, seed) for seed in (planned if all_of_them else planned[:enough])}

    @functools.cached_property
    def best_rates(self) -> dict[str, float]:
        """{model: learning rate of its lowest loss in the pilot}, where half and twice of it have run, too."""
        losses = {trial: self.loss(trial) for trial in self.runs} | dict.fromkeys(self.diverged, math.inf)
        return best_rates(losses, self.own)[0]

    def has_its_rate(self, trial: Trial) -> bool:
        """Whether the rate of a run is what the plan makes of the pilot's; it may have been another one when the run
        began, before all of the pilot had run. Stages that compare rates have all."""
        return trial.stage in ("pilot", "rates") or self.has_planned_rate(trial)

    def has_planned_rate(self, trial: Trial) -> bool:
        """Whether the plan names the rate of a run, as far as that is known before the pilot is over."""
        plan = CLAIMS["stages"].get(trial.stage, {})
        if trial.stage == "pilot":
            rates = CLAIMS["learning_rates"]
        elif "lr" in plan:
            rates = [plan["lr"]]
        elif not plan or trial.model not in self.best_rates:
            return True
        else:
            rates = [share * self.best_rates[trial.model] for share in plan.get("shares", [1])]
        return any(math.isclose(trial.lr, rate) for rate in rates)

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
        is_known = own in by_rate if own else by_rate and not untried(by_rate)
        lowest = min(by_rate.values()) if is_known else math.inf
        return lowest - CLAIMS["threshold"] if math.isfinite(lowest) else None

    def exit(self, trial: Trial) -> float | None:
        """The update at which the model leaves the plateau; None: it never does, or there is no threshold."""
        threshold = self.threshold(trial.stage)
        return None if threshold is None else first_below(*self.curve(trial), threshold)

    def by_rate(self, stage: str) -> dict[str, dict[float, float]]:
        """{model: {learning rate: mean final loss}} of a stage; math.inf at a rate where a run diverged."""
        losses = defaultdict(lambda: defaultdict(list))
        for trial in self.trials(stage):
            losses[trial.model][trial.lr].append(self.loss(trial))
        for trial in self.diverged:
            if trial.stage == stage:
                losses[trial.model][trial.lr].append(math.inf)
        return {model: {lr: float(np.mean(values)) for lr, values in by_lr.items()} for model, by_lr in losses.items()}

    def judged(self, stage: str, required: bool = False) -> list["Judged"]:
        """The contrasts of the plan, of the final losses of a stage. required: of the first seeds, as many as are. Of
        an exploratory stage, one is *lower* or *higher* only if Welch's test and the other held-out sample agree."""
        finals = self.finals(stage)
        if required:
            seeds = CLAIMS["stages"][stage]["seeds"][: CLAIMS["required_seeds"]]
            finals = {model: {n: loss for n, loss in losses.items() if n in seeds} for model, losses in finals.items()}
        results = judged(finals, exploratory=stage != "main")
        if stage == "main":
            return results
        tests = self.sensitivity(stage)
        others = zip(tests[WELCH], tests[OTHER_SAMPLE], strict=True)
        agree = [all(p is not None and p <= ALPHA for p in ps) for ps in others]
        return [replace(result, robust=robust) for result, robust in zip(results, agree, strict=True)]

    def sensitivity(self, stage: str) -> dict[str, list[float | None]]:
        """{test: p-value of each contrast, corrected by Holm}: what would become of the protocol's p-values."""
        finals, other = self.finals(stage), self.by_seed(stage, self.validation_loss)
        pairs = [entry["models"] for entry in CLAIMS["contrasts"]]
        models = [finals[model] for model in sorted(compared_models()) if model in finals]

        def of(test, losses):
            return corrected([test(losses.get(a, {}), losses.get(b, {})) for a, b in pairs])

        return {
            PAIRED: of(paired_p, finals), WELCH: of(welch, finals),
            POOLED: of(functools.partial(pooled, groups=models), finals), OTHER_SAMPLE: of(paired_p, other),
        }  # fmt: skip

    def validation_loss(self, trial: Trial) -> float | None:
        """The final loss on the other held-out sample, which training uses."""
        text = self.runs[trial].get("validation_loss")
        return float(text) if text else None

    def block_losses(self, trial: Trial) -> tuple[np.ndarray, np.ndarray] | None:
        """(summed loss, masked tokens) of each held-out block, for `statistics.bootstrap`; None if not stored."""
        for row in self.rows["blocks"][str(trial)]:
            return BITS * np.array(row["nats"].split(), dtype=float), np.array(row["tokens"].split(), dtype=int)
        return None

    def measures(self, trial: Trial, measure: str) -> list[dict]:
        return [row for row in self.rows["measures"][str(trial)] if row["measure"] == measure]

    def final_measure(self, measure: str, part: str) -> Measure:
        """A function from a trial to a number, None where it was not measured."""

        def value(trial):
            return next((float(row["value"]) for row in self.measures(trial, measure) if row["part"] == part), None)

        return value

    def credits(self, trial: Trial, updates: int, only_order: bool) -> dict[str, np.ndarray]:
        """{paradigm: credit of each pair}; only_order: as `minimal_pairs.accuracies`."""
        flags = {row["paradigm"]: row for row in self.tables["paradigms"]}
        of_paradigm = {}
        for row in self.rows["pairs"][str(trial)]:
            if int(row["updates"]) != updates:
                continue
            values = np.array([CREDITS[letter] for letter in row["word"]])
            if only_order:
                same = flags[row["paradigm"]]
                pairs = zip(same["same_words"], same["same_pieces"], strict=True)
                values = values[np.array([words == "1" and pieces == "0" for words, pieces in pairs][: len(values)])]
            if len(values) >= (MINIMUM if only_order else 1):
                of_paradigm[row["paradigm"]] = values
        return of_paradigm

    def pairs_accuracy(self, trial: Trial, updates: int, only_order: bool) -> float | None:
        """Macro average over paradigms; None unless all have been scored."""
        credits = self.credits(trial, updates, only_order) if self.are_scored(trial, updates) else None
        return float(np.mean([values.mean() for values in credits.values()])) if credits else None

    def are_scored(self, trial: Trial, updates: int) -> bool:
        """Whether a run has minimal pairs of all paradigms."""
        scored = {row["paradigm"] for row in self.rows["pairs"][str(trial)] if int(row["updates"]) == updates}
        return bool(scored) and scored >= {row["paradigm"] for row in self.tables["paradigms"]}


def is_of(trial: Trial, stage: str) -> bool:
    """Whether a run takes part in a stage: its own, or one that includes it."""
    plan = CLAIMS["stages"].get(stage, {})
    included = trial.model in plan.get("includes", {}).get(trial.stage, ()) and trial.seed in plan["seeds"]
    return trial.stage == stage or (included and trial.updates in lengths_of(trial.stage))  # not `--twice`


def groups(items: Iterable, key: Callable, value: Callable) -> dict[Any, set]:
    """{key(item): {value(item), ..}}."""
    grouped = defaultdict(set)
    for item in items:
        grouped[key(item)].add(value(item))
    return grouped


def compared_models() -> set[str]:
    """The models of the contrasts."""
    return {model for entry in CLAIMS["contrasts"] for model in entry["models"]}


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
    robust: bool = True  # exploratory: other tests agree, see `Evidence.judged`

    @property
    def verdict(self) -> str:
        """ "confirmed", "refuted" (exploratory: "lower", "higher"), "not resolved", "too few seeds", or "not run"."""
        if self.contrast is None:
            return "not run"
        if self.p is None or (not self.exploratory and self.contrast.seeds < CLAIMS["required_seeds"]):
            return "too few seeds"
        if self.p > ALPHA or not self.robust:
            return "not resolved"
        lower, higher = ("lower", "higher") if self.exploratory else ("confirmed", "refuted")
        return lower if self.contrast.mean < 0 else higher


def judged(finals: dict[str, Seeds], exploratory: bool = False) -> list[Judged]:
    """The contrasts of claims.yaml. Holm corrects for all of them, also for those that cannot be computed yet."""
    plan = [(*entry["models"], entry["claim"]) for entry in CLAIMS["contrasts"]]
    computed = [paired(finals, a, b) for a, b, _ in plan]
    adjusted = corrected([one and one.p for one in computed])
    return [Judged(*entry, one, p, exploratory) for entry, one, p in zip(plan, computed, adjusted, strict=True)]


def corrected(p_values: list[float | None]) -> list[float | None]:
    """Corrected by Holm; None, which counts as 1, stays None."""
    adjusted = holm([1.0 if p is None else p for p in p_values])
    return [None if p is None else q for p, q in zip(p_values, adjusted, strict=True)]


def paired_p(a: Seeds, b: Seeds) -> float | None:
    """The p-value of `contrast`, None without a common seed."""
    return contrast(a, b).p if set(a) & set(b) else None


def worst_minus_best(losses: dict[float, float]) -> float | None:
    """How much the choice among the pilot's planned learning rates matters; None unless all of them have run.
    losses: {learning rate: mean final loss}, with math.inf where training diverged."""
    planned = [losses.get(lr) for lr in CLAIMS["learning_rates"]]
    return None if None in planned else max(planned) - min(planned)


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
    trials, shares = evidence.trials("share"), {}
    bert = {trial.seed: trial for trial in trials if trial.model == "bert_a"}
    for seed, trial in bert.items():
        finals = {t.updates / trial.updates: evidence.loss(t) for t in trials if (t.model, t.seed) == (model, seed)}
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
    """{model: {seed: training loss when a run of the quickest model ended}}: by the seconds per update that are the
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


# --------------------------------------------------------------------------------------------- how far a stage has come


def stages_to_show(evidence: Evidence) -> list[str]:
    """The stages that the contrasts are shown of: those that are complete, or before any is the first look."""
    return [stage for stage in ("main", "slower", "controls") if is_complete(evidence, stage)] or ["first"]


def is_complete(evidence: Evidence, stage: str) -> bool:
    """Whether as many blocks have run as are required."""
    return len(evidence.blocks(stage)) >= CLAIMS["required_seeds"]


def late(evidence: Evidence, stage: str) -> list[str]:
    """Runs of a stage that had not left the plateau by half of their updates (all models but `nopos`)."""
    runs = [trial for trial in evidence.trials(stage) if trial.model != "nopos"]
    exits = [(trial, evidence.exit(trial)) for trial in runs]
    return sorted({trial.model for trial, update in exits if update is None or update > trial.updates / 2})
