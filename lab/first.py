"""The first protocol (docs/protocol.md): its runs, which are those of tupe/experiments/plan.yaml, and its pages."""

import functools
from pathlib import Path

import click
import jinja2

from tupe.common import options, plotting, record
from tupe.common.options import ListOf
from tupe.common.tables import TextTable

from . import collect, delay, second_page, tables
from .evidence import Evidence
from .figures import FIGURES
from .plan import PLAN, check_models, final_losses, planned_models, trials
from .training import train, train_stage

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs/evidence"
BEGIN, END = "<!-- written by `python -m lab claims` -->", "<!-- end -->"
PAGES = ["contrasts", "pilot", "first", "controls", "main", "longer"]  # beside docs/results.md, in the tables' folder

# ------------------------------------------------------------------------------------------------------------ the runs


@click.command("evidence", cls=options.QuietCommand, context_settings={"ignore_unknown_options": True})
@options.data("The prepared text; docs/protocol.md says how the protocol's is made.")
@options.output("The folder of the experiment. An existing one is resumed.")
@click.option("--stages", type=ListOf(list(PLAN["stages"])), default=",".join(PLAN["stages"]), show_default=True,
              help="Stages of the experiment to run.")  # fmt: skip
@click.option("--models", type=ListOf(), help="Run only these models.")
@click.option("--seeds", type=ListOf(int), help="Run only these seeds of a stage.")
@options.jobs()
@click.option("--dry-run", is_flag=True, help="Print the commands, and run none.")
@click.argument("further", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF EVERY TRAINING]...")
def evidence_command(data, output, stages, models, seeds, jobs, dry_run, further):
    """Train and evaluate what the first protocol says, or a part of it.

    python -m lab evidence --data DATA --output evidence --stages pilot --jobs 2
    """
    data, output = data.resolve(), output.resolve()
    check_models(models, stages)

    def planned(stage):
        found, names = trials(stage, final_losses(output), models=models, seeds=seeds), planned_models(stage)
        if unknown := {name for name in names if not models or name in models} - {trial.model for trial in found}:
            raise ValueError(f"no learning rate for {', '.join(sorted(unknown))}: finish the stage pilot first")
        return found

    for stage in stages:
        if dry_run:
            for trial in planned(stage):
                click.echo(" ".join(map(str, trial.job(data, output, further).command)))
        else:
            train_stage(functools.partial(planned, stage), lambda new: train(data, output, new, jobs, further))


# ----------------------------------------------------------------------------------------------------------- the pages


def page(evidence: Evidence, name: str) -> str:
    """The text of one of `PAGES`, or what stands between the markers of another page: "results", "readme"."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("pages")), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: value.markdown() if isinstance(value, TextTable) else value,
    )  # fmt: skip
    names = {**vars(tables), "evidence": evidence, "plan": PLAN["stages"]}
    names |= {"second": second_page, "delay": delay}
    return environment.get_template(f"{name}.jinja").render(names)


def fill_in(file: Path, text: str) -> None:
    """Replace what stands between the markers of a page. Raises ValueError if they are not there."""
    content = file.read_text(encoding="utf-8")
    if content.count(BEGIN) != 1 or content.count(END) != 1:
        raise ValueError(f"{file} needs the lines {BEGIN!r} and {END!r}, once each")
    before, _, rest = content.partition(BEGIN)
    after = rest.partition(END)[2]
    record.write_atomically(file, f"{before}{BEGIN}\n\n{text}\n{END}{after}")


@click.command("claims", cls=options.QuietCommand)
@click.option("--runs", type=click.Path(path_type=Path, exists=True, file_okay=False), multiple=True,
              help="A folder of `evidence`, whose finished runs are added first. Can be repeated.")  # fmt: skip
@click.option("--evidence", "folder", type=options.FOLDER, default=EVIDENCE,
    help="The folder of the compressed tables (default: docs/evidence, of which the pages are made).")  # fmt: skip
@options.data("The data of --runs (default: what each run names).", required=False)
def claims_command(runs, folder, data):
    """The first protocol's pages, from the compressed tables of its runs; of runs of your own, the tables only.

    python -m lab claims --runs evidence
    """
    for output in runs:
        known = collect.read(folder)
        merged = collect.merge(known, collect.collect(output.resolve(), data))
        Evidence(merged)  # refuses what does not belong together, before it is written
        collect.write(merged, folder)
    evidence = Evidence(collect.read(folder))
    click.echo(f"{folder}: {len(evidence.runs)} runs")
    if folder.resolve() != EVIDENCE:
        return
    for figure in FIGURES:
        plotting.save(figure(evidence), ROOT / "docs/figures" / f"claims_{figure.__name__}.png")
    for name in PAGES:
        record.write_atomically(folder / f"{name}.md", page(evidence, name))
    fill_in(ROOT / "docs/results.md", page(evidence, "results"))
    fill_in(ROOT / "README.md", page(evidence, "readme"))
