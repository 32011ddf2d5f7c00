"""What came out of `python -m lab discover`: tables in docs/evidence/discovery, and from these alone the pictures and
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import spearmanr

from tupe.common import options
from tupe.common.tables import TextTable
from tupe.run import record
from tupe.run.folder import write_atomically

from . import plotting
from .collect import training_losses
from .delay import interval
from .discover import COOLDOWN, LENGTHS, RATES, SEEDS, TABLES, TEN, UPDATES, Run, others, read
from .estimates import first_below, number
from .known import FIRST, step_ratios

DOCS = FIRST.parent
PAGE, FIGURES = DOCS / "discovery.md", DOCS / "figures"
NEXT = "Next: [which encoding to take](schemes.md#which-encoding-should-i-take), or [compare your own](compare.md)."
EVERY, BELOW, LAST, SETTLED = 50, 0.5, 500, 300
BEST = 8  # how many encodings a need shows
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


# ------------------------------------------------------------------------------------------------------------ estimates


@dataclass(eq=False)
class Entry:
    """An encoding at its better rate. Of each seed: curves, final losses, exits (None: never), delays and offsets from
    RoPE at the same rate, of each seed that it has, too (None where one of both has not left the plateau)."""

    encoding: str
    rate: float
    curves: list[np.ndarray]
    losses: list[float]
    rows: list[dict]
    exits: list[float | None] = field(default_factory=list)
    delays: list[float | None] = field(default_factory=list)
    offsets: list[float | None] = field(default_factory=list)

    @property
    def name(self) -> str:
        return NAMES.get(self.encoding, f"`{self.encoding}`")

    @property
    def exit(self) -> float:
        """The mean of the seeds; infinite if one of them never leaves."""
        return math.inf if None in self.exits else statistics.mean(self.exits)

    @property
    def delay(self) -> float | None:
        return mean_of(self.delays)

    @property
    def offset(self) -> float | None:
        return mean_of(self.offsets)

    @property
    def loss(self) -> float:
        return statistics.mean(self.losses)

    @property
    def order(self) -> float:
        return statistics.mean(float(row["order"]) for row in self.rows)

    def change(self, length: int) -> float | None:
        """Bits by which the loss of the same tokens changes at a length; None for an encoding that cannot read it."""
        values = [row[f"change_{length}"] for row in self.rows]
        return statistics.mean(map(float, values)) if all(values) else None


def mean_of(values: list[float | None]) -> float | None:
    """None unless all of them are known."""
    return None if not values or None in values else statistics.mean(values)


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
    found = []
    for name, runs in best.items():
        entry = Entry(name, runs[0].rate, [np.array(curves[run]) for run in runs],
                      [float(rows[run]["loss"]) for run in runs], [rows[run] for run in runs])  # fmt: skip
        for run in runs:
            rope, exit = run._replace(encoding="rope"), exits[run]
            entry.exits.append(exit)
            if rope not in rows:  # has not run yet
                continue
            known = exit is not None and exits[rope] is not None
            entry.delays.append(exit - exits[rope] if known else None)
            entry.offsets.append(offset(curves[run], exit, curves[rope], exits[rope]) if known else None)
        found.append(entry)
    return sorted(found, key=lambda entry: entry.loss)


def offset(curve: list[float], exit: float, other: list[float], its_exit: float) -> float | None:
    """By how much a curve is above another one, both as many updates past their exits: the mean from `SETTLED` updates
    past the exit to the cool-down. None for fewer than 300 updates."""
    updates = np.arange(EVERY, UPDATES + 1, EVERY)
    past = np.arange(SETTLED, UPDATES - COOLDOWN - max(exit, its_exit) + 1, EVERY)
    if len(past) * EVERY < 300:
        return None
    one, two = (np.interp(start + past, updates, losses) for start, losses in ((exit, curve), (its_exit, other)))
    return float((one - two).mean())


def step_costs() -> dict[str, float]:
    """{encoding: median time of a step on a CPU over that without positions}: base size, 512 tokens."""
    of = {"untied, [CLS] untied (TUPE-A)": "tupe_a", "untied+t5, [CLS] untied (TUPE-R)": "tupe_r"}
    return {of.get(label, label.partition(" (")[0]): float(np.median(ratios))
            for label, ratios in step_ratios()[512].items()}  # fmt: skip


# -------------------------------------------------------------------------------------------------------- the pictures


def draw(found: list[Entry]) -> Figure:
    """One curve per encoding: the mean of its seeds with a thin band, the ten best known in colour with their names on
    the lines, the others grey."""
    updates = np.arange(EVERY, UPDATES + 1, EVERY)
    limits = min(entry.curves[0].min() for entry in found) - 0.2, 10.2
    figure, axis = lines(found, updates, lambda entry: np.array(entry.curves), beside=200, limits=limits)
    axis.set_xlim(0, UPDATES + 1350)
    axis.set_xticks(range(0, UPDATES + 1, 1000))
    axis.set_xlabel("updates")
    axis.set_ylabel("training loss, bits per masked token")
    return figure


def draw_lengths(found: list[Entry]) -> Figure:
    """The held-out loss of each encoding that can read more tokens than in training, plus its change at each length."""
    readers = [entry for entry in found if entry.change(LENGTHS[-1]) is not None]

    def losses(entry):  # [seeds, lengths]
        changes = [[0.0, *(float(row[f"change_{n}"]) for n in LENGTHS[1:])] for row in entry.rows]
        return np.array(entry.losses)[:, None] + np.array(changes)

    xs = np.log2(LENGTHS)
    limits = min(losses(entry).min() for entry in readers) - 0.2, max(entry.loss for entry in found) + 1.5
    figure, axis = lines(readers, xs, losses, beside=0.2, limits=limits)
    axis.set_xlim(xs[0] - 0.1, xs[-1] + 1.8)
    axis.set_xticks(xs, [f"{n:,}" for n in LENGTHS])
    axis.set_xlabel("tokens of an input")
    axis.set_ylabel("held-out loss at 64 tokens plus change, bits")
    return figure


def lines(
    found: list[Entry], xs: np.ndarray, values: Callable[[Entry], np.ndarray], beside: float,
    limits: tuple[float, float],
) -> tuple[Figure, Axes]:  # fmt: skip
    """(figure, axes) with a line for each entry. values: [seeds, xs] of an entry; limits: of the y axis. A line that
    leaves the picture has its name at the top. Of the grey lines, one that ends below all others has its name, too."""
    figure, axis = plotting.curves(height=4.6)
    ends = []
    lowest = min(found, key=lambda entry: values(entry).mean(axis=0)[-1])
    for entry in found:
        of_seeds = values(entry)
        mean = of_seeds.mean(axis=0)
        if entry.encoding not in TEN:
            axis.plot(xs, mean, color="#c8c8c8", linewidth=0.7, zorder=1)
            if entry == lowest:
                ends.append((mean[-1], entry.encoding, "#707070"))
            continue
        index = list(TEN).index(entry.encoding)
        colour, dash = TEN_COLOURS[index], plotting.DASHES[index % 4]
        axis.plot(xs, mean, color=colour, linestyle=dash, linewidth=1.6, zorder=3)
        if len(of_seeds) > 1:
            axis.fill_between(
                xs, of_seeds.min(axis=0), of_seeds.max(axis=0), color=colour, alpha=0.12, linewidth=0, zorder=2
            )
        ends.append((mean[-1], NAMES[entry.encoding], colour))
    axis.set_ylim(*limits)
    low, high = limits
    apart = 0.05 * (high - low)
    ends = [(min(end, high - apart), *rest) for end, *rest in ends]
    plotting.name_lines(axis, ends, xs[-1], beside=beside, apart=apart)
    return figure, axis


# ------------------------------------------------------------------------------------------------------------- the page


def span(values: list[float | None]) -> str:
    shown = [f"{value:,.0f}" for value in values if value is not None]
    never = len(values) - len(shown)
    return ", ".join(shown + ["never"] * never)


def table(found: list[Entry]) -> TextTable:
    rows, costs = [], step_costs()
    for entry in found:
        changes = [entry.change(n) for n in LENGTHS[1:]]
        lead = interval(entry.delays or [None], 0), interval(entry.offsets or [None])
        rows.append([
            entry.name, str(len(entry.rows)), f"{entry.rate:g}", span(entry.exits),
            *(("0", "0") if entry.encoding == "rope" else lead), interval(entry.losses), f"{100 * entry.order:.0f}",
            *("refused" if change is None else f"{change:+.2f}" for change in changes),
            f"{int(entry.rows[0]['parameters']):,}", number(costs.get(entry.encoding), 2),
        ])  # fmt: skip
    header = ["encoding", "runs", "rate", "exit", "delay", "offset", "loss", "order, %",
              *(f"{n:,} tokens" for n in LENGTHS[1:]), "parameters", "step"]  # fmt: skip
    return TextTable.plain(header, rows, align="l" + "r" * (len(header) - 1))


def means(found: list[Entry]) -> TextTable:
    """The same for programs, as a CSV: numbers alone, means of the seeds; nothing where a value is not known."""
    costs = step_costs()
    rows = [[
        entry.encoding, str(len(entry.rows)), f"{entry.rate:g}", number(entry.exit, 0) if entry.exit < math.inf else "",
        number(entry.delay, 0), number(entry.offset), number(entry.loss), number(entry.order),
        *(number(entry.change(n)) for n in LENGTHS[1:]), entry.rows[0]["parameters"],
        number(costs.get(entry.encoding), 2),
    ] for entry in found]  # fmt: skip
    header = ["encoding", "runs", "rate", "exit", "delay", "offset", "loss", "order",
              *(f"change_{n}" for n in LENGTHS[1:]), "parameters", "step"]  # fmt: skip
    return TextTable.plain(header, rows)


def needs(found: list[Entry]) -> TextTable:
    """The best of each need, the best first. A star marks a single run."""
    costs, longest = step_costs(), LENGTHS[-1]
    read_on = [entry for entry in found if entry.change(longest) is not None]
    ranked = {
        "a short training": ("exit, in updates", 0, {entry: entry.exit for entry in found if entry.exit < math.inf}),
        "a long training": ("offset, in bits", 2, {entry: entry.offset for entry in found if entry.offset is not None}),
        f"inputs of {longest:,} tokens": (
            "loss at 64 tokens plus change, in bits", 2,
            {entry: entry.loss + entry.change(longest) for entry in read_on},
        ),
        "a cheap step": ("time over that without positions", 2,
                         {entry: costs[entry.encoding] for entry in found if entry.encoding in costs}),
    }  # fmt: skip
    rows = []
    for need, (what, digits, values) in ranked.items():
        best = sorted(values, key=values.get)[:BEST]
        shown = [
            f"{one.name}{'*' if len(one.rows) == 1 else ''} {round(values[one], digits) + 0.0:,.{digits}f}"
            for one in best
        ]
        rows.append([need, what, ", ".join(shown)])
    return TextTable.plain(["you need", "sorted by", f"the first {BEST}"], rows, align="lll")


def predictions(found: list[Entry]) -> TextTable:
    """What the protocol predicted of the ten, and what came."""
    ten = {entry.encoding: entry for entry in found if entry.encoding in TEN}
    leaving = sorted((one for one in ten.values() if one.exit < math.inf), key=lambda one: one.exit)
    rope, tupe, absolute, sinusoidal = (ten[name] for name in ("rope", "tupe_r", "absolute", "sinusoidal"))
    correlation = spearmanr([one.exit for one in ten.values()], [one.loss for one in ten.values()]).statistic
    early = [one for one in leaving if one.exit < 1500 and one.offset is not None and one != rope]
    furthest = max(early, key=lambda one: one.offset)

    def exits(ones):
        return ", ".join(f"{one.name} {one.exit:,.0f}" for one in ones)

    judged = [
        ("RoPE and TUPE-R exit first", exits(leaving[:3]), {*leaving[:2]} == {rope, tupe}),
        ("They exit within 200 updates of each other", exits([rope, tupe]), abs(rope.exit - tupe.exit) <= 200),
        ("Absolute and sinusoidal exit last", exits(leaving[-3:]), {*leaving[-2:]} == {absolute, sinusoidal}),
        ("These two exit after update 1,500", exits([absolute, sinusoidal]),
         min(absolute.exit, sinusoidal.exit) > 1500),
        ("No positions never exits", span(ten["nopos"].exits), not any(ten["nopos"].exits)),
        ("Exits and losses correlate above 0.8", f"{correlation:.2f}", correlation > 0.8),
        ("Offsets are below 0.3 bits where the exit is before 1,500",
         f"the largest: {furthest.name} {furthest.offset:.2f}", furthest.offset < 0.3),
    ]  # fmt: skip
    rows = [[said, came, "yes" if holds else "no"] for said, came, holds in judged]
    return TextTable.plain(["prediction", "what came, mean of the seeds", "held"], rows, align="lll")


RESULTS = """## Results

![training loss by updates of all encodings](figures/discovery.png)

Each line is the mean of an encoding's seeds, and the band spans them. The ten ran at two rates, of which the better
one counts; the others are grey, most of them single runs. `python -m lab discovered` writes this from [the
tables](evidence/discovery/runs.csv), which name commit, machine and date of every run. [A
CSV](evidence/discovery/encodings.csv) has the means of this table. A step is timed [at base size with 512 tokens on a
CPU](benchmarks.md#encodings), over one without positions; on a GPU only TUPE-R's was, [11 to 41 %
longer](benchmarks.md). A higher rate leaves the plateau earlier, and costs something at the end, so delays and
offsets are from RoPE at the same rate. Losses and exits are not: compare those of one rate.

{table}{missing}
### By need

A star marks a single run. Neighbours in a row may change places with other seeds, and steps vary by 10 %.

{needs}
### Longer inputs

![held-out loss at 64 tokens plus its change in longer inputs](figures/discovery_lengths.png)

The models were trained on 64 tokens. Each line is the loss on 200,000 held-out tokens at 64 tokens, plus the change of
the loss of 900 other tokens in longer inputs. These are the middles of 100 windows, the same at every length, and
all of them are masked, which is harder: the loss itself was not measured on one text at all lengths. Encodings that
refuse longer inputs are not in the picture. A line that leaves it at the top is worse than no positions by more than
1.5 bits.
"""
PREDICTED = """
### The predictions

{predictions}"""


def results(found: list[Entry]) -> str:
    there = {entry.encoding for entry in found}
    missing = [f"`{name}`" for name in (*TEN, *others()) if name not in there]
    text = f"\nHave not run yet: {', '.join(missing)}.\n" if missing else ""
    page = RESULTS.format(table=table(found).markdown(), missing=text, needs=needs(found).markdown())
    if complete():
        page += PREDICTED.format(predictions=predictions(found).markdown())
    return page


def complete() -> bool:
    """Whether all runs of the ten are over."""
    rows, _ = read()
    return all(Run(name, rate, seed) in rows for name in TEN for rate in RATES for seed in SEEDS)


@click.command(cls=options.QuietCommand)
@click.option("--runs", type=options.FOLDER, help="The folder of `discover`, whose finished runs are added.")
def write_page(runs):
    """Draw when each encoding learned word order, from the committed tables."""
    if runs:
        collect(runs)
    found = entries()
    if not found:
        raise ValueError("no run of `nopos` and `rope` has finished: python -m lab discover")
    plotting.save(draw(found), FIGURES / "discovery.png")
    plotting.save(draw_lengths(found), FIGURES / "discovery_lengths.png")
    write_atomically(TABLES / "encodings.csv", means(found).csv())
    head = PAGE.read_text(encoding="utf-8").partition("## Results\n")[0].rstrip()
    write_atomically(PAGE, f"{head}\n\n{results(found)}".rstrip() + f"\n\n{NEXT}\n")
