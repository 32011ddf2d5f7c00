"""What the experiments on TUPE's claims train, as plan.yaml (the first) and second.yaml (the second and the third) say:
runs by stage, and the learning rates that follow from those that compare rates."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from tupe.common.architectures import with_size
from tupe.common.options import did_you_mean
from tupe.run import record
from tupe.sweep import runner

HERE = Path(__file__).parent
PLAN, LATER = (yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8")) for name in ("plan", "second"))
LATER["models"] |= PLAN["models"]
for _model in LATER["models"].values():
    if "position-file" in _model:
        _model["position-file"] = str(HERE / _model["position-file"])
THIRD = [stage for stage, plan in LATER["stages"].items() if plan.get("protocol") == 3]  # the stages of the third
PRECISIONS = {"none": "float32", "bf16": "bfloat16 autocast"}  # of autocast, as the tables call it
BITS = 1 / math.log(2)  # of a nat
# What a training may be given beyond its plan: where it runs, and in which precision. The rest is the protocol's.
ALLOWED_OPTIONS = (
    "--precision", "model.autocast", "--position-file", "--gpus", "--cpu", "--micro-batch-size", "--num-workers",
    "--allocator", "distributed_training.heartbeat_timeout", "common.log_file", "--tensorboard-logdir",
    "--wandb-project",
)  # fmt: skip


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
        ValueError for a word that is not `ALLOWED_OPTIONS`."""
        for word in further:
            name = word.partition("=")[0]
            if name not in ALLOWED_OPTIONS and (word.startswith("--") or "=" in word):
                valid = ", ".join(ALLOWED_OPTIONS)
                raise ValueError(f"{name}: the protocol fixes it; valid: {valid}")
        model, plan = protocol["models"][self.model], protocol["stages"].get(self.stage, {})
        chosen = {f"--{name}": model[name] for name in ("position", "position-file", "cls") if name in model}
        words = {
            "--recipe": "pretrain_small", "--data": data, "--output": self.folder(output),
            "--arch": with_size(model["arch"], self.size), **chosen,
            "--lr": f"{self.lr:g}", "--max-update": self.updates, "--seed": self.seed,
            "--precision": {"none": "float32", "bf16": "autocast"}[autocast(plan, self.seed, protocol)],
            "common.log_format": "json", "--log-interval": 50, "--num-workers": 1,
        }  # fmt: skip
        name = f"{self.stage} {self.model} {self.size} lr {self.lr:g} seed {self.seed}"
        return runner.Job(name, self.folder(output), (*runner.tupe("pretrain", words), *further))


def trials(
    stage: str, losses: dict[Trial, float], protocol: dict = PLAN, models: list[str] | None = None,
    seeds: list[int] | None = None,
) -> list[Trial]:  # fmt: skip
    """What a stage trains, by length and seed, then rate by rate, so that a stage that is cut short has whole blocks.
    losses: of the runs that have ended (see `final_losses`), from which rates follow; without its rate, a model is left
    out. protocol: what plan.yaml holds, or another one; models, seeds: only these of the stage's."""
    plan = protocol["stages"][stage]
    rates = learning_rates(stage, losses, protocol, planned_models(stage, protocol, models))
    return [
        Trial(stage, model, plan["size"], updates, rate, seed)
        for updates in lengths_of(plan)
        for seed in plan["seeds"] if not seeds or seed in seeds
        for rank in range(max(map(len, rates.values()), default=0))
        for model, values in rates.items()
        for rate in values[rank : rank + 1]
    ]  # fmt: skip


def planned_models(stage: str, protocol: dict = PLAN, models: list[str] | None = None) -> list[str]:
    """The models of a stage; models: only these of them."""
    plan = protocol["stages"][stage]
    names = plan["models"] if "models" in plan else plan["rates"]
    return [name for name in (protocol["models"] if names == "all" else names) if not models or name in models]


def check_models(models: list[str] | None, stages: list[str], protocol: dict = PLAN) -> None:
    """Raises ValueError for a model that is in none of the stages."""
    valid = [name for stage in stages for name in planned_models(stage, protocol)]
    for model in models or ():
        if model not in valid:
            raise ValueError(f"no stage of {', '.join(stages)} has a model {model!r}{did_you_mean(model, valid)}")


def learning_rates(stage: str, losses: dict[Trial, float], protocol: dict, models: list[str]) -> dict[str, list[float]]:
    """{model: the rates at which a stage trains it}: its own ones, those that it compares, or shares of the best ones
    of the stage that does (`rates_of`), where a model may take the rate of another one (`like`)."""
    plan, chooser = protocol["stages"][stage], "pilot"
    if "lr" in plan:
        return {model: [plan["lr"]] for model in models}
    if stage == chooser or "rates" in plan:
        rates = {model: plan["rates"][model] if "rates" in plan else protocol["learning_rates"] for model in models}
        if any(other.get("rates_of", chooser) == stage for other in protocol["stages"].values()):
            needed = best_rates(losses, stage, protocol)[1]
            rates = {model: [*values, *needed.get(model, ())] for model, values in rates.items()}
        return rates
    best, like = best_rates(losses, plan.get("rates_of", chooser), protocol)[0], plan.get("like", {})
    shares = plan.get("shares", [1])
    return {model: [s * best[of] for s in shares] for model in models if (of := like.get(model, model)) in best}


def lengths_of(plan: dict) -> list[int]:
    """The numbers of updates for which a stage trains, the shortest first. plan: the stage's, of a protocol."""
    return plan["updates"] if isinstance(plan["updates"], list) else [plan["updates"]]


def autocast(plan: dict, seed: int, protocol: dict) -> str:
    """What the runs of one seed of a stage train in, as `PRECISIONS` calls it. plan: the stage's, of the protocol."""
    return "none" if seed in plan.get("float32_seeds", ()) else plan.get("autocast", protocol["autocast"])


def precision(trial: Trial) -> str:
    """What a run of the later experiments trains in, as the tables call it."""
    return PRECISIONS[autocast(LATER["stages"][trial.stage], trial.seed, LATER)]


def cooldown_of(trial: Trial) -> int:
    """Updates of its cool-down, 0 if its stage has none."""
    return round(LATER["stages"].get(trial.stage, {}).get("cooldown", 0) * trial.updates)


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
        if run.budget and (run.budget.get("max_update"), run.lr, run.seed) != planned:
            raise ValueError(f"{trial.folder(output)} was trained for {run.budget} at {run.lr:g} with seed {run.seed}")
    return found


def best_rates(
    losses: dict[Trial, float], stage: str = "pilot", protocol: dict = PLAN
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """({model: rate with the lowest mean loss in a stage that compares rates}, {model: rates that have to run first}),
    with the stage's seeds, of models whose planned rates have all run (in the pilot half and twice the best will do).

    A best rate at the edge of those that have run is used only once the next one, by a factor of 2, has run. `worse`:
    rates that count as run. A model that diverged at every rate is in neither.
    """
    plan, by_model = protocol["stages"][stage], defaultdict(lambda: defaultdict(list))
    for trial, loss in losses.items():
        if trial.stage == stage and trial.seed in plan["seeds"]:
            by_model[trial.model][trial.lr].append(loss)
    best, needed = {}, {}
    for model, by_rate in by_model.items():
        means = {lr: sum(values) / len(values) for lr, values in by_rate.items()}
        lr, tried = min(means, key=means.get), [*means, *plan.get("worse", ())]
        is_inside = min(tried) < lr < max(tried)
        required = plan["rates"][model] if "rates" in plan else protocol["learning_rates"]
        if is_inside and "rates" not in plan:
            required = (lr / 2, 2 * lr)
        if not math.isfinite(means[lr]) or not all(any(math.isclose(rate, run) for run in means) for rate in required):
            continue
        if is_inside:
            best[model] = lr
        else:
            needed[model] = [lr / 2 if lr == min(tried) else 2 * lr]
    return best, needed
