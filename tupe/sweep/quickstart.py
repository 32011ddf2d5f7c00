"""Parts of scripts/quickstart.sh: `python -m tupe.sweep.quickstart precision` and `... table OUTPUT`. `... page
OUTPUT` writes the table into docs/start.md."""

import json
import math
from pathlib import Path

import click

from ..checkpoints.trained import read_model
from ..common import record
from ..common.architectures import with_size
from ..common.options import CONFIGS, Command, QuietCommand
from ..common.tables import TextTable
from ..cpu import bf16_speed
from ..evaluate.probes import losses_of
from .summary import unigram_entropy

MODELS = {"bert_a": "BERT-A", "tupe_r": "TUPE-R"}
MARGIN = 0.3  # bits below the unigram entropy from which on something other than word frequencies was learned
FOOTER = """
Loss and entropy in bits per masked token. Order: per cent of held-out sentences that are likelier than the same with
two adjacent words swapped (50 is chance). One run each, tiny, on three million words: it shows which of the two finds
positions earlier here, and says nothing of models that are trained to the end. The experiment: docs/protocol.md."""
PAGE = CONFIGS.parents[1] / "docs" / "start.md"
BEGIN, END = (
    "<!-- written by python -m tupe.sweep.quickstart page, not by hand -->\n\n",
    "\n<!-- end of the table -->",
)


@click.group()
def main() -> None:
    pass


@main.command(cls=Command)
def precision():
    """Print the value of --autocast with which this CPU is faster."""
    click.echo("bf16" if bf16_speed() > 1.2 else "none")


@main.command(cls=QuietCommand)
@click.argument("output", type=click.Path(path_type=Path))
def table(output):
    """Print the quickstart's table; fails if a model learned no more than frequencies."""
    rows, failed = measured(output)
    click.echo(rows + FOOTER)
    if failed:
        raise ValueError("; ".join(["nothing was learned beyond word frequencies", *failed]))


@main.command(cls=QuietCommand)
@click.argument("output", type=click.Path(path_type=Path))
def page(output):
    """Write the quickstart's table into docs/start.md."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    record.write_atomically(PAGE, before + BEGIN + measured(output)[0] + END + rest.partition(END)[2])


def measured(output: Path) -> tuple[str, list[str]]:
    """(the table, what shows that a model learned no more than frequencies)."""
    rows, failed = [], []
    entropy = unigram_entropy(output / "data") / math.log(2)
    orders = json.loads((output / "order" / "order.json").read_text(encoding="utf-8"))
    for arch, name in MODELS.items():
        run = output / "models" / "presets" / with_size(arch, "tiny") / arch
        updates, losses = losses_of(run)
        last = run / "checkpoint_last.pt"
        weights = read_model(last if last.exists() else run, mmap=True).weights
        parameters = sum(value.numel() for value in weights.values() if value.is_floating_point())
        cells = [f"{name} tiny", f"{updates[-1]:,}", f"{parameters / 1e6:.2f} M"]
        rows.append([*cells, f"{losses[-1]:.2f}", f"{entropy:.2f}", f"{100 * orders[arch]['order']['accuracy']:.1f}"])
        if losses[-1] > entropy - MARGIN:
            failed.append(f"{name}: validation loss {losses[-1]:.2f} is not {MARGIN} below the entropy {entropy:.2f}")
    return TextTable.plain(
        ["model", "updates", "parameters", "validation loss", "unigram entropy", "order"], rows
    ).markdown(), failed


if __name__ == "__main__":
    main(prog_name="quickstart")
