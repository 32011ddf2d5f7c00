"""The experiment on TUPE's claims (docs/reproduction.md): `tupe evidence` trains what claims.yaml says, stage by stage,
evaluates every model, and keeps what is needed to draw conclusions.

OUT/<stage>/<model>/<size>_<updates>_lr<lr>_seed<seed>/ is a run. When it is finished, evaluation.json holds its
evaluation and model.pt its weights in half precision; the checkpoint with the optimizer's state goes.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import click
import yaml

from .. import options, record
from ..architectures import with_size
from ..checkpoints.files import save_atomically, strip
from ..evaluation.order import evaluate
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

    def folder(self, output: Path) -> Path:
        return output / self.stage / self.model / f"{self.size}_{self.updates}_lr{self.lr:g}_seed{self.seed}"

    def job(self, data: Path, output: Path, further=()) -> runner.Job:
        """The command that trains it. further: more words for it."""
        model = CLAIMS["models"][self.model]
        chosen = {f"--{name}": model[name] for name in ("position", "cls") if name in model}
        words = {
            "--recipe": "pretrain_small", "--data": data, "--output": self.folder(output),
            "--arch": with_size(model["arch"], self.size), **chosen,
            "--lr": f"{self.lr:g}", "--max-update": self.updates, "--seed": self.seed,
            "--log-format": "json", "--log-interval": 50, "--num-workers": 1,
        }  # fmt: skip
        name = f"{self.stage} {self.model} {self.size} lr {self.lr:g} seed {self.seed}"
        return runner.Job(name, self.folder(output), (*runner.tupe("pretrain", words), *further))


def trials(stage: str, best: dict[str, float], seeds=None, models=None) -> list[Trial]:
    """What a stage trains, seed by seed, so that a stage that is cut short has whole blocks. best: {model: learning
    rate}; the pilot does without. Raises ValueError for an unknown stage or model, or a model without a rate."""
    if stage not in CLAIMS["stages"]:
        raise ValueError(f"unknown stage {stage!r}{options.nearest(stage, CLAIMS['stages'])}")
    plan = CLAIMS["stages"][stage]
    names = list(CLAIMS["models"]) if plan["models"] == "all" else plan["models"]
    for model in models or ():
        if model not in names:
            raise ValueError(f"stage {stage} has no model {model!r}{options.nearest(model, names)}")
    names = [name for name in names if not models or name in models]
    lengths = plan["updates"] if isinstance(plan["updates"], list) else [plan["updates"]]
    found = []
    for seed in seeds or plan["seeds"]:
        for name in names:
            if stage != "pilot" and name not in best:
                raise ValueError(f"no learning rate for {name}: run the stage pilot first")
            rates = CLAIMS["learning_rates"] if stage == "pilot" else [best[name]]
            found += [Trial(stage, name, plan["size"], updates, lr, seed) for lr in rates for updates in lengths]
    return found


def final_losses(output: Path, stage: str) -> dict[Trial, float]:
    """{trial: last validation loss} (bits) of the finished runs of a stage."""
    pattern = re.compile(r"(\w+)_(\d+)_lr([\d.e+-]+)_seed(\d+)")
    losses = {}
    for path in sorted((output / stage).glob(f"*/*/{record.NAME}")):
        run, match = record.read(path.parent), pattern.fullmatch(path.parent.name)
        if run.state == "finished" and match:
            size, updates, lr, seed = match.groups()
            trial = Trial(stage, path.parent.parent.name, size, int(updates), float(lr), int(seed))
            losses[trial] = run.scores[-1]["loss"]
    return losses


def best_rates(output: Path) -> tuple[dict[str, float], list[Trial]]:
    """({model: learning rate with the lowest mean loss in the pilot}, trials that are still needed).

    Where the best rate is the largest or the smallest one tried, the next one is needed, too: half or twice as large.
    """
    losses = final_losses(output, "pilot")
    rates, needed = {}, []
    for model in CLAIMS["models"]:
        mine = {trial: loss for trial, loss in losses.items() if trial.model == model}
        by_rate = {lr: [loss for trial, loss in mine.items() if trial.lr == lr] for lr in {t.lr for t in mine}}
        if not by_rate:
            continue
        means = {lr: sum(values) / len(values) for lr, values in by_rate.items()}
        rates[model] = min(means, key=means.get)
        edge = {min(means): 0.5, max(means): 2.0}.get(rates[model])
        if edge and len(means) >= len(CLAIMS["learning_rates"]):
            plan = CLAIMS["stages"]["pilot"]
            needed += [
                Trial("pilot", model, plan["size"], plan["updates"], rates[model] * edge, seed)
                for seed in plan["seeds"]
            ]
    return rates, needed


def conclude(data: Path, job: runner.Job, state: str) -> None:
    """Evaluate a finished run and keep its weights in half precision, without the optimizer's state."""
    checkpoint, weights = job.folder / "checkpoint_last.pt", job.folder / "model.pt"
    if state != "finished" or not checkpoint.exists():
        return
    if not (job.folder / "evaluation.json").exists():
        model, task = load_model(checkpoint, data)
        content = evaluate(model.float(), task, TextEncoder(data), SENTENCES, TOKENS)
        record.write_atomically(job.folder / "evaluation.json", json.dumps(content, indent=1) + "\n")
    state = strip(read_checkpoint(checkpoint))
    half = {k: v.half() if v.is_floating_point() else v for k, v in state["model"].items()}
    save_atomically({**state, "model": half}, weights)
    for path in job.folder.glob("checkpoint*.pt"):
        path.unlink()


@click.command(cls=options.QuietCommand, context_settings={"ignore_unknown_options": True})
@options.data("prepared text; the protocol's is in docs/reproduction.md")
@options.output("folder of the experiment; started again, it goes on")
@click.option(
    "--stages", type=ListOf(list(CLAIMS["stages"])), default="pilot,main,controls,longer,share", show_default=True
)
@click.option("--models", type=ListOf(), help="only these")
@click.option("--seeds", type=ListOf(int), help="only these, instead of the stage's")
@options.jobs()
@click.option("--dry-run", is_flag=True, help="print the commands and run none")
@click.argument("further", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF EVERY TRAINING]...")
def command(data, output, stages, models, seeds, jobs, dry_run, further):
    """Train and evaluate what the experiment on TUPE's claims says, or a part of it.

    tupe evidence --data DATA --output evidence --stages pilot --jobs 2
    """
    data, output = data.resolve(), output.resolve()
    for stage in stages:
        while True:
            best, needed = best_rates(output)
            planned = trials(stage, best, seeds, models)
            if stage == "pilot":
                planned += [trial for trial in needed if not models or trial.model in models]
            todo = [trial.job(data, output, further) for trial in planned]
            if dry_run:
                click.echo("\n".join(" ".join(map(str, job.command)) for job in todo))
                break
            states = runner.run(
                todo, runner.slots(jobs), ended=lambda job, state: conclude(data, job, state), title=stage
            )
            runner.exit_if_unfinished(states, stage)
            if stage != "pilot" or set(best_rates(output)[1]) <= set(planned):
                break
