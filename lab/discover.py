"""When does each position encoding discover word order? Trains every encoding alike, by the protocol of
docs/discovery.md, and writes that page.

    python -m lab discover --data DATA --output OUT    train and evaluate what is left; resumes OUT

OUT/<encoding>/lr<rate>_seed<seed> is a run. Once it is over, evaluation.json holds what it was measured on. A run that
is in the committed tables (docs/evidence/discovery) is over, too.
"""

import csv
import gzip
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import click

from tupe import schemes  # noqa: F401  (registers all encodings)
from tupe.common import options
from tupe.common.prepared import text_encoder
from tupe.data.splits import Split
from tupe.evaluate.extrapolate import extrapolation
from tupe.evaluate.loading import load_model
from tupe.evaluate.order import evaluate
from tupe.positions import SCHEMES
from tupe.run.folder import lock, unlock, write_atomically
from tupe.sweep import runner

from . import cls as attention_of_cls
from .execute import check_data, clear_failure
from .known import FIRST

TABLES = FIRST / "discovery"

# {name: (position, [CLS])}: the ten best known, in the order of their runs.
TEN = {
    "nopos": ("nopos", "tied"), "rope": ("rope", "tied"), "tupe_r": ("untied+t5", "untied"), "t5": ("t5", "tied"),
    "absolute": ("absolute", "tied"), "alibi": ("alibi", "tied"), "tupe_a": ("untied", "untied"),
    "shaw": ("shaw", "tied"), "deberta": ("deberta", "tied"), "sinusoidal": ("sinusoidal", "tied"),
}  # fmt: skip
RATES, SEEDS = (1e-3, 2e-3), (1, 2, 3)
LENGTH, UPDATES, WARMUP, COOLDOWN = 64, 3000, 200, 600
TOKENS, SENTENCES, WINDOWS = 200_000, 1000, 100  # held-out tokens, sentences and windows of an evaluation
LENGTHS = [LENGTH, 2 * LENGTH, 4 * LENGTH, 16 * LENGTH]


class Run(NamedTuple):
    encoding: str
    rate: float
    seed: int

    def folder(self, output: Path) -> Path:
        return output / self.encoding / f"lr{self.rate:g}_seed{self.seed}"

    def job(self, data: Path, output: Path) -> runner.Job:
        position, cls = TEN.get(self.encoding, (self.encoding, "tied"))
        words = {
            "--recipe": "pretrain_small", "--data": data, "--output": self.folder(output), "--arch": "bert_a_tiny",
            "--position": position, "--cls": cls, "--lr": f"{self.rate:g}", "--seed": self.seed,
            "--tokens-per-sample": LENGTH, "--max-update": UPDATES, "--warmup-updates": WARMUP,
            "--lr-scheduler": "constant_cooldown", "--cooldown-updates": COOLDOWN, "--precision": "float32",
            "--num-workers": 0, "--validate-interval-updates": UPDATES, "--save-interval-updates": UPDATES,
            "--log-interval": 50, "common.log_format": "json", "common.fp16": "false",
        }  # fmt: skip
        return runner.Job(f"{self.encoding} {self.rate:g} {self.seed}", self.folder(output),
                          runner.tupe("pretrain", words))  # fmt: skip


def others() -> list[str]:
    """Every other encoding of the registry; a window, or a factor of the logits, is none by itself."""
    return [name for name in SCHEMES if name not in {*TEN, "untied", "window", "log_length"}]


def family(encoding: str) -> str:
    """The file in which an encoding's class is: where it acts."""
    return SCHEMES[TEN.get(encoding, (encoding,))[0].partition("+")[0]].__module__


def read() -> tuple[dict[Run, dict], dict[Run, list[float]]]:
    """({run: its row}, {run: its curve}) of the committed tables."""
    rows, curves = {}, {}
    if (TABLES / "runs.csv").exists():
        for row in csv.DictReader((TABLES / "runs.csv").open(encoding="utf-8")):
            rows[Run(row["encoding"], float(row["rate"]), int(row["seed"]))] = row
        for line in gzip.decompress((TABLES / "curves.csv.gz").read_bytes()).decode().splitlines():
            name, rate, seed, *losses = line.split(",")
            curves[Run(name, float(rate), int(seed))] = [float(loss) for loss in losses]
    return rows, curves


def final_loss(run: Run, output: Path, rows: dict[Run, dict]) -> float | None:
    """In bits, of a run that is over, here or in the committed tables."""
    path = run.folder(output) / "evaluation.json"
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))["loss"]["mean"] / math.log(2)
    return float(rows[run]["loss"]) if run in rows else None


def planned(output: Path, named: Sequence[str] = ()) -> dict[Run, float | None]:
    """{run: its final loss, None if it is not over}: the ten at all rates, seed by seed; when these are complete, every
    other one with seed 1, at the rate with the lower mean loss of the ten in its family. named: these encodings alone,
    at all rates and with all seeds."""
    rows, _ = read()
    every = [Run(name, rate, seed) for seed in SEEDS for rate in RATES for name in named or TEN]
    losses = {run: final_loss(run, output, rows) for run in every}
    if named or None in losses.values():
        return losses

    def mean(of, rate):
        return statistics.mean(loss for run, loss in losses.items() if family(run.encoding) == of and run.rate == rate)

    families = {family(name) for name in TEN}
    best = {of: min(RATES, key=lambda rate, of=of: mean(of, rate)) for of in families}
    more = [Run(name, best.get(family(name), RATES[0]), 1) for name in others()]
    return losses | {run: final_loss(run, output, rows) for run in more}


def evaluate_and_prune(data: Path, folder: Path, state: str) -> None:
    """Write evaluation.json of a finished run, then delete its checkpoints."""
    if state != "finished" or (folder / "evaluation.json").exists() or not lock(folder):
        return
    model, text = load_model(folder / "checkpoint_last.pt", data)
    content = evaluate(model, text, text_encoder(data), SENTENCES, TOKENS)
    del content["loss"]["blocks"]
    content["cls"] = attention_of_cls.ratios(model, text)
    stream = Split(text.data / "valid").tokens
    content["lengths"] = [asdict(loss) for loss in extrapolation(model, stream, LENGTHS, WINDOWS)]
    content["parameters"] = sum(p.numel() for p in model.tupe.encoder.positions.parameters())
    write_atomically(folder / "evaluation.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
    for path in folder.glob("checkpoint*.pt"):
        path.unlink()
    unlock(folder)


@click.command(cls=options.QuietCommand)
@options.data("The prepared text.")
@options.output("The folder of the runs. An existing one is resumed.", shared=True)
@click.option("--encoding", "named", multiple=True, type=click.Choice([*TEN, *others()]), metavar="NAME",
              help="Train this encoding alone, at both rates with all seeds. Repeat it for several.")  # fmt: skip
@options.jobs()
def run(data, output, named, jobs):
    """Train and evaluate what is left."""
    data, output = data.resolve(), output.resolve()
    check_data(data, output, TOKENS)
    known, states = set(), {}
    while new := {run: loss for run, loss in planned(output, named).items() if run not in known}:
        known.update(new)
        left = [run.job(data, output) for run, loss in new.items() if loss is None]
        for job in left:
            clear_failure(job.folder)
        states |= runner.run(left, runner.slots(jobs), title="discover",
                             on_done=lambda job, state: evaluate_and_prune(data, job.folder, state))  # fmt: skip
    runner.exit_if_unfinished(states, "discover")
