"""What the runs of a plan show: the numbers that follow from their compressed tables (`collect`) and from nothing else.

docs/protocol.md says how each number is computed. Losses are in bits per masked token.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable

import numpy as np

from tupe.common.record import DIVERGENCE
from tupe.experiments.statistics import Seeds, first_below

from .plan import PLAN, Trial, best_rates

Measure = Callable[[Trial], float | None]


class Evidence:
    """Tables of `collect`, by run.

    Raises ValueError without a finished run, if runs had different data, or if those of one seed that are to be
    compared have different precisions."""

    def __init__(self, tables: dict[str, list[dict]]):
        self.tables, self.models = tables, list(PLAN["models"])
        facts = {Trial.parse(row["run"]): row for row in self.tables["runs"]}
        facts = {trial: row for trial, row in facts.items() if trial.model in self.models}
        self.runs = {trial: row for trial, row in facts.items() if row["state"] == "finished" and row["loss"]}
        self.failed = {trial: row["reason"] for trial, row in facts.items() if row["state"] == "failed"}
        self.diverged = {trial for trial, reason in self.failed.items() if reason.startswith(DIVERGENCE)}
        if not self.runs:
            raise ValueError("no table of finished runs; `python -m lab claims --runs DIR` adds them")
        if len(prints := {row["data"] for row in self.runs.values()} - {""}) > 1:
            raise ValueError(f"runs on different data do not compare (fingerprints {', '.join(sorted(prints))})")
        blocks = defaultdict(set)
        for stage in PLAN["stages"]:
            for trial in self.runs:
                if is_of(trial, stage):
                    blocks[stage, trial.seed] |= {self.runs[trial]["precision"]} - {""}
        for (stage, seed), precisions in blocks.items():
            if len(precisions) > 1 and stage != "pilot":
                raise ValueError(
                    f"stage {stage}, seed {seed}: {' and '.join(sorted(precisions))}: a block has one precision"
                )

    @functools.cached_property
    def rows(self) -> dict[str, dict[str, list[dict]]]:
        """{table: {run: rows}}."""
        grouped = {name: defaultdict(list) for name in self.tables}
        for name, rows in self.tables.items():
            for row in rows if name != "paradigms" else ():
                grouped[name][row["run"]].append(row)
        return grouped

    def trials(self, stage: str) -> list[Trial]:
        """Finished runs of a stage that count: at the rate that follows from the pilot, where it is known. It may have
        been another one when a run began, before all of the pilot had run. Stages that compare rates have all."""
        free = stage in ("pilot", "rates")
        mine = [trial for trial in self.runs if is_of(trial, stage) and (free or self.has_planned_rate(trial))]
        return sorted(mine, key=lambda trial: (self.models.index(trial.model), trial.lr, trial.seed))

    @functools.cached_property
    def best_rates(self) -> dict[str, float]:
        """{model: learning rate of its lowest loss in the pilot}, see `plan.best_rates`."""
        losses = {trial: self.loss(trial) for trial in self.runs} | dict.fromkeys(self.diverged, math.inf)
        return best_rates(losses)[0]

    def has_planned_rate(self, trial: Trial) -> bool:
        """Whether the plan names the rate of a run, as far as that is known before the pilot is over."""
        plan = PLAN["stages"].get(trial.stage, {})
        if trial.stage == "pilot":
            rates = PLAN["learning_rates"]
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
        own = PLAN["stages"].get(stage, {}).get("lr")
        by_rate = self.by_rate(stage if own else "pilot").get("nopos", {})
        is_known = own in by_rate if own else "nopos" in self.best_rates
        lowest = min(by_rate.values()) if is_known else math.inf
        return lowest - PLAN["threshold"] if math.isfinite(lowest) else None

    def exit(self, trial: Trial) -> float | None:
        """The update at which the model leaves the plateau; None: it never does, or the threshold is unknown."""
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

    def measures(self, trial: Trial, measure: str) -> list[dict]:
        return [row for row in self.rows["measures"][str(trial)] if row["measure"] == measure]

    def final_measure(self, measure: str, part: str) -> Measure:
        """A function from a trial to a number, None where it was not measured."""

        def value(trial):
            return next((float(row["value"]) for row in self.measures(trial, measure) if row["part"] == part), None)

        return value


def is_of(trial: Trial, stage: str) -> bool:
    """Whether a run takes part in a stage: its own, or one that includes it."""
    plan = PLAN["stages"].get(stage, {})
    included = trial.model in plan.get("includes", {}).get(trial.stage, ()) and trial.seed in plan["seeds"]
    return trial.stage == stage or included


def worst_minus_best(losses: dict[float, float]) -> float | None:
    """How much the choice among the pilot's planned learning rates matters; None unless all of them have run.
    losses: {learning rate: mean final loss}, with math.inf where training diverged."""
    planned = [losses.get(lr) for lr in PLAN["learning_rates"]]
    return None if None in planned else max(planned) - min(planned)
