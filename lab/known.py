"""What the committed tables in docs/evidence know of the runs of both finished experiments, and of the third."""

import functools
import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tupe.run import record

from . import collect
from .estimates import Seeds, first_below
from .plan import LATER, PLAN, Trial, final_losses, lengths_of, planned_models, precision, trials

FIRST = Path(__file__).parents[1] / "docs/evidence"  # tables of the first experiment
TABLES = FIRST / "second"  # of the second and the third

ByRun = dict[tuple[Trial, str], Any]  # (trial, precision) -> something of that run
Curve = tuple[list[int], list[float]]  # updates, losses


def step_ratios() -> dict[int, dict[str, np.ndarray]]:
    """{length: {encoding, as the benchmark labels it: time of a step over that without positions, of each turn}}"""
    found = {}
    for length, at in json.loads((FIRST.parent / "scheme_cost.json").read_text(encoding="utf-8"))["lengths"].items():
        seconds = {row["encoding"]: np.array(row["seconds"]) for row in at["rows"]}
        found[int(length)] = {label: times / seconds["nopos"] for label, times in seconds.items()}
    return found


def ended(rows: Iterable[dict]) -> ByRun:
    """{(trial, precision): final loss} of the runs in a table, infinite for one that diverged."""
    losses = {}
    for row in rows:
        if row["loss"] or row["reason"].startswith(record.DIVERGENCE):
            losses[Trial.parse(row["run"]), row["precision"]] = float(row["loss"] or "inf")
    return losses


def adopted(runs: ByRun) -> dict[Trial, Any]:
    """The same by trial of the later protocols, of runs of other stages that count for one of theirs."""
    found = {}
    for stage, plan in LATER["stages"].items():
        for (trial, of), value in runs.items():
            own = replace(trial, stage=stage)
            same = trial.size == plan["size"] and trial.updates in lengths_of(plan) and of == precision(own)
            if same and trial.seed in plan["seeds"] and trial.stage in plan.get("counts", ()):
                found[own] = value
    return found


def losses_in(first: Iterable[dict], later: Iterable[dict]) -> dict[Trial, float]:
    """{trial: final loss} of all runs that count, of the tables of runs of the first experiment and of the later ones.
    A run of a later one in another precision than planned does not."""
    old, new = ended(first), ended(later)
    own = {trial: loss for (trial, of), loss in new.items() if of in (precision(trial), "")}  # "": it diverged
    return {trial: loss for (trial, _), loss in old.items()} | adopted(old | new) | own


def known_losses(output: Path) -> dict[Trial, float]:
    """The same of the committed tables and of a folder of runs."""
    return losses_in(*(collect.read(folder)["runs"] for folder in (FIRST, TABLES))) | final_losses(output)


class Runs:
    """What tables hold: `losses` and `curves` by trial, and `rows` of each table.

    tables: the folder of those of the later experiments."""

    def __init__(self, tables: Path = TABLES):
        first, later = collect.read(FIRST), collect.read(tables)
        self.rows = {name: first[name] + later[name] for name in first}
        self.losses = losses_in(first["runs"], later["runs"])
        self.curves = self.curves_of("training")

    def curves_of(self, table: str) -> dict[Trial, Curve]:
        """{trial: its curve}; table: "training" (means over 50 updates) or "validation"."""
        curves = defaultdict(lambda: ([], []))
        for row in self.rows[table]:
            updates, losses = curves[Trial.parse(row["run"])]
            updates.append(int(row["updates"]))
            losses.append(float(row["loss"]))
        precisions = {Trial.parse(row["run"]): row["precision"] for row in self.rows["runs"]}
        return curves | adopted({(trial, precisions[trial]): curve for trial, curve in curves.items()})

    @functools.cached_property
    def threshold(self) -> float:
        """The training loss below which a model has left the plateau: the first protocol's, of its pilot."""
        nopos = [loss for trial, loss in self.losses.items() if (trial.stage, trial.model) == ("pilot", "nopos")]
        return min(nopos) - PLAN["threshold"]

    def exit(self, trial: Trial) -> float | None:
        """The update at which a run leaves the plateau."""
        return first_below(*self.curves[trial], self.threshold)

    def planned(self, stage: str, updates: int | None = None) -> list[Trial]:
        """Trials of a stage, at the rates of its plan, and those of other stages that it includes; updates: of this
        length only."""
        protocol = PLAN if stage in PLAN["stages"] else LATER
        found, plan = trials(stage, self.losses, protocol), protocol["stages"][stage]
        for other, models in plan.get("includes", {}).items():
            found += [t for t in trials(other, self.losses, protocol, models) if t.seed in plan["seeds"]]
        return [trial for trial in found if updates in (None, trial.updates)]

    def is_complete(self, stage: str) -> bool:
        """Whether every model of a stage has its rate, and every run has ended."""
        planned, models = self.planned(stage), set(planned_models(stage, LATER))
        return {t.model for t in planned} == models and all(t in self.losses for t in planned)

    def finals(self, *stages: str, updates: int | None = None) -> dict[str, Seeds]:
        """{model: {seed: final loss}} of the runs that have one."""
        found = defaultdict(dict)
        for stage in stages:
            for trial in self.planned(stage, updates):
                if math.isfinite(self.losses.get(trial, math.inf)):
                    found[trial.model][trial.seed] = self.losses[trial]
        return dict(found)
