"""How fast is the corpus pipeline here: python scripts/bench_corpus.py INPUT [INPUT ...]

Prints MB/s of raw text (CPU time) of each step on one core, then whole runs with one and with several processes
(wall-clock time, memory of the largest worker), on the sample and on `--times` as much of it, and what that means for a
job of `--target-gb`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import spacy
from sacremoses import MosesTokenizer

from tupe.corpus import steps as corpus
from tupe.corpus.readers import find_inputs, paragraphs, read
from tupe.corpus.steps import Stats
from tupe.text import Normaliser, _Aligned, _fold, _lower, _split_cached, _tokenise, clean


def load(inputs, limit):
    """Documents of the inputs, taken in turn from each of them, up to `limit` characters."""
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


def steps(documents):
    """[(step, MB/s)]: each step on the results of the one before it, and with empty caches, as a worker starts."""
    size = sum(len(d.text.encode("utf-8", "replace")) for d in documents) / 1e6
    rows = []

    def timed(name, function):
        for cache in (_fold, _lower, _split_cached, normaliser.split.kinds):
            cache.cache_clear()
        start = time.process_time()
        result = function()
        rows.append((name, size / max(time.process_time() - start, 1e-9)))
        return result

    normaliser = Normaliser()
    normaliser.normalise("Load the libraries, é. Before the clock runs.")
    raw = timed("paragraphs of markup or text", lambda: [paragraphs(d) for d in documents])
    timed("clean (part of the next)", lambda: [clean(p) for document in raw for p in document])
    cleaned = timed("clean, filter, join", lambda: [corpus.clean_paragraphs(p, Stats(), "") for p in raw])
    timed("hash", lambda: [corpus.document_hash(p) for p in cleaned])
    timed("sentence starts (part of the next)", lambda: [normaliser.split(p) for document in cleaned for p in document])
    tokens = timed("sentences and tokens", lambda: [[s for p in d for s in normaliser.sentences(p)] for d in cleaned])
    lines = [s.text for d in cleaned for p in d for s in normaliser._sentences(_Aligned(p))]
    timed("tokens (part of it)", lambda: [_tokenise(line.split()) for line in lines])
    nlp, moses = spacy.blank("en"), MosesTokenizer("en")
    nlp.add_pipe("sentencizer")
    nlp.max_length = 10**9
    timed("to compare: spaCy on paragraphs", lambda: [list(nlp(p).sents) for document in cleaned for p in document])
    timed("to compare: sacremoses on sentences", lambda: [moses.tokenize(line, escape=False) for line in lines])
    timed("MinHash (--near-duplicates)", lambda: [corpus.minhash([t for s in d for t in s]) for d in tokens if d])
    return rows


def run(path, folder, workers):
    """(seconds of all steps, {step: cost}) of a whole run, in a process of its own for the sake of its memory."""
    script = Path(__file__).with_name("prepare_corpus.py")
    options = {
        "out": folder,
        "vocab-size": 4096,
        "valid-fraction": 0.02,
        "workers": workers,
        "shard-mb": 1,
        "sample-mb": 5,
    }
    command = [sys.executable, script, path, *(f"--{name}={value}" for name, value in options.items())]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    costs = json.loads((folder / "speed.json").read_text())
    return sum(cost["seconds"] for cost in costs.values()), costs


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="INPUT")
    parser.add_argument("--mb", type=float, default=8, help="size of the sample (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--times", type=int, default=10, help="how much larger the second input is (default: %(default)s)"
    )
    parser.add_argument("--target-gb", type=float, default=16)
    parser.add_argument("--target-cores", type=int, default=32)
    args = parser.parse_args()
    documents = load(args.inputs, args.mb * 1e6)
    print(f"{len(documents)} documents; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n")
    print("| step, one core | MB/s |\n|---|---:|")
    for name, speed in steps(documents):
        print(f"| {name} | {speed:.2f} |", flush=True)

    print("\n| run | wall s | MB/s | CPU s | MB per CPU s | peak MB of a text worker |")
    print("|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        speeds = {}
        for times, workers in ((1, 1), (1, args.workers), (args.times, args.workers)):
            path = Path(folder) / f"{times}.jsonl"
            with path.open("w") as file:
                for i in range(times):
                    for d in documents:
                        text = "\n".join(paragraphs(d)) + (f"\nThis is copy number {i} of the document.") * (i > 0)
                        file.write(json.dumps({"text": text}) + "\n")
            size = path.stat().st_size / 1e6
            seconds, costs = run(path, Path(folder) / f"out-{times}-{workers}", workers)
            cpu = sum(cost["CPU seconds"] for cost in costs.values())
            speeds[times, workers] = size / seconds, size / cpu
            peak = costs["text"]["peak MB of a worker"]
            name = f"{size:.1f} MB, {workers} process{'es' * (workers > 1)}"
            print(
                f"| {name} | {seconds:.1f} | {size / seconds:.2f} | {cpu:.1f} | {size / cpu:.2f} | {peak} |", flush=True
            )
    ratio = speeds[1, args.workers][0] / speeds[1, 1][0]
    print(f"\n{args.workers} processes are {ratio:.2f} times as fast as one.")
    per_core = speeds[args.times, args.workers][1]
    hours = args.target_gb * 1000 / per_core / 3600
    print(
        f"{args.target_gb:g} GB at {per_core:.2f} MB per CPU second: {hours:.1f} core hours, "
        f"{hours / args.target_cores:.2f} hours on {args.target_cores} cores."
    )


if __name__ == "__main__":
    main()
