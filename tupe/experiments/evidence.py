"""The experiment on TUPE's claims (docs/reproduction.md): `tupe evidence` trains what claims.yaml says, stage by stage,
evaluates every model, and keeps what is needed to draw conclusions.

OUT/<stage>/<model>/<size>_<updates>_lr<lr>_seed<seed>/ is a run. When it is finished, evaluation.json holds its
evaluation and model.pt its weights in half precision; the checkpoint with the optimizer's state goes. Stages with
`weights_every` also keep model_<updates>.pt along training, which `--pairs` scores: order.json, pairs/<updates>/.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import yaml

from .. import options, record
from ..architectures import with_size
from ..checkpoints.files import save_atomically, strip
from ..evaluation import minimal_pairs
from ..evaluation.order import evaluate, held_out_sentences, order_scores
from ..evaluation.probes import load_model
from ..options import ListOf
from ..safe_load import read_checkpoint
from ..text import TextEncoder
from . import runner

CLAIMS = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))
SENTENCES, TOKENS = 2000, 400_000  # of the evaluation: order sensitivity, loss


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

    def job(self, data: Path, output: Path, further: Sequence[str] = ()) -> runner.Job:
        """The command that trains it. further: more words for it."""
        model, plan = CLAIMS["models"][self.model], CLAIMS["stages"].get(self.stage, {})
        chosen = {f"--{name}": model[name] for name in ("position", "cls") if name in model}
        words = {
            "--recipe": "pretrain_small", "--data": data, "--output": self.folder(output),
            "--arch": with_size(model["arch"], self.size), **chosen,
            "--lr": f"{self.lr:g}", "--max-update": self.updates, "--seed": self.seed, "--autocast": CLAIMS["autocast"],
            "--log-format": "json", "--log-interval": 50, "--num-workers": 1,
        }  # fmt: skip
        if "weights_every" in plan:  # `keep_weights` has the time of three intervals
            words |= {"--save-interval-updates": plan["weights_every"], "--keep-interval-updates": 3}
        name = f"{self.stage} {self.model} {self.size} lr {self.lr:g} seed {self.seed}"
        return runner.Job(name, self.folder(output), (*runner.tupe("pretrain", words), *further))


def trials(
    stage: str, best: dict[str, float], seeds: list[int] | None = None, models: list[str] | None = None
) -> list[Trial]:
    """What a stage trains, seed by seed (the pilot: rate by rate), so that a stage that is cut short has whole blocks.
    best: {model: learning rate}; the pilot and stages with a rate of their own do without. Raises ValueError for an
    unknown stage or model, or a model without a rate."""
    if stage not in CLAIMS["stages"]:
        raise ValueError(f"unknown stage {stage!r}{options.nearest(stage, CLAIMS['stages'])}")
    plan = CLAIMS["stages"][stage]
    names = list(CLAIMS["models"]) if plan["models"] == "all" else plan["models"]
    for model in models or ():
        if model not in names:
            raise ValueError(f"stage {stage} has no model {model!r}{options.nearest(model, names)}")
    names = [name for name in names if not models or name in models]
    lengths = plan["updates"] if isinstance(plan["updates"], list) else [plan["updates"]]
    if stage == "pilot":
        pairs = [(name, lr) for lr in CLAIMS["learning_rates"] for name in names]
    elif "lr" in plan:
        pairs = [(name, plan["lr"]) for name in names]
    else:
        if unknown := [name for name in names if name not in best]:
            raise ValueError(f"no learning rate for {', '.join(unknown)}: finish the stage pilot first")
        pairs = [(name, best[name]) for name in names]
    return [
        Trial(stage, name, plan["size"], updates, lr, seed)
        for seed in seeds or plan["seeds"]
        for name, lr in pairs
        for updates in lengths
    ]


def final_losses(output: Path, stage: str) -> dict[Trial, float]:
    """{trial: last validation loss} (bits) of the finished runs of a stage."""
    runs = {trial: run for trial, run in records(output).items() if trial.stage == stage and run.state == "finished"}
    return {trial: run.scores[-1]["loss"] for trial, run in runs.items()}


def records(output: Path) -> dict[Trial, record.Record]:
    """The record of every run that has begun."""
    folders = sorted(path.parent for path in output.glob(f"*/*/*/{record.NAME}"))
    return {Trial.parse("/".join(folder.parts[-3:])): record.read(folder) for folder in folders}


def best_rates(output: Path) -> tuple[dict[str, float], list[Trial]]:
    """({model: learning rate with the lowest mean loss in the pilot}, trials that are still needed) for the models that
    have been trained at all of the plan's rates.

    Where the best rate is the largest or the smallest one tried, the next one is needed, too: half or twice as large.
    """
    losses = final_losses(output, "pilot")
    rates, needed = {}, []
    for model in CLAIMS["models"]:
        mine = {trial: loss for trial, loss in losses.items() if trial.model == model}
        by_rate = {lr: [loss for trial, loss in mine.items() if trial.lr == lr] for lr in {t.lr for t in mine}}
        if not set(CLAIMS["learning_rates"]) <= set(by_rate):
            continue
        means = {lr: sum(values) / len(values) for lr, values in by_rate.items()}
        rates[model] = min(means, key=means.get)
        edge = {min(means): 0.5, max(means): 2.0}.get(rates[model])
        if edge:
            plan = CLAIMS["stages"]["pilot"]
            needed += [
                Trial("pilot", model, plan["size"], plan["updates"], rates[model] * edge, seed)
                for seed in plan["seeds"]
            ]
    return rates, needed


def keep_weights(trial: Trial, folder: Path) -> None:
    """Make model_<updates>.pt of the checkpoints that training has left so far, if the stage keeps weights."""
    every = CLAIMS["stages"].get(trial.stage, {}).get("weights_every")
    for path in folder.glob("checkpoint_*_*.pt") if every else ():
        updates = int(path.stem.rpartition("_")[2])
        weights = folder / f"model_{updates}.pt"
        if updates % every == 0 and updates < trial.updates and not weights.exists():
            save_half(path, weights)


def save_half(checkpoint: Path, output: Path) -> None:
    """Write a checkpoint's weights in half precision, without the optimizer's state."""
    state = strip(read_checkpoint(checkpoint))
    half = {name: value.half() if value.is_floating_point() else value for name, value in state["model"].items()}
    save_atomically({**state, "model": half}, output)


def conclude(data: Path, trial: Trial, folder: Path, state: str) -> None:
    """Keep the weights of a finished run in half precision and evaluate them; its checkpoints are deleted."""
    checkpoint, weights = folder / "checkpoint_last.pt", folder / "model.pt"
    if state != "finished":
        return
    if checkpoint.exists():
        keep_weights(trial, folder)
        save_half(checkpoint, weights)
        for path in folder.glob("checkpoint*.pt"):
            path.unlink()
    if not (folder / "evaluation.json").exists():
        model, task = load_model(weights, data)
        content = evaluate(model, task, TextEncoder(data), SENTENCES, TOKENS)
        record.write_atomically(folder / "evaluation.json", json.dumps(content, indent=1) + "\n")


def score(data: Path, trial: Trial, folder: Path, paradigms: list) -> None:
    """Order sensitivity and minimal pairs of a finished run, along training and at its end. What is there is kept, and
    a run that another process scores is left to it."""
    if not (folder / "model.pt").exists() or not record.lock(folder / "pairs"):
        return
    plan, encoder, path = CLAIMS["scoring"], TextEncoder(data), folder / "order.json"
    weights = {int(file.stem.rpartition("_")[2]): file for file in folder.glob("model_*.pt")}
    weights[trial.updates] = folder / "model.pt"
    order = json.loads(path.read_text()) if path.exists() else {}
    for updates in sorted(weights):
        with_pairs = updates in (*plan["pairs_after"], trial.updates)
        if str(updates) in order and not with_pairs:
            continue
        model, task = load_model(weights[updates], data)
        if str(updates) not in order:
            order[str(updates)] = order_scores(model, held_out_sentences(task, encoder, plan["sentences"]))
            record.write_atomically(path, json.dumps(order, indent=1) + "\n")
        if with_pairs:
            minimal_pairs.evaluate(model, encoder, paradigms, folder / "pairs" / str(updates), say=click.echo)
    record.unlock(folder / "pairs")


def train(data: Path, output: Path, planned: list[Trial], jobs: int | None, further: Sequence[str]) -> None:
    """Run what is left of the planned trainings of one stage; conclude each as it ends."""
    plan = {trial.job(data, output, further): trial for trial in planned}
    if further and plan:
        runner.check(next(iter(plan)))
    states = runner.run(
        list(plan), runner.slots(jobs), title=planned[0].stage,
        meanwhile=lambda job: keep_weights(plan[job], job.folder),
        ended=lambda job, state: conclude(data, plan[job], job.folder, state),
    )  # fmt: skip
    runner.exit_if_unfinished(states, planned[0].stage)


def pilot_trials(output: Path, seeds: list[int] | None = None, models: list[str] | None = None) -> list[Trial]:
    """The trials of the pilot: all planned rates, and those that `best_rates` still needs of these models."""
    needed = [trial for trial in best_rates(output)[1] if not models or trial.model in models]
    return trials("pilot", {}, seeds, models) + needed


def train_pilot(
    data: Path, output: Path, jobs: int | None, further: Sequence[str], seeds: list[int] | None = None,
    models: list[str] | None = None,
) -> None:  # fmt: skip
    """Train the pilot until the best rate of every model lies between two others."""
    planned = []
    while not set(current := pilot_trials(output, seeds, models)) <= set(planned):
        planned = current
        train(data, output, planned, jobs, further)


@click.command(cls=options.QuietCommand, context_settings={"ignore_unknown_options": True})
@options.data("prepared text; the protocol's is in docs/reproduction.md")
@options.output("folder of the experiment; an existing one is resumed")
@click.option(
    "--stages", type=ListOf(list(CLAIMS["stages"])), default="first,pilot,main,controls,longer,share", show_default=True
)
@click.option("--models", type=ListOf(), help="only these")
@click.option("--seeds", type=ListOf(int), help="only these, instead of the stage's")
@options.jobs()
@click.option("--dry-run", is_flag=True, help="print the commands and run none")
@click.option(
    "--pairs", type=click.Path(path_type=Path), metavar="BLiMP.zip",
    help="train nothing; score finished runs along training: order sensitivity, minimal pairs. Several processes may",
)  # fmt: skip
@click.argument("further", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF EVERY TRAINING]...")
def command(data, output, stages, models, seeds, jobs, dry_run, pairs, further):
    """Train and evaluate what the experiment on TUPE's claims says, or a part of it.

    tupe evidence --data DATA --output evidence --stages pilot --jobs 2
    """
    data, output = data.resolve(), output.resolve()
    if pairs:
        count, (best, _) = CLAIMS["scoring"]["pairs"], best_rates(output)
        paradigms = [replace(kind, pairs=kind.pairs[:count]) for kind in minimal_pairs.read_paradigms(pairs)]
        for stage in [stage for stage in stages if "weights_every" in CLAIMS["stages"][stage]]:
            for trial in trials(stage, best, seeds, models):
                score(data, trial, trial.folder(output), paradigms)
        return
    for stage in stages:
        if stage == "pilot":
            planned = pilot_trials(output, seeds, models)
        else:
            planned = trials(stage, best_rates(output)[0], seeds, models)
        if dry_run:
            commands = [trial.job(data, output, further).command for trial in planned]
            click.echo("\n".join(" ".join(map(str, words)) for words in commands))
        elif stage == "pilot":
            train_pilot(data, output, jobs, further, seeds, models)
        else:
            train(data, output, planned, jobs, further)
