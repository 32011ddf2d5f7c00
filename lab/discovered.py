"""What came out of `python -m lab discover`: tables in docs/evidence/discovery, and from these alone the picture and
the results of docs/discovery.md.

    python -m lab discovered --runs OUT    add finished runs first

A curve is [updates / 50] means of the training loss in bits over the 50 updates before.
"""

import csv
import gzip
import io
import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
from matplotlib.figure import Figure

from tupe.common import options
from tupe.common.tables import TextTable
from tupe.run import record
from tupe.run.folder import write_atomically

from . import plotting
from .collect import training_losses
from .delay import interval
from .discover import COOLDOWN, LENGTHS, RATES, TEN, UPDATES, Run, others
from .estimates import first_below, number
from .known import FIRST

TABLES = FIRST / "discovery"
PAGE, PICTURE = FIRST.parent / "discovery.md", FIRST.parent / "figures" / "discovery.png"
EVERY, BELOW, LAST, SETTLED = 50, 0.5, 500, 300
COLUMNS = ("encoding", "rate", "seed", "loss", "order", *(f"change_{n}" for n in LENGTHS[1:]), "parameters", "device",
           "commit", "finished_at")  # fmt: skip
NAMES = {
    "nopos": "no positions", "rope": "RoPE", "tupe_r": "TUPE-R", "t5": "T5", "absolute": "absolute (BERT)",
    "alibi": "ALiBi", "tupe_a": "TUPE-A", "shaw": "Shaw", "deberta": "DeBERTa", "sinusoidal": "sinusoidal",
}  # fmt: skip


TEN_COLOURS = ["#707070", *plotting.INKS[:6], "#0E7490", "#882255", "#5A6B00"]  # of the ten, in their order


# -------------------------------------------------------------------------------------------------------------- tables


def facts(run: Run, folder: Path) -> dict:
    """The row of a finished run; losses in bits."""
    about = record.read(folder)
    found = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    changes = {row["length"]: row["difference"] for row in found["lengths"]}
    row = {**run._asdict(), "loss": number(found["loss"]["mean"] / math.log(2), 4), "order": found["order"]["accuracy"]}
    row |= {f"change_{n}": number(changes.get(n), 4) for n in LENGTHS[1:]}
    return row | {"parameters": found["parameters"], "device": about.device, "commit": about.commit,
                  "finished_at": about.finished_at}  # fmt: skip


def collect(output: Path) -> None:
    """Add the finished runs of a folder to the tables; those that are there already are replaced."""
    rows, curves = read()
    for path in sorted(output.glob("*/*/evaluation.json")):
        rate, _, seed = path.parent.name.removeprefix("lr").partition("_seed")
        run = Run(path.parent.parent.name, float(rate), int(seed))
        rows[run] = facts(run, path.parent)
        curves[run] = [float(loss) for loss, _ in training_losses(path.parent / "train.log").values()]
    TABLES.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[run] for run in sorted(rows))
    write_atomically(TABLES / "runs.csv", text.getvalue())
    lines = [",".join([*map(str, run), *(f"{loss:.3f}" for loss in curves[run])]) for run in sorted(curves)]
    write_atomically(TABLES / "curves.csv.gz", gzip.compress(("\n".join(lines) + "\n").encode(), mtime=0))


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


# ------------------------------------------------------------------------------------------------------------ estimates


@dataclass
class Entry:
    """An encoding at its better rate. Of each seed: curves, final losses, exits (None: never), delays and offsets from
    RoPE of the same seed (None where one of both has not left the plateau)."""

    encoding: str
    rate: float
    curves: list[np.ndarray]
    losses: list[float]
    rows: list[dict]
    exits: list[float | None] = field(default_factory=list)
    delays: list[float | None] = field(default_factory=list)
    offsets: list[float | None] = field(default_factory=list)


def entries() -> list[Entry]:
    """The encodings that have run, the lowest mean loss first."""
    rows, curves = read()
    by_rate = defaultdict(lambda: defaultdict(list))
    for run in sorted(rows):
        by_rate[run.encoding][run.rate].append(run)

    def loss(runs):
        return statistics.mean(float(rows[run]["loss"]) for run in runs)

    # Until the ten have run at both rates, they count at the one that all of them have: more tries find a lower loss.
    shared = set.intersection(*(set(rates) for name, rates in by_rate.items() if name in TEN), set(RATES))
    best = {}
    for name, rates in by_rate.items():
        counting = [runs for rate, runs in rates.items() if rate in shared or name not in TEN]
        best[name] = min(counting or rates.values(), key=loss)
    if "nopos" not in best or "rope" not in best:
        return []
    plateau = [
        curves[run][(UPDATES - COOLDOWN - LAST) // EVERY : (UPDATES - COOLDOWN) // EVERY] for run in best["nopos"]
    ]
    threshold = float(np.mean(plateau)) - BELOW
    updates = list(range(EVERY, UPDATES + 1, EVERY))
    exits = {run: first_below(updates, curves[run], threshold) for run in rows}
    ropes = {run.seed: run for run in best["rope"]}
    found = []
    for name, runs in best.items():
        entry = Entry(name, runs[0].rate, [np.array(curves[run]) for run in runs],
                      [float(rows[run]["loss"]) for run in runs], [rows[run] for run in runs])  # fmt: skip
        for run in runs:
            rope, exit = ropes.get(run.seed), exits[run]
            known = rope is not None and exit is not None and exits[rope] is not None
            entry.exits.append(exit)
            entry.delays.append(exit - exits[rope] if known else None)
            entry.offsets.append(offset(curves[run], exit, curves[rope], exits[rope]) if known else None)
        found.append(entry)
    return sorted(found, key=lambda entry: statistics.mean(entry.losses))


def offset(curve: list[float], exit: float, other: list[float], its_exit: float) -> float | None:
    """By how much a curve is above another one, both as many updates past their exits: the mean from `SETTLED` updates
    past the exit to the cool-down. None for fewer than 300 updates."""
    updates = np.arange(EVERY, UPDATES + 1, EVERY)
    past = np.arange(SETTLED, UPDATES - COOLDOWN - max(exit, its_exit) + 1, EVERY)
    if len(past) * EVERY < 300:
        return None
    one, two = (np.interp(start + past, updates, losses) for start, losses in ((exit, curve), (its_exit, other)))
    return float((one - two).mean())


# --------------------------------------------------------------------------------------------------------- the picture


def draw(found: list[Entry]) -> Figure:
    """One curve per encoding: the mean of its seeds with a thin band, the ten best known in colour with their names on
    the lines, the others grey."""
    figure, axis = plotting.curves(height=4.6)
    updates, ends = np.arange(EVERY, UPDATES + 1, EVERY), []
    for entry in found:
        mean = np.mean(entry.curves, axis=0)
        if entry.encoding not in TEN:
            axis.plot(updates, mean, color="#c8c8c8", linewidth=0.7, zorder=1)
            continue
        index = list(TEN).index(entry.encoding)
        colour, dash = TEN_COLOURS[index], plotting.DASHES[index % 4]
        axis.plot(updates, mean, color=colour, linestyle=dash, linewidth=1.6, zorder=3)
        if len(entry.curves) > 1:
            low, high = np.min(entry.curves, axis=0), np.max(entry.curves, axis=0)
            axis.fill_between(updates, low, high, color=colour, alpha=0.12, linewidth=0, zorder=2)
        ends.append((mean[-1], NAMES[entry.encoding], colour))
    plotting.name_lines(axis, ends, UPDATES, beside=200, apart=0.18)
    axis.set_xlim(0, UPDATES + 1350)
    axis.set_ylim(min(entry.curves[0].min() for entry in found) - 0.2, 10.2)
    axis.set_xticks(range(0, UPDATES + 1, 1000))
    axis.set_xlabel("updates")
    axis.set_ylabel("training loss, bits per masked token")
    return figure


# ------------------------------------------------------------------------------------------------------------- the page


def span(values: list[float | None]) -> str:
    shown = [f"{value:,.0f}" for value in values if value is not None]
    never = len(values) - len(shown)
    return ", ".join(shown + ["never"] * never)


def table(found: list[Entry]) -> TextTable:
    rows = []
    for entry in found:
        changes = []
        for n in LENGTHS[1:]:
            values = [row[f"change_{n}"] for row in entry.rows]
            changes.append(f"{statistics.mean(map(float, values)):+.2f}" if all(values) else "refused")
        order = 100 * statistics.mean(float(row["order"]) for row in entry.rows)
        rows.append([
            NAMES.get(entry.encoding, f"`{entry.encoding}`"), str(len(entry.rows)), f"{entry.rate:g}",
            span(entry.exits), interval(entry.delays, 0), interval(entry.offsets), interval(entry.losses),
            f"{order:.0f}", *changes, f"{int(entry.rows[0]['parameters']):,}",
        ])  # fmt: skip
    header = ["encoding", "runs", "rate", "exit", "delay", "offset", "loss", "order, %",
              *(f"{n:,} tokens" for n in LENGTHS[1:]), "parameters"]  # fmt: skip
    return TextTable.plain(header, rows, align="l" + "r" * (len(header) - 1))


RESULTS = """## Results

![training loss by updates of all encodings](figures/discovery.png)

Each line is the mean of an encoding's seeds, at the better of its two rates; the band spans the seeds, and a grey line
is a single run. `python -m lab discovered` writes this from [the tables](evidence/discovery/runs.csv), which name
commit, machine and date of every run.

{table}
{missing}
"""


def results(found: list[Entry]) -> str:
    there = {entry.encoding for entry in found}
    missing = [f"`{name}`" for name in (*TEN, *others()) if name not in there]
    text = f"Have not run yet: {', '.join(missing)}." if missing else ""
    return RESULTS.format(table=table(found).markdown(), missing=text)


@click.command(cls=options.QuietCommand)
@click.option("--runs", type=options.FOLDER, help="The folder of `discover`, whose finished runs are added.")
def write_page(runs):
    """Draw when each encoding learned word order, from the committed tables."""
    if runs:
        collect(runs)
    found = entries()
    if not found:
        raise ValueError("no run of `nopos` and `rope` has finished: python -m lab discover")
    plotting.save(draw(found), PICTURE)
    head = PAGE.read_text(encoding="utf-8").partition("## Results\n")[0].rstrip()
    write_atomically(PAGE, f"{head}\n\n{results(found)}".rstrip() + "\n")
