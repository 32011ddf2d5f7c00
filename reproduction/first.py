"""The first protocol (docs/reproduction.md): its runs, which are those of tupe/experiments/plan.yaml, and its pages."""

import json
import os
from pathlib import Path

import click
import jinja2

from tupe.common import options, plotting, record
from tupe.common.options import ListOf
from tupe.common.tables import Table
from tupe.evaluation import minimal_pairs
from tupe.evaluation.loading import load_model
from tupe.evaluation.order import held_out_sentences, order_scores
from tupe.experiments import collect
from tupe.experiments.evidence import Evidence
from tupe.experiments.plan import PLAN, Trial, best_rates, final_losses, pilot_trials, planned_models, trials
from tupe.experiments.training import train, train_pilot
from tupe.text import TextEncoder

from . import tables
from .claims import CLAIMS, credits
from .figures import FIGURES

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs/evidence"
BEGIN, END = "<!-- results: written by `python -m reproduction claims`, not by hand -->", "<!-- end of the results -->"
PAGES = ["contrasts", "pilot", "first", "controls", "main", "longer"]  # beside docs/results.md, in the tables' folder

# ------------------------------------------------------------------------------------------------------------ the runs


def score(data: Path, trial: Trial, folder: Path, paradigms: list) -> None:
    """Order sensitivity and minimal pairs of a finished run, along training and at its end: order.json and
    pairs/<updates>/. What is there is kept, and a run that another process scores is left to it."""
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


@click.command("evidence", cls=options.QuietCommand, context_settings={"ignore_unknown_options": True})
@options.data("prepared text; the protocol's is in docs/reproduction.md")
@options.output("folder of the experiment; an existing one is resumed")
@click.option("--stages", type=ListOf(list(PLAN["stages"])), default=",".join(PLAN["stages"]), show_default=True)
@click.option("--models", type=ListOf(), help="only these")
@click.option("--seeds", type=ListOf(int), help="only these, instead of the stage's")
@options.jobs()
@click.option("--dry-run", is_flag=True, help="print the commands and run none")
@click.option(
    "--pairs", type=click.Path(path_type=Path), metavar="BLiMP.zip",
    help="train nothing; score finished runs, along training where weights were kept: order sensitivity, minimal "
    "pairs; several processes may share the work",
)  # fmt: skip
@click.argument("further", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF EVERY TRAINING]...")
def evidence_command(data, output, stages, models, seeds, jobs, dry_run, pairs, further):
    """Train and evaluate what the first protocol says, or a part of it.

    python -m reproduction evidence --data DATA --output evidence --stages pilot --jobs 2
    """
    data, output = data.resolve(), output.resolve()
    chosen = {stage: planned_models(stage, models) for stage in stages}
    for model in models or ():
        if not any(model in names for names in chosen.values()):
            valid = [name for stage in stages for name in planned_models(stage)]
            raise ValueError(f"no stage of {', '.join(stages)} has a model {model!r}{options.nearest(model, valid)}")
    paradigms = minimal_pairs.read_paradigms(pairs, CLAIMS["scoring"]["pairs"]) if pairs else None
    for stage in [stage for stage, names in chosen.items() if names]:
        losses = final_losses(output)
        if stage == "pilot" and not pairs:
            planned = pilot_trials(losses, seeds, models)
        else:
            planned = trials(stage, best_rates(losses)[0], seeds, models)
        if pairs:
            for trial in planned:
                score(data, trial, trial.folder(output), paradigms)
        elif dry_run:
            for trial in planned:
                click.echo(" ".join(map(str, trial.job(data, output, further).command)))
        elif stage == "pilot":
            train_pilot(data, output, jobs, further, seeds, models)
        else:
            train(data, output, planned, jobs, further)


# ----------------------------------------------------------------------------------------------------------- the pages


def missing(evidence: Evidence) -> list[str]:
    """What the pages need and the tables lack."""
    lacking = []
    for stage in PLAN["stages"]:
        there = evidence.best_rates if stage == "pilot" else evidence.finals(stage)
        if models := [model for model in planned_models(stage) if model not in there]:
            lacking.append(f"{stage} ({options.cut_list(models)})")
    if not any(credits(evidence, trial, trial.updates, only_order=False) for trial in evidence.trials("main")):
        lacking.append("minimal pairs of main (evidence --pairs)")
    if not evidence.tables["positional"]:
        lacking.append("positional logits of main (weights of tupe_a)")
    return lacking


def page(evidence: Evidence, name: str, figures: str = "../figures") -> str:
    """The text of one of `PAGES`, or what stands between the markers of another page: "results", "readme". figures:
    where they are, as the page names the folder. The evidence has to be whole (see `missing`)."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("pages")), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
        finalize=lambda value: value.markdown() if isinstance(value, Table) else value,
    )  # fmt: skip
    names = {**vars(tables), "evidence": evidence, "plan": PLAN["stages"], "figures": figures}
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
@click.option(
    "--runs", type=click.Path(path_type=Path, exists=True, file_okay=False), multiple=True,
    help="folder of `evidence`, whose finished runs are added first; repeatable",
)  # fmt: skip
@click.option(
    "--evidence", "folder", type=options.FOLDER, default=EVIDENCE,
    help="folder of the compressed tables (default: docs/evidence); of your own, the pages are written there, too",
)  # fmt: skip
@options.data("with --runs: folder of their data (default: the one that each run names)", required=False)
def claims_command(runs, folder, data):
    """The first protocol's pages, from the compressed tables of its runs; of a part of the runs, tables only.

    python -m reproduction claims --runs evidence
    """
    for output in runs:
        known = collect.read(folder)
        merged = collect.merge(known, collect.collect(output.resolve(), known, data))
        Evidence(merged)  # refuses what does not belong together, before it is written
        collect.write(merged, folder)
    evidence = Evidence(collect.read(folder))
    click.echo(f"{folder}: {len(evidence.runs)} runs")
    if lacking := missing(evidence):
        click.echo(f"no pages yet; missing: {'; '.join(lacking)}")
        return
    ours = folder.resolve() == EVIDENCE
    results = ROOT / "docs/results.md" if ours else folder / "results.md"
    if not results.exists():
        record.write_atomically(results, f"# Results\n\n{BEGIN}\n{END}\n")
    for figure in FIGURES:
        plotting.save(figure(evidence), results.parent / "figures" / f"claims_{figure.__name__}.png")
    for name in PAGES:
        place = os.path.relpath(results.parent / "figures", folder)
        record.write_atomically(folder / f"{name}.md", page(evidence, name, place))
    fill_in(results, page(evidence, "results", "figures"))
    if ours:
        fill_in(ROOT / "README.md", page(evidence, "readme"))
