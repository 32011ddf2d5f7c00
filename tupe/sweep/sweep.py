"""Running a sweep: `tupe sweep`."""

import itertools
import json
import shlex
import shutil
from functools import partial
from pathlib import Path

import click

from ..common import options, record
from . import runner
from .grid import Sweep, parse_grid

KEPT = (record.NAME, "train.log", "lock", "predictions")  # of the folder of a fine-tuning that is over


def keep_best_checkpoint(sweep: Sweep, job: runner.Job, state: str) -> None:
    """Leave no checkpoint in the folder of a fine-tuning run that is over, and the best of its task, if wanted,
    beside the runs of that task, in the folder best."""
    if sweep.recipe != "finetune":
        return
    checkpoint, place = job.folder / "best", job.folder.parent
    if state == "finished" and (job.folder / "config.json").is_file():
        checkpoint.mkdir(exist_ok=True)
        for path in sorted(job.folder.glob("*.*")):
            if path.is_file() and path.name not in KEPT and path.suffix != ".pt":
                path.replace(checkpoint / path.name)
    if sweep.keep_best and state == "finished":
        metric, score = record.read(job.folder).best()
        best = place / "best.json"
        with record.locked(place / "best.lock"):
            known = json.loads(best.read_text()) if best.exists() else None
            if checkpoint.exists() and (not known or score > known["score"] or known["run"] == job.folder.name):
                content = {"score": score, "metric": metric, "run": job.folder.name}
                # first: a start after a kill does the rest
                record.write_atomically(best, json.dumps(content, allow_nan=False) + "\n")
                shutil.rmtree(place / checkpoint.name, ignore_errors=True)
                checkpoint.replace(place / checkpoint.name)
    if state in ("finished", "failed"):
        found = (job.folder.glob(pattern) for pattern in ("*.pt", "checkpoint-*", "best", "partial"))
        for path in itertools.chain(*found):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def write_report(folder: Path, **options) -> None:
    """`tupe report` of a folder of runs, into FOLDER/report."""
    from . import report  # only now: fairseq and matplotlib take seconds to import

    click.get_current_context().invoke(report.command, runs=(folder,), output=folder / "report", **options)


@click.command(cls=options.Command, context_settings={"ignore_unknown_options": True})
@click.option("--recipe", default="finetune", show_default=True, help="The recipe: a file of configs/, without .yaml.")
@options.output("The folder of the sweep. An existing one is resumed, and a wider grid extends it.")
@click.option(
    "--grid", multiple=True, metavar="NAME=A,B,...",
    help="An option (task, lr, seed, preset, max-epoch ...) or a value of the recipe (model.dropout), and what it "
    "takes. Can be repeated. Fine-tuning's defaults: all prepared tasks, the paper's lr 2e-5 to 5e-5, and its "
    "seeds 1 to 5.",
)  # fmt: skip
@click.option(
    "--keep-best", is_flag=True, help="Keep the best checkpoint of each task. Otherwise fine-tuning leaves none."
)
@click.option("--retry-failed", is_flag=True, help="Run failed jobs again, as killed ones always are.")
@options.jobs()
@click.option("--report", is_flag=True, help="Write OUTPUT/report at the end.")
@click.option("--dry-run", is_flag=True, help="Print the commands of all jobs, and run none.")
@click.argument("common", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS AND OVERRIDES OF EVERY JOB]...")
def command(recipe, output, grid, keep_best, retry_failed, jobs, report, dry_run, common):
    """Run a recipe with every combination of the values of --grid, each in a process of its own.

    tupe sweep --recipe finetune --data glue-bin --checkpoint checkpoint_last.pt --output sweep --grid task=CoLA,RTE
    """
    sweep = Sweep.plan(recipe, output, parse_grid(grid), [*common, *options.position_file()], keep_best)
    if dry_run:
        click.echo("\n".join(shlex.join(map(str, job.command)) for job in sweep.jobs))
        return
    known = earlier.grid if (earlier := Sweep.read(sweep.output)) else {}
    if any(set(values) - set(known.get(name, ())) for name, values in sweep.grid.items()):
        for job in sweep.samples:
            runner.check(job)
    sweep.save()
    states = runner.run(sweep.jobs, runner.slots(jobs), retry_failed, partial(keep_best_checkpoint, sweep))
    if report:
        write_report(sweep.output)
    runner.exit_if_unfinished(states, "sweep")
