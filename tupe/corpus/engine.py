"""Runs the steps of `tupe.corpus.steps` over shards: in this process, in several, or on a cluster. A run can be
killed at any moment and continues when it is started again."""

import concurrent.futures
import contextlib
import errno
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import resource
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from .. import __version__
from ..common import options, processes
from ..common.options import Command, shorten
from ..common.prepared import check_name, tasks_in
from ..common.record import naming, write_atomically
from ..normaliser import SENTENCES
from ..text import PaperText, TextEncoder, TokenizerText
from . import steps as corpus
from .readers import FIELD, find_inputs, packages
from .report import write_report
from .steps import Stats
from .vocabulary import SPECIALS, TRAINED, read_tokenizer

ENGINES = ("local", "dask")
INDICES = ("train.idx", "valid.idx")
# All that a run puts into its folder beside `work`. What else is there is another's.
WRITTEN = (*INDICES, "train.bin", "valid.bin", *TextEncoder.FILES, "report.md", "report.png", "speed.json")


def run_task(function: Callable, target: Path, args: tuple) -> dict:
    """Run function(folder, *args) on a new folder, which is renamed to `target` only when all is written. Returns
    {"cpu": seconds, "peak": bytes of memory}."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    folder.mkdir()
    start = time.process_time()
    try:
        with naming(target):
            function(folder, *args)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # else another process has just done the same work, with the same result
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"cpu": time.process_time() - start, "peak": peak}


@contextlib.contextmanager
def _executor(engine, workers, scheduler):
    """An executor as in concurrent.futures, or None to run the tasks in this process."""
    if engine == "dask":
        from distributed import Client, KilledWorker

        try:
            with Client(scheduler, set_as_default=False) as client:
                yield client.get_executor(pure=False)
        except KilledWorker as error:
            raise concurrent.futures.BrokenExecutor from error
    elif workers == 1:
        yield None
    else:
        tqdm.monitor_interval = 0  # no monitor thread: forking a process that has threads is unsafe
        with processes.workers(workers) as pool:
            yield pool


class Preparation:
    """One run into the folder `out`; its intermediate files are in out/work."""

    def __init__(self, out: str | Path, engine: str, workers: int, scheduler: str | None):
        self.out, self.work = Path(out), Path(out) / "work"
        self.engine, self.workers, self.scheduler = engine, workers, scheduler
        self.costs = {}

    def step(self, name: str, function: Callable, tasks: list, in_process: bool = False) -> list[Path]:
        """Run the tasks of a step that are not finished yet; returns the folders of all, in order.

        `tasks`: [(task name, bytes of raw text, arguments), ...]. The name of a folder has a hash of the arguments,
        which include the folders of earlier steps: so results from other inputs or options are never taken for these.
        `in_process`: run in this process.
        Raises ValueError if a worker dies or the disk fails; finished tasks are kept.
        """
        targets = [self.work / name / f"{task}-{self._key(args)}" for task, _, args in tasks]
        todo = [
            (target, size, args) for target, (_, size, args) in zip(targets, tasks, strict=True) if not target.is_dir()
        ]
        total = sum(size for _, size, _ in tasks)
        start = time.perf_counter()
        costs = []
        bar = tqdm(
            total=total, initial=total - sum(size for _, size, _ in todo), desc=f"{name:10}", unit="B", unit_scale=True
        )
        with bar:
            try:
                if todo:
                    executor = _executor(self.engine, self.workers, self.scheduler)
                    with contextlib.nullcontext() if in_process else executor as pool:
                        run = functools.partial(self._run_in_pool, pool) if pool else self._run_in_process
                        run(function, todo, bar, costs)
            except concurrent.futures.BrokenExecutor as error:
                raise ValueError(
                    f"a worker process of the step {name!r} died (killed, or out of memory?); what is finished is "
                    "kept: the same command continues from there; use fewer --jobs if memory ran out"
                ) from error
            except OSError as error:
                full = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "cannot read or write"
                raise ValueError(
                    f"step {name!r}: {full}: {error}; what is finished is kept: the same command continues"
                ) from error
        if costs:
            self.costs[name] = {
                "MB": round(sum(size for _, size, _ in todo) / 1e6, 3),
                "seconds": round(time.perf_counter() - start, 2),
                "CPU seconds": round(sum(cost["cpu"] for cost in costs), 2),
                "peak MB of a worker": round(max(cost["peak"] for cost in costs) / 1e6),
            }
        return targets

    def _key(self, args):
        """A hash of a task's arguments that does not depend on where the run's folder is."""
        text = repr(args).replace(str(self.work), "")
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()

    def _run_in_process(self, function, todo, bar, costs):
        for target, size, args in todo:
            costs.append(run_task(function, target, args))
            bar.update(size)

    def _run_in_pool(self, pool, function, todo, bar, costs):
        futures = {pool.submit(run_task, function, target, args): size for target, size, args in todo}
        try:
            for future in concurrent.futures.as_completed(futures):
                costs.append(future.result())
                bar.update(futures[future])
        except BaseException:
            for future in futures:
                future.cancel()  # running tasks finish, and their results are kept, unless a signal ends this process
            raise


@contextlib.contextmanager
def _locked(out):
    """Lock the folder `out`. Raises BlockingIOError if another process prepares it. The lock ends with this process,
    not with its workers (as a lock of `flock` would), so that after a kill the same command can continue at once."""
    path = out.parent / f".{out.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("w")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise BlockingIOError(f"another process is preparing {out}; wait, or choose another folder") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(path, file.fileno()):
                break
        file.close()  # the previous process has just ended and removed its file
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _command(settings):
    """The settings without the inputs' sizes and times: a run continues after a damaged file was replaced."""
    return {**settings, "inputs": [path for path, *_ in settings["inputs"]]}


def _claim(out, settings, overwrite):
    """Make `out` ready for a run with these settings. Returns whether that run is finished already."""
    manifest, begun = out / "manifest.json", out / "work" / "command.json"
    current, earlier = _command(settings), json.loads(begun.read_text()) if begun.is_file() else {}
    piped = "-" in current["inputs"]  # the text may be different this time
    finished = manifest.is_file()
    whole = finished and all((out / name).is_file() for name in INDICES)  # see `_remove`
    if whole and not piped and json.loads(manifest.read_text()).get("settings") == settings:
        return True
    # An unfinished run continues with other options too, and reuses the steps that they leave as they are.
    continues = all(earlier.get(key) == current[key] for key in ("version", "inputs"))
    if out.is_dir() and any(out.iterdir()) and (finished or not continues):
        if not overwrite:
            raise ValueError(
                f"{out} is not empty, and its files come from other inputs or options, or not all are there; choose "
                "another folder, or replace them with --overwrite"
            )
        if not (whole or begun.is_file()):
            raise ValueError(f"{out} is not a data directory: empty it yourself, or choose another folder")
        if tasks := tasks_in(out):
            raise ValueError(
                f"{out} also holds {', '.join(tasks)}, prepared with the vocabulary that --overwrite would replace; "
                "move them, or choose another folder"
            )
        if not continues:
            shutil.rmtree(begun.parent, ignore_errors=True)
    if continues and earlier != current:
        shutil.rmtree(begun.parent / "merge", ignore_errors=True)  # its files may have been moved out
    if not finished and earlier != current:  # finished data stay until the new ones are complete
        _remove(out)
    begun.parent.mkdir(parents=True, exist_ok=True)
    # Remove half-written folders; for piped text, which may be different this time, all of them.
    for stale in begun.parent.glob("*/*" if piped else "*/.*"):
        shutil.rmtree(stale)
    for name in WRITTEN:
        for stale in out.glob(f"{name}.*.partial"):
            stale.unlink()
    write_atomically(begun, json.dumps(current, allow_nan=False))
    return False


def _remove(out):
    """Remove what a run has put into `out`, an index first and the manifest last: after a kill the data are not whole,
    and the same command still knows them."""
    for name in sorted(WRITTEN, key=lambda name: name == "manifest.json"):
        (out / name).unlink(missing_ok=True)


def _groups(inputs, shard_bytes):
    """Inputs in groups of about a shard; compressed text counts four times."""
    group, size = [], 0
    for source in inputs:
        group.append(source)
        size += source.size * (4 if source.path.endswith((".gz", ".bz2", ".xz", ".zst")) else 1)
        if size >= shard_bytes or source.path == "-":
            yield group
            group, size = [], 0
    if group:
        yield group


def _too_few(left: int, place: str, stats: Stats, copies: int = 0) -> ValueError:
    """The error for fewer than two documents, with the reasons why others were dropped."""
    reasons = [
        f"{reason} ({sum(domains.values())}, the first: {shorten(stats.samples[reason][0])})"
        for reason, domains in sorted(stats.dropped.items())
    ] + [f"copies of other documents ({copies})"] * bool(copies)
    if not left and not reasons:
        place += ": white space alone"
    return ValueError(
        f"{left or 'no'} document {place}"
        + "; training and validation need one each (in .txt files, empty lines separate documents)" * bool(left)
        + f"; dropped: {'; '.join(reasons)}" * bool(reasons)
    )


def _check_packages(sources, near_duplicates, engine):
    needed = {name: source.path for source in reversed(sources) for name in packages(source)}
    needed |= {"datasketch": "--near-duplicates"} if near_duplicates else {}
    needed |= {"distributed": "--engine dask"} if engine == "dask" else {}
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        what = ", ".join(f"{needed[name]} needs {name}" for name in missing)
        raise ValueError(f"{what}: pip install {' '.join(missing)}")


def _alone(function):
    """While a function works on the folder `out`, no other process does."""

    @functools.wraps(function)
    def locked(inputs, out, **choices):
        check_name(out)
        out = Path(out).resolve()
        existed = out.exists()
        with _locked(out):
            try:
                return function(inputs, out, **choices)
            except ValueError:
                if choices.get("engine") != "dask":  # a task of a cluster may still be writing
                    _remove_if_nothing_is_finished(out, keep=existed)
                raise

    return locked


def _remove_if_nothing_is_finished(out, keep):
    """Bad input leaves the tasks that are finished, from which the same command continues, and else nothing."""
    work = out / "work"
    if (work / "command.json").is_file() and not any(work.glob("*/[!.]*")):
        shutil.rmtree(work)
        if not keep and not any(out.iterdir()):
            out.rmdir()


@_alone
def prepare(
    inputs: Sequence,
    out: str | Path,
    *,
    vocab_size: int = 32768,
    valid_fraction: float = 0.005,
    errors: str = "strict",
    field: str = FIELD,
    spacy_model: str | None = None,
    tokenizer: str = "paper",
    language: str = "en",
    cased: bool = False,
    sentences: str = "rules",
    near_duplicates: float = 0.0,
    keep_words: float = 0.0,
    sample_mb: float = 200.0,
    shard_mb: float = 16.0,
    seed: int = 1,
    overwrite: bool = False,
    keep_work: bool = False,
    engine: str = "local",
    workers: int | None = None,
    scheduler: str | None = None,
    report: Callable[[str], Any] = lambda text: None,
) -> dict:
    """Run all steps into the folder `out`; `command` below documents the options. workers: processes, None for one per
    core. report: called with lines for the user. Returns the manifest.

    Raises ValueError for bad inputs or options, and for a worker or disk that fails: finished tasks are kept, and the
    same call continues from there. Raises BlockingIOError if another process prepares `out`.
    """
    if engine not in ENGINES or (engine == "dask") != (scheduler is not None):
        raise ValueError(
            f"engine {engine!r}, scheduler {scheduler!r}; valid: local without a scheduler, dask with its address"
        )
    for name, value, high in (
        ("near-duplicates", near_duplicates, 1),
        ("keep-words", keep_words, 1),
        ("valid-fraction", valid_fraction, 0.5),
        ("seed", seed, 2**64 - 1),
    ):
        if not 0 <= value <= high:
            raise ValueError(f"--{name} is {value}; valid: 0 to {high}")
    for name, value in (("sample-mb", sample_mb), ("shard-mb", shard_mb)):
        if not 0 < value < float("inf"):
            raise ValueError(f"--{name} is {value}; valid: a number above 0")
    pipeline, training = PaperText if tokenizer == "paper" else TokenizerText, None
    text = {"spacy_model": spacy_model, "language": language, "sentences": sentences}
    if pipeline is PaperText:
        text["cased"] = cased
    elif keep_words:
        raise ValueError("--keep-words goes with --tokenizer paper alone: other tokenisers know no words")
    elif tokenizer in TRAINED:
        training = (tokenizer, {"cased": cased, "prose": sentences == "rules"})
    elif cased:
        raise ValueError(f"--cased does not go with --tokenizer {tokenizer}, which says itself whether case matters")
    else:
        training = (None, read_tokenizer(tokenizer))
    normaliser = (pipeline.normaliser_of, *text.items())
    sources, skipped = find_inputs(inputs, out, field)
    _check_packages(sources, near_duplicates, engine)
    corpus.load_libraries(normaliser)  # before anything is written, and before the fork: all workers share them
    settings = {
        "version": __version__,
        "inputs": [list(source)[:4] for source in sources],
        "field": field,
        "skipped": skipped,
        "vocab_size": vocab_size,
        "valid_fraction": valid_fraction,
        "errors": errors,
        **text,
        "tokenizer": tokenizer,
        "tokenizer_hash": hashlib.sha256(repr(training).encode()).hexdigest()[
            :12
        ],  # of one that is given, its contents
        "cased": cased,
        "near_duplicates": near_duplicates,
        "keep_words": keep_words,
        "sample_mb": sample_mb,
        "shard_mb": shard_mb,
        "seed": seed,
    }
    if _claim(out, settings, overwrite):
        report(f"{out} is finished already")
        if not keep_work:
            shutil.rmtree(out / "work", ignore_errors=True)
        return json.loads((out / "manifest.json").read_text())
    if skipped:
        report(
            f"skipped {len(skipped)} files, of unknown kind or named twice: {', '.join(skipped[:5])}"
            + " ..." * (len(skipped) > 5)
        )

    run = Preparation(out, engine, workers or len(os.sched_getaffinity(0)), scheduler)
    shard_bytes = int(shard_mb * 1e6)
    groups = [
        (f"{i:05}", sum(source.size for source in group), (group, errors, shard_bytes))
        for i, group in enumerate(_groups(sources, shard_bytes))
    ]
    piped = any(source.path == "-" for source in sources)  # worker processes have no standard input
    # A worker of a cluster has another working folder. This one is no argument: where it is called makes no difference.
    read_shards = functools.partial(corpus.read_shards, base=os.getcwd())
    read_folders = run.step("read", read_shards, groups, in_process=piped)
    shards = []
    for folder in read_folders:
        for i, size in enumerate(json.loads((folder / "shards.json").read_text())):
            shards.append((f"{folder.name[:5]}-{i:04}", size, folder / f"{i:04}.gz"))
    total = sum(size for _, size, _ in shards)
    stats, names = Stats(), ", ".join(map(str, inputs))
    for folder in read_folders:
        stats += Stats.load(folder)
    dropped = sum(sum(domains.values()) for reason, domains in stats.dropped.items() if reason.startswith("document:"))
    if (left := stats.counts["documents read"] - dropped) < 2:
        raise _too_few(left, f"in {names}", stats)
    text_folders = run.step(
        "text",
        corpus.text_shard,
        [(n, s, (path, normaliser, near_duplicates > 0)) for n, s, path in shards],
    )
    selection = (text_folders, near_duplicates, valid_fraction, int(sample_mb * 1e6), seed)
    for folder in text_folders:
        stats += Stats.load(folder)
    try:
        (selected,) = run.step("select", corpus.select, [("all", total, selection)])
    except corpus.TooFew as error:
        left, copies = error.args
        raise _too_few(left, f"is left of {names}", stats, copies) from error

    def of_shards(*more):
        return [(name, size, (text, *more)) for (name, size, _), text in zip(shards, text_folders, strict=True)]

    words = None
    if keep_words:
        counts = run.step("count", corpus.count_shard, of_shards(selected))
        (kept,) = run.step("words", corpus.keep_words, [("all", total, (counts, keep_words))])
        words = kept / "words.txt"
    sample = (text_folders, selected, words, vocab_size, training)
    (vocabulary,) = run.step("vocabulary", corpus.vocabulary, [("all", total, sample)])
    (model,) = vocabulary.iterdir()
    encoded = run.step("encode", corpus.encode_shard, of_shards(selected, model, words))
    for folder in encoded:
        stats += Stats.load(folder)
    (merged,) = run.step("merge", corpus.merge, [("all", total, (encoded, model, words))])

    # Each file appears complete, manifest.json last: a data directory with a manifest is finished.
    if (out / "manifest.json").is_file():
        _remove(out)
    write_atomically(out / "speed.json", json.dumps(run.costs, indent=2, allow_nan=False) + "\n")
    for file in sorted(merged.iterdir()):
        file.replace(out / file.name)
    merged.rmdir()  # else this step would count as finished, for ever
    manifest = {
        "settings": settings,
        "vocab_size": (out / "dict.txt").read_bytes().count(b"\n") + SPECIALS,
        "pipeline": pipeline.name,
        **text,
        "raw bytes": total,
        **stats.data(),
    }
    write_report(out, manifest)
    for reason, domains in sorted(stats.dropped.items()):
        unit, count = reason.partition(":")[0], sum(domains.values())
        of = stats.counts[{"document": "documents read", "paragraph": "paragraphs"}.get(unit, "")]
        share = f" of {of:,} ({count / of:.1%})" if of else ""
        report(f"dropped {count:,}{share}: {reason}; the first: {shorten(stats.samples[reason][0])}")
    write_atomically(out / "manifest.json", json.dumps(manifest, indent=2, allow_nan=False) + "\n")
    if not keep_work:
        shutil.rmtree(out / "work")
    return manifest


@click.command(cls=Command)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@options.output("The folder to write: pieces, dictionary, the splits train and valid, manifest and report.")
@click.option(
    "--field", default=FIELD, show_default=True, help="The column of a table, or the key of JSON, that holds the text."
)
@click.option("--tokenizer", default="paper", show_default=True, metavar="KIND|PATH",
              help=f"The paper's; {', '.join(TRAINED)}, trained here; or a tokenizer.json or its folder.")  # fmt: skip
@options.vocab_size(help="Types of the vocabulary, with the five special ones. A tokenizer.json has its own.")
@click.option("--language", default="en", show_default=True, metavar="CODE",
              help="The language of the rules of spaCy and Moses, for example de.")  # fmt: skip
@click.option("--cased", is_flag=True, help="Keep capital letters.")
@click.option("--sentences", type=click.Choice(SENTENCES), default="rules", show_default=True,
              help="How text is cut: by spaCy's rules, one sentence a line (no filter), or not at all.")  # fmt: skip
@click.option(
    "--valid-fraction", default=0.005, show_default=True, help="The share of the text that is held out as split valid."
)
@click.option("--near-duplicates", default=0.0, metavar="JACCARD",
              help="Drop documents as similar as this to an earlier one, for example 0.8 (default: none).")  # fmt: skip
@click.option("--keep-words", default=0.0, metavar="SHARE",
              help="Share of word types to keep; others become <unk> (default: all; released TUPE: 0.21).")  # fmt: skip
@click.option("--spacy-model", help="An installed model of spaCy that finds sentences (default: its rules).")
@click.option("--errors", type=click.Choice(["strict", "replace"]), default="strict", show_default=True,
              help="Stop at bad bytes and damaged files, or count them and go on.")  # fmt: skip
@click.option(
    "--sample-mb", default=200.0, show_default=True, help="Megabytes of text that the tokeniser is trained on."
)
@options.seed(help="The seed of the choice of that text.")
@click.option(
    "--shard-mb", default=16.0, show_default=True, help="Megabytes of raw text that a process takes at a time."
)
@options.jobs("The number of processes on this machine (default: all cores).")
@click.option("--engine", type=click.Choice(ENGINES), default="local", show_default=True,
              help="Where the work is done: here, or on a Dask cluster with the same file system.")  # fmt: skip
@click.option(
    "--scheduler", metavar="ADDRESS", help="The address of the Dask cluster, for example tcp://10.0.0.1:8786."
)
@click.option("--keep-work", is_flag=True, help="Keep the intermediate files in OUTPUT/work.")
@click.option("--overwrite", is_flag=True, help="Replace other data in OUTPUT.")
def command(inputs, output, jobs, **choices):
    """Turn raw text into data for pre-training.

    \b
    tupe prepare corpus wiki.xml.bz2 books/ --output data

    INPUT: .txt (one paragraph per line, an empty line between documents), .jsonl, .json, .csv and .tsv (a document per
    object or row, see --field), wikiextractor's wiki_00, MediaWiki dumps and TEI (.xml), each also as .gz, .bz2, .xz or
    .zst; .parquet; a folder (its .txt files are books: one document each; also one of the library datasets); a glob in
    quotes; - for text on standard input. OUTPUT/manifest.json lists what each step
    dropped and why, with examples; report.md and report.png show it.

    After a kill or a failure the same command continues where it stopped (with - it starts again, because the text may
    have changed). The result is the same, whatever --jobs is.
    """

    def report(line):
        click.echo(f"prepare corpus: {line}", err=True)

    manifest = prepare(inputs, output, workers=jobs, report=report, **choices)
    click.echo(json.dumps(manifest["counts"], indent=2, allow_nan=False))
