"""What the experiment on TUPE's claims trains, as plan.yaml says: runs by stage, and the learning rates that follow
from the pilot."""

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from ..common import options, record
from ..common.architectures import with_size
from . import runner

PLAN = yaml.safe_load(Path(__file__).with_name("plan.yaml").read_text(encoding="utf-8"))
BITS = 1 / math.log(2)  # of a nat
# What a training may be given beyond its plan: where it runs, and in which precision. The rest is the protocol's.
FREE = (
    "--autocast", "model.autocast", "--position-file", "--gpus", "--cpu", "--micro-batch-size", "--num-workers",
    "--allocator", "--heartbeat-timeout", "--log-file", "--tensorboard-logdir", "--wandb-project",
)  # fmt: skip


def with_models(own: dict | None) -> dict:
    """PLAN with models beside the plan's, {name: {"arch", "position"}}: what is called `own` here and elsewhere."""
    return {**PLAN, "models": PLAN["models"] | (own or {})}


@dataclass(frozen=True)
class Trial:
    """One training of the experiment."""

    stage: str
    model: str
    size: str
    updates: int
    lr: float
    seed: int

    def __str__(self):
        return f"{self.stage}/{self.model}/{self.size}_{self.updates}_lr{self.lr:g}_seed{self.seed}"

    @classmethod
    def parse(cls, name: str) -> "Trial":
        """The inverse of `str`. Raises ValueError for another string."""
        match = re.fullmatch(r"(\w+)/([\w.]+)/([a-z]+)_(\d+)_lr([\d.e+-]+)_seed(\d+)", name)
        if not match:
            raise ValueError(f"{name!r} is no run of the experiment: STAGE/MODEL/SIZE_UPDATES_lrLR_seedSEED")
        stage, model, size, updates, lr, seed = match.groups()
        return cls(stage, model, size, int(updates), float(lr), int(seed))

    def folder(self, output: Path) -> Path:
        return output / str(self)

    def job(self, data: Path, output: Path, further: Sequence[str] = (), protocol: dict = PLAN) -> runner.Job:
        """The command that trains it. further: more words for it; protocol: what plan.yaml is for this one. Raises
        ValueError for a word that is not `FREE`."""
        for word in further:
            name = word.partition("=")[0]
            if name not in FREE and (word.startswith("--") or "=" in word):
                raise ValueError(f"{name}: the protocol of docs/reproduction.md fixes it; valid: {', '.join(FREE)}")
        model, plan = protocol["models"][self.model], protocol["stages"].get(self.stage, {})
        chosen = {f"--{name}": model[name] for name in ("position", "position-file", "cls") if name in model}
        words = {
            "--recipe": "pretrain_small", "--data": data, "--output": self.folder(output),
            "--arch": with_size(model["arch"], self.size), **chosen,
            "--lr": f"{self.lr:g}", "--max-update": self.updates, "--seed": self.seed,
            "--autocast": plan.get("autocast", protocol["autocast"]), "common.fp16": "false",  # which GPUs would take
            "--log-format": "json", "--log-interval": 50, "--num-workers": 1,
            "--long-sentences": "skip",  # as in the committed runs
        }  # fmt: skip
        name = f"{self.stage} {self.model} {self.size} lr {self.lr:g} seed {self.seed}"
        return runner.Job(name, self.folder(output), (*runner.tupe("pretrain", words), *further))


def trials(
    stage: str, best: dict[str, float], seeds: list[int] | None = None, models: list[str] | None = None,
    own: dict | None = None,
) -> list[Trial]:
    """What a stage trains, seed by seed (the pilot: rate by rate), so that a stage that is cut short has whole blocks.
    best: {model: learning rate}; the pilot and stages with a rate of their own do without. Raises
    ValueError for an unknown stage, or a model without a rate."""
    names, plan = planned_models(stage, models, own), PLAN["stages"][stage]
    if stage == "pilot":
        pairs = [(name, lr) for lr in PLAN["learning_rates"] for name in names]
    elif "lr" in plan:
        pairs = [(name, plan["lr"]) for name in names]
    else:
        if unknown := [name for name in names if name not in best]:
            raise ValueError(f"no learning rate for {', '.join(unknown)}: finish the stage pilot first")
        pairs = [(name, share * best[name]) for share in plan.get("shares", [1]) for name in names]
    return [
        Trial(stage, name, plan["size"], updates, lr, seed)
        for seed in seeds or plan["seeds"]
        for name, lr in pairs
        for updates in lengths_of(plan)
    ]


def planned_models(stage: str, models: list[str] | None = None, own: dict | None = None) -> list[str]:
    """The models of a stage and `own`; models: only these of them. Raises ValueError for an unknown stage."""
    if stage not in PLAN["stages"]:
        raise ValueError(f"unknown stage {stage!r}{options.nearest(stage, PLAN['stages'])}")
    names = PLAN["stages"][stage]["models"]
    names = [*(PLAN["models"] if names == "all" else names), *(own or ())]
    return [name for name in names if not models or name in models]


def lengths_of(plan: dict) -> list[int]:
    """The numbers of updates for which a stage trains, the shortest first. plan: the stage's, of a protocol."""
    return plan["updates"] if isinstance(plan["updates"], list) else [plan["updates"]]


def final_losses(output: Path) -> dict[Trial, float]:
    """{trial: final loss} (bits) of the finished and evaluated runs in a folder; math.inf of those that diverged."""
    losses = {}
    for trial, run in records(output).items():
        evaluation = trial.folder(output) / "evaluation.json"
        if run.state == "finished" and evaluation.exists():
            losses[trial] = BITS * json.loads(evaluation.read_text(encoding="utf-8"))["loss"]["mean"]
        elif run.state == "failed" and run.failure["reason"].startswith(record.DIVERGENCE):
            losses[trial] = math.inf
    return losses


def records(output: Path) -> dict[Trial, record.Record]:
    """The record of every run that has begun. Raises ValueError for a folder whose run is not the one of its name."""
    found = {}
    for folder in sorted(path.parent for path in output.glob(f"*/*/*/{record.NAME}")):
        with suppress(ValueError):  # cut off by a power failure, for example: the run starts over
            run = record.read(folder)
            found[Trial.parse("/".join(folder.parts[-3:]))] = run
    for trial, run in found.items():
        planned = trial.updates, trial.lr, trial.seed
        if run.length and (run.length.get("max_update"), run.lr, run.seed) != planned:
            raise ValueError(f"{trial.folder(output)} was trained for {run.length} at {run.lr:g} with seed {run.seed}")
    return found


def best_rates(losses: dict[Trial, float], own: dict | None = None) -> tuple[dict[str, float], list[Trial]]:
    """({model: learning rate with the lowest mean loss in the pilot}, trials that are still needed) for the models
    whose best rate lies inside: half and twice the rate have run, too. losses: see `final_losses`; other stages do not
    matter.

    Where the best rate so far is the plan's largest or smallest, and the one beside it has run, the next one beyond the
    plan is needed.
    """
    rates, needed = {}, []
    for model in with_models(own)["models"]:
        mine = {trial: loss for trial, loss in losses.items() if (trial.stage, trial.model) == ("pilot", model)}
        by_rate = {lr: [loss for trial, loss in mine.items() if trial.lr == lr] for lr in {t.lr for t in mine}}
        means = {lr: sum(values) / len(values) for lr, values in by_rate.items()}
        left = untried(means)
        if not math.isfinite(min(means.values(), default=math.inf)):
            continue  # it diverged at every rate
        if not left:
            rates[model] = min(means, key=means.get)
        elif len(left) == 1 and not any(math.isclose(left[0], lr) for lr in PLAN["learning_rates"]):
            plan = PLAN["stages"]["pilot"]
            needed += [Trial("pilot", model, plan["size"], plan["updates"], left[0], seed) for seed in plan["seeds"]]
    return rates, needed


def untried(losses: dict[float, float]) -> list[float]:
    """Half and twice the best rate, if they have not run. losses: {learning rate: mean final loss}."""
    best = min(losses, key=losses.get, default=0.0)
    return [f * best for f in (0.5, 2.0) if losses and not any(math.isclose(f * best, lr) for lr in losses)]


def pilot_trials(
    losses: dict[Trial, float], seeds: list[int] | None = None, models: list[str] | None = None,
    own: dict | None = None,
) -> list[Trial]:  # fmt: skip
    """The trials of the pilot: those that `best_rates` still needs of these models, then all planned rates."""
    needed = [trial for trial in best_rates(losses, own)[1] if not models or trial.model in models]
    return needed + trials("pilot", {}, seeds, models, own=own)
