"""The experiment on TUPE's claims (docs/reproduction.md): `tupe evidence` trains what claims.yaml says, stage by stage,
evaluates every model, and keeps what is needed to draw conclusions.

OUT/<stage>/<model>/<size>_<updates>_lr<lr>_seed<seed>/ is a run. When it is finished, evaluation.json holds its
evaluation and model.pt its weights in half precision; the checkpoint with the optimizer's state goes. Stages with
`weights_every` also keep model_<updates>.pt along training, which `--pairs` scores: order.json, pairs/<updates>/.
"""

import functools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from ..checkpoints.files import save_atomically, strip
from ..common import options, record
from ..common.options import ListOf
from ..common.safe_load import read_checkpoint
from ..evaluation import minimal_pairs
from ..evaluation.loading import load_model
from ..evaluation.order import evaluate, held_out_sentences, order_scores
from ..plugin.pretrained import load_split
from ..text import TextEncoder
from . import collect, runner
from .plan import CLAIMS, Trial, best_rates, final_losses, pilot_trials, planned_models, trials, with_models

SENTENCES, TOKENS = 2000, 400_000  # of the evaluation: order sensitivity, loss


def keep_weights(trial: Trial, folder: Path) -> None:
    """Make model_<updates>.pt of the checkpoints that training has left, if the stage keeps weights."""
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
    """Keep the weights of a finished run in half precision and evaluate them; its checkpoints are deleted. Waits for
    another process that does so."""
    checkpoint, weights = folder / "checkpoint_last.pt", folder / "model.pt"
    if state != "finished":
        return
    while not record.lock(folder):
        time.sleep(1)
    if checkpoint.exists():
        keep_weights(trial, folder)
        save_half(checkpoint, weights)
        for path in sorted(folder.glob("checkpoint*.pt"), key=checkpoint.__eq__):  # that one last: it brings us here
            path.unlink()
    if not (folder / "evaluation.json").exists():
        model, task = load_model(weights, data)
        content = evaluate(model, task, TextEncoder(data), SENTENCES, TOKENS)
        record.write_atomically(folder / "evaluation.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    record.unlock(folder)


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
            record.write_atomically(path, json.dumps(order, indent=1, allow_nan=False) + "\n")
        if with_pairs:
            scores = folder / "pairs" / str(updates)
            (scores / collect.SCORED).unlink(missing_ok=True)
            minimal_pairs.evaluate(model, encoder, paradigms, scores, say=click.echo)
            (scores / collect.SCORED).touch()
    record.unlock(folder / "pairs")


def check_data(data: Path, output: Path) -> None:
    """Note in a folder of runs what data they are trained on: OUT/data.json.

    Raises ValueError if its runs were trained on other data, or if the evaluation needs more held-out text.
    """
    ours, path = collect.fingerprint(data), output / "data.json"
    if path.exists():
        if (theirs := json.loads(path.read_text())["fingerprint"]) != ours:
            raise ValueError(f"{output} has runs on other data ({theirs}) than {data} ({ours}); name another folder")
        return
    held_out = load_split(data / "valid")
    tokens = int(held_out.sizes.sum())  # sizes are read from its mapped file: it must be alive
    if tokens < TOKENS:
        raise ValueError(f"{data}/valid holds {tokens:,} tokens, fewer than the {TOKENS:,} of the evaluation")
    output.mkdir(parents=True, exist_ok=True)
    content = {"data": str(data), "fingerprint": ours}
    record.write_atomically(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def train(
    data: Path, output: Path, planned: list[Trial], jobs: int | None, further: Sequence[str],
    job: Callable[[Trial, Path, Path, Sequence[str]], runner.Job] = Trial.job,
) -> None:  # fmt: skip
    """Run what is left of the planned trainings of one stage; conclude each as it ends. That a run diverged is a
    result; one that failed otherwise is tried again. Raises ValueError for the reasons of `check_data`."""
    plan = {job(trial, data, output, further): trial for trial in planned}
    if not plan:
        return
    check_data(data, output)
    if further:
        runner.check(next(iter(plan)))
    results = final_losses(output)
    for job, trial in plan.items():
        if trial not in results and record.state_of(job.folder) == "failed":
            record.clear_failure(job.folder)
    states = runner.run(
        list(plan), runner.slots(jobs), title=planned[0].stage,
        ended=lambda job, state: conclude(data, plan[job], job.folder, state),
    )  # fmt: skip
    results = final_losses(output)
    states = {job: "finished" if plan[job] in results else state for job, state in states.items()}
    runner.exit_if_unfinished(states, planned[0].stage)


def train_pilot(
    data: Path, output: Path, jobs: int | None, further: Sequence[str], seeds: list[int] | None = None,
    models: list[str] | None = None, known: dict[Trial, float] | None = None,
    own: dict | None = None,
) -> None:  # fmt: skip
    """Train the pilot until the best rate of every model lies between two others. known: losses of runs that are not
    trained again."""
    known, planned, job = known or {}, set(), functools.partial(Trial.job, protocol=with_models(own))
    while set(current := pilot_trials(known | final_losses(output), seeds, models, own)) - planned:
        planned = set(current)
        train(data, output, [trial for trial in current if trial not in known], jobs, further, job)


def known_losses(folder: Path, data: Path) -> dict[Trial, float]:
    """{trial: final loss} (bits) of the finished runs in the tables of a folder, see `collect`, and math.inf of runs
    that diverged.

    Raises ValueError if there are none, or if they were trained on other data.
    """
    rows = {Trial.parse(row["run"]): row for row in collect.read(folder)["runs"]}
    runs = {trial: row for trial, row in rows.items() if row["state"] == "finished" and row["loss"]}
    if not runs:
        raise ValueError(f"{folder} has no table of finished runs; `tupe claims --runs DIR` makes it")
    if others := {row["data"] for row in runs.values()} - {"", ours := collect.fingerprint(data)}:
        raise ValueError(f"{folder} has runs on other data ({', '.join(sorted(others))}) than {data} ({ours})")
    diverged = [trial for trial, row in rows.items() if row["reason"].startswith(record.DIVERGENCE)]
    return {trial: float(row["loss"]) for trial, row in runs.items()} | dict.fromkeys(diverged, math.inf)


@click.command(cls=options.QuietCommand, context_settings={"ignore_unknown_options": True})
@options.data("prepared text; the protocol's is in docs/reproduction.md")
@options.output("folder of the experiment; an existing one is resumed")
@click.option(
    "--stages", type=ListOf(list(CLAIMS["stages"])), default=",".join(CLAIMS["stages"]), show_default=True
)
@click.option("--models", type=ListOf(), help="only these")
@click.option("--seeds", type=ListOf(int), help="only these, instead of the stage's")
@options.jobs()
@click.option(
    "--known", type=click.Path(path_type=Path, exists=True, file_okay=False), metavar="DIR",
    help="skip runs that tables of `tupe claims` have, e.g. docs/evidence; in the pilot they still count",
)  # fmt: skip
@click.option(
    "--twice", is_flag=True,
    help="the stage main for twice its updates: if one of its models was on the plateau for half of them",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="print the commands and run none")
@click.option(
    "--pairs", type=click.Path(path_type=Path), metavar="BLiMP.zip",
    help="train nothing; score finished runs, along training where weights were kept: order sensitivity, minimal "
    "pairs; several processes may share the work",
)  # fmt: skip
@click.argument("further", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF EVERY TRAINING]...")
def command(data, output, stages, models, seeds, jobs, known, twice, dry_run, pairs, further):
    """Train and evaluate what the experiment on TUPE's claims says, or a part of it.

    tupe evidence --data DATA --output evidence --stages pilot --jobs 2
    """
    data, output = data.resolve(), output.resolve()
    if twice and stages != ["main"]:
        raise ValueError(f"--twice with --stages {','.join(stages)}: valid: main alone")
    chosen = {stage: planned_models(stage, models) for stage in stages}
    for model in models or ():
        if not any(model in names for names in chosen.values()):
            valid = [name for stage in stages for name in planned_models(stage)]
            raise ValueError(f"no stage of {', '.join(stages)} has a model {model!r}{options.nearest(model, valid)}")
    stages = [stage for stage, names in chosen.items() if names]
    known = known_losses(known, data) if known else {}
    if pairs:
        paradigms = minimal_pairs.read_paradigms(pairs, CLAIMS["scoring"]["pairs"])
        best, _ = best_rates(known | final_losses(output))
        for stage in stages:
            for trial in trials(stage, best, seeds, models, twice):
                score(data, trial, trial.folder(output), paradigms)
        return
    for stage in stages:
        losses = known | final_losses(output)
        if stage == "pilot":
            planned = pilot_trials(losses, seeds, models)
        else:
            planned = trials(stage, best_rates(losses)[0], seeds, models, twice)
        planned = [trial for trial in planned if trial not in known]
        if dry_run:
            for trial in planned:
                click.echo(" ".join(map(str, trial.job(data, output, further).command)))
        elif stage == "pilot":
            train_pilot(data, output, jobs, further, seeds, models, known)
        else:
            train(data, output, planned, jobs, further)
