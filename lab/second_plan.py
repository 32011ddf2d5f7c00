"""The plan of the second protocol (docs/second-protocol.md): what second.yaml says, and which runs of the committed
tables count for it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tupe.common import record

from . import collect
from .plan import PLAN, Trial, final_losses, lengths_of

HERE = Path(__file__).parent
FIRST, TABLES = HERE.parent / "docs/evidence", HERE.parent / "docs/evidence/second"
PROTOCOL = yaml.safe_load((HERE / "second.yaml").read_text(encoding="utf-8"))
PROTOCOL["models"] |= PLAN["models"]
for model in PROTOCOL["models"].values():
    if "position-file" in model:
        model["position-file"] = str(HERE / model["position-file"])

ByRun = dict[tuple[Trial, str], Any]  # (trial, precision) -> something of that run


def precision(stage: str) -> str:
    """What a stage trains in, as the tables call it."""
    return collect.PRECISIONS[PROTOCOL["stages"][stage].get("autocast", PROTOCOL["autocast"])]


def cooldown_of(trial: Trial) -> int:
    """Updates of its cool-down, 0 if its stage has none."""
    return round(PROTOCOL["stages"][trial.stage].get("cooldown", 0) * trial.updates)


def known(tables: dict[str, list[dict]]) -> ByRun:
    """{(trial, precision): final loss} of the finished runs in tables, infinite for one that diverged."""
    losses = {}
    for row in tables["runs"]:
        if row["loss"] or row["reason"].startswith(record.DIVERGENCE):
            losses[Trial.parse(row["run"]), row["precision"]] = float(row["loss"] or "inf")
    return losses


def adopted(runs: ByRun) -> dict[Trial, Any]:
    """The same by trial of this protocol, of runs of other stages, in either protocol, that count for one of its."""
    found = {}
    for stage, plan in PROTOCOL["stages"].items():
        for (trial, of), value in runs.items():
            same = trial.size == plan["size"] and trial.updates in lengths_of(plan) and of == precision(stage)
            if same and trial.seed in plan["seeds"] and trial.stage in plan.get("counts", ()):
                found[replace(trial, stage=stage)] = value
    return found


def losses_in(first: dict[str, list[dict]], tables: dict[str, list[dict]]) -> dict[Trial, float]:
    """{trial: final loss} of all runs that count, of the first protocol's tables and of this one's."""
    mine = known(tables)
    own = {trial: loss for (trial, of), loss in mine.items() if of in (precision(trial.stage), "")}  # "": it diverged
    return adopted(known(first) | mine) | own


def known_losses(output: Path) -> dict[Trial, float]:
    """The same of the committed tables and of a folder of runs."""
    return losses_in(collect.read(FIRST), collect.read(TABLES)) | final_losses(output)
