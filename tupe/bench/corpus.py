"""Speed of text preparation: each step on one core, then whole runs with one and with several processes."""

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import spacy
from sacremoses import MosesTokenizer

from ..common import options
from ..common.options import Command
from ..common.processes import PROGRAM, complete
from ..common.tables import TextTable
from ..corpus import steps as corpus
from ..corpus.readers import Document, find_inputs, paragraphs, read
from ..corpus.steps import Stats
from ..normaliser import CACHES, Aligned, Normaliser, clean, tokenise


def load(inputs: Sequence, limit: float) -> list[Document]:
    """Documents from each input in turn, up to `limit` characters."""
    readers = [read(source, "replace", Stats()) for source in find_inputs(inputs)[0]]
    documents, size = [], 0
    while readers and size < limit:
        for reader in list(readers):
            document = next(reader, None)
            if document is None:
                readers.remove(reader)
            else:
                documents.append(document)
                size += len(document.text)
    return documents


def steps(documents: list[Document]) -> list[tuple[str, float]]:
    """[(step, MB/s)]: each step on the results of the previous one, with empty caches, like a new worker."""
    size = sum(len(d.text.encode("utf-8", "replace")) for d in documents) / 1e6
    rows = []

    def timed(name, function):
        for cache in (*CACHES, normaliser.split.kinds):
            cache.cache_clear()
        start = time.process_time()
        result = function()
        rows.append((name, size / max(time.process_time() - start, 1e-9)))
        return result

    normaliser = Normaliser()
    normaliser.normalise("Load the libraries, é. Before the clock runs.")
    raw = timed("paragraphs of markup or text", lambda: [paragraphs(d) for d in documents])
    timed("clean (part of the next)", lambda: [clean(p) for document in raw for p in document])
    cleaned = timed("clean, filter, join", lambda: [corpus.clean_paragraphs(p, Stats(), "", normaliser) for p in raw])
    timed("hash", lambda: [corpus.document_hash(p) for p in cleaned])
    timed("sentence starts (part of the next)", lambda: [normaliser.split(p) for document in cleaned for p in document])
    tokens = timed("sentences and tokens", lambda: [[s for p in d for s in normaliser.sentences(p)] for d in cleaned])
    lines = [s.text for d in cleaned for p in d for s in normaliser.aligned_sentences(Aligned(p))]
    timed("tokens (part of it)", lambda: [tokenise(line.split()) for line in lines])
    nlp, moses = spacy.blank("en"), MosesTokenizer("en")
    nlp.add_pipe("sentencizer")
    nlp.max_length = 10**9
    timed("to compare: spaCy on paragraphs", lambda: [list(nlp(p).sents) for document in cleaned for p in document])
    timed("to compare: sacremoses on sentences", lambda: [moses.tokenize(line, escape=False) for line in lines])
    timed("MinHash (--near-duplicates)", lambda: [corpus.minhash([t for s in d for t in s]) for d in tokens if d])
    return rows


def run(path: Path, folder: Path, jobs: int, vocab_size: int) -> tuple[float, dict]:
    """(seconds of all steps, {step: cost}) of a whole run, in a separate process, so that its memory is its own. Raises
    ValueError with its last line if it fails."""
    choices = {
        "output": folder, "vocab-size": vocab_size, "valid-fraction": 0.02, "jobs": jobs, "shard-mb": 1, "sample-mb": 5,
    }  # fmt: skip
    complete([*PROGRAM, "prepare", "corpus", path, *(f"--{k}={v}" for k, v in choices.items())])
    costs = json.loads((folder / "speed.json").read_text())
    return sum(cost["seconds"] for cost in costs.values()), costs


def whole_runs(documents: list[Document], jobs: int, times: int, vocab_size: int) -> tuple[TextTable, dict]:
    """(table, {(times, jobs): (MB/s, MB per CPU second)}) of runs on the documents with one process and with `jobs`,
    and on `times` as many documents."""
    rows, speeds = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for copies, processes in ((1, 1), (1, jobs), (times, jobs)):
            path = Path(folder) / f"{copies}.jsonl"
            with path.open("w") as file:
                for i in range(copies):
                    for d in documents:
                        text = "\n".join(paragraphs(d)) + (f"\nThis is copy number {i} of the document.") * (i > 0)
                        file.write(json.dumps({"text": text}, allow_nan=False) + "\n")
            size = path.stat().st_size / 1e6
            seconds, costs = run(path, Path(folder) / f"output-{copies}-{processes}", processes, vocab_size)
            cpu = sum(cost["CPU seconds"] for cost in costs.values())
            speeds[copies, processes] = size / seconds, size / cpu
            name = f"{size:.1f} MB, {processes} process{'es' * (processes > 1)}"
            cells = f"{seconds:.1f}", f"{size / seconds:.2f}", f"{cpu:.1f}", f"{size / cpu:.2f}"
            rows.append([name, *cells, str(costs["text"]["peak MB of a worker"])])
    header = ["run", "wall s", "MB/s", "CPU s", "MB per CPU s", "peak MB of a text worker"]
    return TextTable.plain(header, rows), speeds


@click.command(cls=Command)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--mb", default=8.0, show_default=True, help="Megabytes of the sample.")
@options.jobs("Processes of the larger runs.", default=2, show_default=True)
@click.option("--times", type=click.IntRange(2), default=10, show_default=True,
              help="How many times the sample the last run reads.")  # fmt: skip
@options.vocab_size(4096)
@click.option("--target-gb", default=16.0, show_default=True, help="Gigabytes of the corpus to project to.")
@click.option("--target-cores", default=32, show_default=True, help="Cores of the machine to project to.")
def command(inputs, mb, jobs, times, vocab_size, target_gb, target_cores):
    """Measure how fast this machine prepares text.

    MB/s of raw text (CPU time) of each step on one core, then whole runs with one and with several processes
    (wall-clock time, memory of the largest worker), on the sample and on --times as much of it, and a projection to a
    corpus of --target-gb.
    """
    documents = load(inputs, mb * 1e6)
    click.echo(f"{len(documents)} documents; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    rows = [[name, f"{speed:.2f}"] for name, speed in steps(documents)]
    click.echo(TextTable.plain(["step, one core", "MB/s"], rows).markdown())
    table, speeds = whole_runs(documents, jobs, times, vocab_size)
    click.echo(table.markdown())
    ratio, per_core = speeds[1, jobs][0] / speeds[1, 1][0], speeds[times, jobs][1]
    hours = target_gb * 1000 / per_core / 3600
    click.echo(f"{jobs} processes are {ratio:.2f} times as fast as one.")
    click.echo(
        f"{target_gb:g} GB at {per_core:.2f} MB per CPU second: {hours:.1f} core hours, "
        f"{hours / target_cores:.2f} hours on {target_cores} cores."
    )
