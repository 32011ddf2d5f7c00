"""The third protocol (docs/third-protocol.md): trains its runs, as second.yaml says, and writes what came out.

    python -m lab run --data DATA --output OUT    train and evaluate what is left; resumes OUT
    python -m lab page --runs OUT                 add finished runs to the tables, write docs/evidence/delay.md and .csv

Where a stage has a cool-down, runs branch off from trunks, which train at a constant rate.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from tupe.common import options
from tupe.common.options import ListOf
from tupe.common.prepared import text_encoder
from tupe.data.splits import Split
from tupe.evaluate.loading import HeldOut
from tupe.evaluate.order import evaluate
from tupe.positions import load_scheme_file
from tupe.run import record
from tupe.run.folder import write_atomically
from tupe.sweep import runner
from tupe.sweep.collection import collect as fine_tunings

from . import cls, collect, delay, third
from .execute import check_data, clear_failure, train, train_stage
from .known import FIRST, TABLES, known_losses
from .plan import LATER, THIRD, Trial, check_models, cooldown_of, lengths_of, trials

SENTENCES = 2000  # of the evaluation of order sensitivity
TOKENS = 400_000  # that held-out text has at least

# ----------------------------------------------------------------------------------------------------------- the jobs


def job(trial: Trial, data: Path, output: Path, further: Sequence[str] = ()) -> runner.Job:
    """The command that trains it; of a stage with a cool-down, only that, from what `begin` puts there."""
    made = trial.job(data, output, further, LATER)
    cooldown = cooldown_of(trial)
    return replace(made, command=(*made.command, *constant(cooldown))) if cooldown else made


def trunk_job(trial: Trial, data: Path, output: Path, further: Sequence[str] = ()) -> runner.Job:
    """The command that trains at a constant rate up to the update at which a trial's cool-down begins."""
    until, folder = trial.updates - cooldown_of(trial), trunk(trial, output)
    made = replace(trial, updates=until).job(data, output, further, LATER)
    return runner.Job(f"trunk of {made.name}", folder, (*made.command, f"--output={folder}", *constant(0)))


def trunk(trial: Trial, output: Path) -> Path:
    """The folder of the run at a constant rate from whose end a trial branches off."""
    until = trial.updates - cooldown_of(trial)
    return output / "trunks" / f"{trial.model}_{trial.size}_{until}_lr{trial.lr:g}_seed{trial.seed}"


def trunks_of(trial: Trial, output: Path) -> list[Path]:
    """The trunks of a trial and of the shorter ones of its stage, as far as they are there, the trial's last."""
    lengths = [updates for updates in lengths_of(LATER["stages"][trial.stage]) if updates <= trial.updates]
    folders = [trunk(replace(trial, updates=updates), output) for updates in lengths]
    return [folder for folder in folders[:-1] if (folder / "checkpoint_last.pt").exists()] + folders[-1:]


def constant(cooldown: int) -> tuple[str, ...]:
    return "--lr-scheduler=constant_cooldown", f"--cooldown-updates={cooldown}"


def begin(folder: Path, earlier: Path) -> None:
    """Let a run that has not begun continue another one's last checkpoint."""
    if not (folder / record.NAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "checkpoint_last.pt", (earlier / "checkpoint_last.pt").read_bytes())


def train_length(data: Path, output: Path, planned: list[Trial], jobs: int | None, further: Sequence[str]) -> None:
    """Train what is left of one stage and length; where there is a cool-down, first the trunks, each from the one of
    the next shorter length. A run whose trunk diverged has diverged; one whose trunk failed otherwise, or was stopped,
    waits for it."""
    trunks = {trial: trunk_job(trial, data, output, further) for trial in planned if cooldown_of(trial)}
    if trunks:
        check_data(data, output, TOKENS)  # `train` does it behind them, and they may take days
    for trial, made in trunks.items():
        for shorter in trunks_of(trial, output)[-2:-1]:
            begin(made.folder, shorter)
        if not divergence_of(made.folder):
            clear_failure(made.folder)
    states = runner.run([*trunks.values()], runner.slots(jobs), title="trunks") if trunks else {}
    for trial, made in trunks.items():
        if states[made] == "finished":
            begin(trial.folder(output), made.folder)
        elif reason := divergence_of(made.folder):
            trial.folder(output).mkdir(parents=True, exist_ok=True)
            record.note_failure(trial.folder(output), reason, record.DIVERGED)
            del states[made]
    ready = [trial for trial in planned if states.get(trunks.get(trial), "finished") == "finished"]
    train(data, output, ready, jobs, further, job, evaluation, TOKENS)
    runner.exit_if_unfinished(states, "trunks")


def evaluation(model: Any, text: HeldOut, data: Path) -> dict:
    """What evaluation.json holds: order sensitivity, and the loss of all held-out blocks, also by document."""
    blocks = text.blocks("valid").blocks
    content = evaluate(model, text, text_encoder(data), SENTENCES, int(blocks.sizes.sum()))
    documents = documents_at(Split(data / "valid").sizes, blocks.borders[0][:, 0])
    further = {}
    for name in ("nats", "tokens"):  # the last blocks may have no masked token, and no sum
        values = np.array(content["loss"]["blocks"][name].split(), float)
        sums = np.bincount(documents[: len(values)], values)
        further[f"{name} by document"] = {str(number): total for number, total in enumerate(sums)}
    return content | {"cls": cls.ratios(model, text), "further": further}


def documents_at(sizes: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The document in which each of these tokens of a split is. sizes: of its sentences; a `</s>` alone ends a
    document."""
    return np.searchsorted(np.cumsum(sizes)[sizes == 1], starts, side="right")


def divergence_of(folder: Path) -> str:
    """The reason of a run that diverged, else ""."""
    run = record.read(folder) if record.state_of(folder) == "failed" else None
    return run.failure["reason"] if run and run.failure["reason"].startswith(record.DIVERGENCE) else ""


# --------------------------------------------------------------------------------------------------------- the commands


@click.command(cls=options.QuietCommand, context_settings={"ignore_unknown_options": True})
@options.data("The prepared text; docs/protocol.md says how the protocol's is made.")
@options.output("The folder of the runs. An existing one is resumed.", shared=True)
@click.option("--stages", type=ListOf(THIRD), default=",".join(THIRD), show_default=True, help="Run only these stages.")
@click.option("--models", type=ListOf(), help="Run only these models.")
@click.option("--seeds", type=ListOf(int), help="Run only these seeds.")
@options.jobs()
@click.option("--dry-run", is_flag=True, help="Print the commands, and run none.")
@click.argument("further", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF EVERY TRAINING]...")
def run(data, output, stages, models, seeds, jobs, dry_run, further):
    """Train and evaluate what is left, stage by stage."""
    data, output = data.resolve(), output.resolve()
    check_models(models, stages, LATER)
    for file in sorted({model["position-file"] for model in LATER["models"].values() if "position-file" in model}):
        load_scheme_file(file)  # an evaluation builds its encodings

    def planned(stage):
        losses = known_losses(output)
        return [trial for trial in trials(stage, losses, LATER, models, seeds) if trial not in losses]

    def train_lengths(new):
        for updates in sorted({trial.updates for trial in new}):
            train_length(data, output, [trial for trial in new if trial.updates == updates], jobs, further)

    for stage in stages:
        if dry_run:
            for trial in planned(stage):
                click.echo(" ".join(map(str, job(trial, data, output, further).command)))
        else:
            train_stage(functools.partial(planned, stage), train_lengths)


def whole_curve(trial: Trial, found: dict[str, list[dict]], output: Path) -> list[dict]:
    """The rows of a run in the table `training`; of one that branches off, from the start of its trunk. Raises
    ValueError for a gap, or a part that is there twice: trunks are missing, or a run began without its trunk."""
    rows = [row for row in found["training"] if row["run"] == str(trial)]
    if cooldown_of(trial):
        of_trunks = [collect.training_losses(folder / "train.log") for folder in trunks_of(trial, output)]
        earlier = {n: row for log in of_trunks for n, row in log.items() if n <= trial.updates - cooldown_of(trial)}
        rows = [{"run": str(trial), "updates": n, "loss": loss, "seconds": seconds}
                for n, (loss, seconds) in sorted(earlier.items())] + rows  # fmt: skip
        updates = [int(row["updates"]) for row in rows]
        if updates != list(range(delay.EVERY, len(updates) * delay.EVERY + 1, delay.EVERY)):
            raise ValueError(f"{trial}: the logs in {output} and its trunks/ do not make one whole curve")
    return rows


def scores_of(folder: Path) -> list[third.Score]:
    """Of the fine-tunings below a folder that have ended, whose checkpoints are those of runs of the protocol. One that
    diverged has a score of 0."""
    collection, found = fine_tunings([folder]), []

    def add(run: record.Record, best: float, last: float) -> None:
        trial = Trial.parse("/".join(Path(run.pretrained).parts[-4:-1]))
        found.append(third.Score(trial, run.task, run.lr, run.seed, best, last))

    for run in collection.finished.values():
        metric = run.record.metrics[0]
        last = [entry[metric] for entry in run.record.scores if entry["split"] == "valid"][-1]
        add(run.record, run.score("valid", metric), last)
    for failed, reason in collection.failed:
        if reason.startswith(record.DIVERGENCE):
            add(record.read(failed), 0.0, 0.0)
    return found


@click.command("page", cls=options.QuietCommand)
@click.option("--runs", type=options.FOLDER, help="The folder of `run`, whose finished runs are added.")
@click.option("--data", type=options.FOLDER, help="The folder of data (default: what the weights of a run name).")
@click.option("--finetuned", type=options.FOLDER, help="The folder of the sweeps of (d), whose scores are added.")
def write_page(runs, data, finetuned):
    """Add finished runs to the tables, then write docs/evidence/delay.md and delay.csv from them."""
    if finetuned:
        third.add_scores(scores_of(finetuned))
    if runs:
        found = collect.collect(runs, data)
        if other := {stage for row in found["runs"] if (stage := Trial.parse(row["run"]).stage) not in LATER["stages"]}:
            raise ValueError(f"{runs} has runs of {', '.join(sorted(other))}; valid: {', '.join(LATER['stages'])}")
        found["training"] = [
            row for name in found["runs"] for row in whole_curve(Trial.parse(name["run"]), found, runs)
        ]
        collect.write(collect.merge(collect.read(TABLES), found), TABLES)
    for name, text in zip(("delay.md", "delay.csv"), delay.page(), strict=True):
        write_atomically(FIRST / name, text)
