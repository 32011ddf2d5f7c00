"""Running a sweep: `tupe sweep`."""

import shlex

import click

from ..common import options
from . import runner
from .collection import collect
from .grid import Sweep, parse_grid
from .report import write_report


@click.command(cls=options.Command, context_settings={"ignore_unknown_options": True})
@click.option("--recipe", default="finetune", show_default=True, help="The recipe: a file of configs/, without .yaml.")
@options.output("The folder of the sweep. An existing one is resumed, and a wider grid extends it.", shared=True)
@click.option(
    "--grid", multiple=True, metavar="NAME=A,B,...",
    help="An option (task, lr, seed, preset, max-epoch ...) or a value of the recipe (model.dropout), and what it "
    "takes. Can be repeated. Fine-tuning's defaults: all prepared tasks, the paper's lr 2e-5 to 5e-5, and its "
    "seeds 1 to 5.",
)  # fmt: skip
@click.option("--retry-failed", is_flag=True, help="Run failed jobs again, as killed ones always are.")
@options.jobs()
@click.option("--report", is_flag=True, help="Write OUTPUT/report at the end.")
@click.option("--dry-run", is_flag=True, help="Print the commands of all jobs, and run none.")
@click.argument("common", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS AND OVERRIDES OF EVERY JOB]...")
def command(recipe, output, grid, retry_failed, jobs, report, dry_run, common):
    """Run a recipe with every combination of the values of --grid, each in a process of its own.

    tupe sweep --recipe finetune --data glue-bin --checkpoint checkpoint_last.pt --output sweep --grid task=CoLA,RTE
    """
    sweep = Sweep.plan(recipe, output, parse_grid(grid), [*common, *options.position_file()])
    if dry_run:
        click.echo("\n".join(shlex.join(map(str, job.command)) for job in sweep.jobs))
        return
    known = earlier.grid if (earlier := Sweep.read(sweep.output)) else {}
    if any(set(values) - set(known.get(name, ())) for name, values in sweep.grid.items()):
        for job in sweep.samples:
            runner.check(job)
    sweep.save()
    states = runner.run(sweep.jobs, runner.slots(jobs), retry_failed)
    if report:
        write_report(collect([sweep.output]), sweep.output / "report")
    runner.exit_if_unfinished(states, "sweep")
