"""A trained model of either protocol as a Hugging Face folder with a model card. The weights are those that training
keeps, in half precision; the scores of the card come from the tables in docs/evidence."""

import re
from pathlib import Path

import click
import jinja2
import numpy as np

from tupe import __version__
from tupe.checkpoints.export import export
from tupe.common import options
from tupe.common.record import write_atomically
from tupe.experiments.statistics import number

from . import collect
from .claims import credits, pairs_accuracy
from .evidence import Evidence
from .plan import PLAN, Trial
from .second_page import PAIRS, zorro_scores
from .second_plan import FIRST, TABLES

TITLES = {
    "bert_a": "BERT-A: learned absolute positions, added to the words",
    "tupe_r": "TUPE-R: untied word and position terms, a relative bias, [CLS] untied from positions",
}


def of_both_protocols() -> Evidence:
    """The committed runs of the first protocol and of the second."""
    first, second = collect.read(FIRST), collect.read(TABLES)
    return Evidence({name: rows + second[name] for name, rows in first.items()})


def card(evidence: Evidence, trial: Trial) -> str:
    """The text of the model card. Raises ValueError if the run is not among the finished ones."""
    if trial not in evidence.runs:
        names = [str(other) for other in evidence.runs]
        raise ValueError(f"no finished run {str(trial)!r}{options.did_you_mean(str(trial), names)}")

    def order(part):
        return number(evidence.final_measure("order", part)(trial), 3)

    scores = {
        "held-out loss, bits per masked token": f"{evidence.loss(trial):.3f}",
        "original sentence preferred to two swapped words (0.5: chance)": order("accuracy"),
        "... by how much, nats per sentence": order("margin"),
    }
    every, only_order = (pairs_accuracy(evidence, trial, trial.updates, only) for only in (False, True))
    if every is not None:
        count = sum(map(len, credits(evidence, trial, trial.updates, only_order=False).values()))
        scores[f"BLiMP, {count:,} pairs, macro average"] = f"{100 * every:.1f} %"
        scores["BLiMP, pairs whose words differ in order alone (50 %: chance)"] = f"{100 * only_order:.1f} %"
    name = f"{trial.model}_{trial.size}"
    if zorro := zorro_scores().get(f"models/{name}"):
        title = f"Zorro, the first {PAIRS} pairs of {len(zorro)} paradigms, macro average (50 %: chance)"
        scores[title] = f"{100 * np.mean(list(zorro.values())):.1f} %"
    same = {"model", "size", "updates", "seed"}
    others = [run for run in evidence.runs if run != trial and all(getattr(run, n) == getattr(trial, n) for n in same)]
    attention = [float(row["value"]) for row in evidence.measures(trial, "cls attention")]
    loader = jinja2.FileSystemLoader(Path(__file__).parent)
    template = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True).get_template("card.jinja")
    return template.render(
        title=TITLES.get(trial.model, trial.model), name=name, trial=trial,
        position=PLAN["models"][trial.model],
        row=evidence.runs[trial], scores=scores, version=__version__, only_order=every is not None,
        others=others, runs=evidence.runs, losses={run: evidence.loss(run) for run in others},
        cls=f"{np.mean(attention):.2f}" if attention else "not measured",
    )  # fmt: skip


def renewed(evidence: Evidence, text: str) -> str:
    """The card of a released model as the tables are now, from its own text. The version that wrote it stays."""
    trial = Trial.parse(re.search(r"one run, `(.*)`", text)[1])
    version = re.search(r", tupe ([\w.]+)\. ", text)[1]
    return card(evidence, trial).replace(f", tupe {__version__}. ", f", tupe {version}. ")


@click.command("release", cls=options.Command)
@click.option("--runs", type=options.FOLDER, required=True, help="The folder of `evidence` or of `run`.")
@click.option("--run", required=True, metavar="STAGE/MODEL/SIZE_UPDATES_lrRATE_seedSEED", help="A folder in it.")
@click.option("--evidence", type=options.FOLDER, help="The tables of scores (default: both protocols').")
@options.data("The folder of dict.txt and the pieces.")
@options.output("The folder to write.")
def command(runs, run, evidence, data, output):
    """Write a trained model of the experiment as a Hugging Face folder with a model card, in half precision.

    python -m lab release --runs evidence --run main/tupe_r/mini_5000_lr0.002_seed1 --data DATA --output out

    Zorro's score is in the card once `python -m lab zorro` has run on the folder in models/.
    """
    trial = Trial.parse(run)
    text = card(Evidence(collect.read(evidence)) if evidence else of_both_protocols(), trial)
    weights = trial.folder(runs) / "model.pt"
    if not weights.exists():
        raise ValueError(f"{weights} not found: give the folder of runs that was trained here")
    export(weights, output, data, code=False)
    write_atomically(output / "README.md", text)
    size = sum(path.stat().st_size for path in output.iterdir())
    click.echo(f"{output}: {size / 1e6:.1f} MB")
