"""The leaderboard (docs/leaderboard.md): every encoding by one protocol, `lab.standings`.

python -m lab leaderboard --data DATA --output OUT     train and evaluate what is left; an OUT is resumed
python -m lab standings --runs OUT                     add finished runs to the tables, write the page
python -m lab row --position X --data DATA --output O  train one encoding by the same protocol; its row beside them
"""

from pathlib import Path

import click

from tupe.common import options, record
from tupe.common.options import ListOf, did_you_mean
from tupe.positions import CLS
from tupe.sweep.compare import buildable

from . import collect, standings
from .standings import BLOCKS, ENCODINGS, LENGTH, PROTOCOL, Standings

DOCS = Path(__file__).parents[1] / "docs"
TABLES = DOCS / "evidence/leaderboard"
KEPT = ("order", "length", "encoding")  # measures in the tables
TITLES = {"bert": "The paper's block", "modern": "A modern block"}


@click.command("leaderboard", cls=options.QuietCommand, context_settings={"ignore_unknown_options": True})
@options.data("The folder of prepared text. docs/leaderboard.md says which text is the leaderboard's.")
@options.output("The folder of the runs. An existing one is resumed.", shared=True)
@click.option("--encodings", type=ListOf(), help="Run only these, in this order.")
@click.option(
    "--blocks", type=ListOf(list(BLOCKS)), default=",".join(BLOCKS), show_default=True, help="Run only these blocks."
)
@options.jobs()
@click.option("--dry-run", is_flag=True, help="Print the commands that are known, and run none.")
@click.argument("further", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF EVERY TRAINING]...")
def command(data, output, encodings, blocks, jobs, dry_run, further):
    """Train and evaluate what is left of the leaderboard, encoding by encoding. Stop it at any time.

    OMP_NUM_THREADS=1 python -m lab leaderboard --data DATA --output leaderboard --jobs 2
    """
    data, output = data.resolve(), output.resolve()
    for name in encodings or ():
        if name not in ENCODINGS:
            raise ValueError(f"unknown encoding {name!r}{did_you_mean(name, ENCODINGS)}")
    entries = [(name, block) for name in encodings or ENCODINGS for block in blocks]
    if not dry_run:
        standings.train_entries(data, output, entries, jobs, further)
        return
    losses = standings.final_losses(output)
    for trial in (trial for entry in entries for trial in standings.planned(losses, *entry)):
        if trial not in losses:
            click.echo(" ".join(map(str, standings.job(trial, data, output, further).command)))


@click.command("standings", cls=options.QuietCommand)
@click.option(
    "--runs", type=options.FOLDER, multiple=True,
    help="A folder of `leaderboard`, whose finished runs are added first. Can be repeated.",
)  # fmt: skip
@click.option(
    "--tables", type=options.FOLDER, default=TABLES,
    help="The folder of the compressed tables (default: docs/evidence/leaderboard, of which the page is made).",
)  # fmt: skip
@options.data("The folder of the data of --runs (default: the one that each run names).", required=False)
def standings_command(runs, tables, data):
    """The leaderboard's page, from the compressed tables of its runs; of runs of your own, the tables only.

    python -m lab standings --runs leaderboard
    """
    for output in runs:
        new = collect.collect(output.resolve(), data)
        new["blocks"] = []  # of every run 3,000 numbers
        new["measures"] = [row for row in new["measures"] if row["measure"] in KEPT]
        merged = collect.merge(collect.read(tables), new)
        Standings(merged)  # refuses what does not belong together, before it is written
        collect.write(merged, tables)
    known = collect.read(tables)
    click.echo(f"{tables}: {len(known['runs'])} runs")
    if tables.resolve() == TABLES:
        record.write_atomically(DOCS / "leaderboard.md", page(known))


@click.command("row", cls=options.QuietCommand, context_settings={"ignore_unknown_options": True})
@options.data("The folder of prepared text. docs/leaderboard.md says which text is the leaderboard's.")
@options.output("The folder of the runs. An existing one is resumed.", shared=True)
@click.option("--position", required=True, help="A position encoding by its name.")
@click.option("--arch", type=click.Choice([*BLOCKS.values()]), default=BLOCKS["bert"], help="The block.")
@click.option("--cls", type=click.Choice(CLS), help="How [CLS] is treated (default: tied).")
@click.option(
    "--tables", type=options.FOLDER, default=TABLES,
    help="The tables beside which it is shown (default: docs/evidence/leaderboard).",
)  # fmt: skip
@options.jobs()
@click.argument("further", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF EVERY TRAINING]...")
def row(data, output, position, arch, cls, tables, jobs, further):
    """Train one encoding by the leaderboard's protocol, and write OUTPUT/leaderboard.md with its row.

    python -m lab --position-file mine.py row --data DATA --output mine --position mine --jobs 2
    """
    arch, position, cls = buildable(position, arch, cls)
    further = (*further, *options.position_file())
    standings.run(data.resolve(), output.resolve(), position, arch, cls, jobs, further, tables)


def page(tables: dict[str, list[dict]]) -> str:
    """docs/leaderboard.md, only from the committed tables."""
    board, rates = Standings(tables), [f"{rate:g}" for rate in sorted(PROTOCOL["learning_rates"])]
    lengths = [str(multiple * LENGTH) for multiple in PROTOCOL["multiples"]]
    facts = {
        **PROTOCOL, "updates": f"{PROTOCOL['updates']:,}", "rates": ", ".join(rates), "first": lengths[0],
        "data": ", ".join(sorted({row["data"] for row in tables["runs"]} - {""})) or "no runs yet",
        "others": ", ".join(lengths[1:]), "tokens": f"{PROTOCOL['tokens']:,}", "options": " ".join(PROTOCOL["options"]),
    }  # fmt: skip
    text = Path(__file__).with_suffix(".md").read_text(encoding="utf-8").format(**facts)
    for block, arch in BLOCKS.items():
        text += f"\n## {TITLES[block]}: `{arch}_{PROTOCOL['size']}`\n\n{board.table(block).markdown()}"
    return text
