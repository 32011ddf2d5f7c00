"""Runs the steps of `tupe.corpus.steps` over shards: in this process, in several, or on a cluster. It can be stopped
and started again at any moment."""

import concurrent.futures
import contextlib
import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import sys
import threading
import time
import uuid
from pathlib import Path

import click
from tqdm import tqdm

from .. import __version__, options
from ..options import Command
from . import steps as corpus
from .readers import find_inputs
from .report import write_report
from .steps import Stats

ENGINES = ("local", "dask")


def whole(function, target, args):
    """function(folder, *args) fills a new folder, which gets the name `target` only when all is written. Returns what
    it cost."""
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.parent / f".{target.name}.{uuid.uuid4().hex}"
    folder.mkdir()
    start = time.process_time()
    try:
        function(folder, *args)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise somebody else has just done the same work, with the same result
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"cpu": time.process_time() - start, "peak": peak}


def _end_with_parent():
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process().sentinel
    threading.Thread(target=lambda: (multiprocessing.connection.wait([parent]), os._exit(1)), daemon=True).start()


@contextlib.contextmanager
def _executor(engine, workers, scheduler):
    """Something with the interface of concurrent.futures, or None for "here and now"."""
    if engine == "dask":
        from distributed import Client

        with Client(scheduler, set_as_default=False) as client:
            yield client.get_executor(pure=False)
    elif workers == 1:
        yield None
    else:
        tqdm.monitor_interval = 0  # a thread, and threads and forks do not mix
        context = multiprocessing.get_context("fork")  # workers need not import all this again
        with concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_end_with_parent) as pool:
            yield pool


class Run:
    """One run into the folder `out`; its unfinished business is in out/work."""

    def __init__(self, out, engine, workers, scheduler):
        self.out, self.work = Path(out), Path(out) / "work"
        self.engine, self.workers, self.scheduler = engine, workers, scheduler
        self.costs = {}

    def step(self, name, function, tasks, here=False, before=None):
        """`tasks`: [(task name, bytes of raw text, arguments), ...]. Returns the folders, in order. What is there is
        not done again. A folder's name holds a hash of the arguments, among them the names of folders of earlier steps:
        what was made from other inputs or with other options is never mistaken for it. `here`: in this process.
        `before`: called once, if there is anything to do."""
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
                if before is not None and todo:
                    before()
                if here:
                    self._here(function, todo, bar, costs)
                elif todo:
                    with _executor(self.engine, self.workers, self.scheduler) as pool:
                        if pool is None:
                            self._here(function, todo, bar, costs)
                        else:
                            self._there(pool, function, todo, bar, costs)
            except concurrent.futures.BrokenExecutor as error:
                raise ValueError(
                    f"a worker process of the step {name!r} died (killed, or out of memory?); what is finished is "
                    "kept: the same command goes on from there, with fewer --jobs if memory was short"
                ) from error
            except OSError as error:
                full = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "cannot read or write"
                raise ValueError(
                    f"step {name!r}: {full}: {error}; what is finished is kept: the same command goes on"
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
        text = repr(args).replace(str(self.work), "")
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()

    def _here(self, function, todo, bar, costs):
        for target, size, args in todo:
            costs.append(whole(function, target, args))
            bar.update(size)

    def _there(self, pool, function, todo, bar, costs):
        futures = {pool.submit(whole, function, target, args): size for target, size, args in todo}
        try:
            for future in concurrent.futures.as_completed(futures):
                costs.append(future.result())
                bar.update(futures[future])
        except BaseException:
            for future in futures:
                future.cancel()  # those that run are waited for: what they finish is kept
            raise


@contextlib.contextmanager
def _alone(out):
    """Raises ValueError while another process prepares the folder `out`. The lock ends with this process, not with
    its workers (as one of `flock` would), so that after a kill the same command goes on at once."""
    path = out.parent / f".{out.name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("w")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise ValueError(f"another process is preparing {out}; wait for it, or choose another folder") from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samefile(path, file.fileno()):
                break
        file.close()  # the process before has just ended, and taken its file away
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _command(settings):
    """Without the sizes and times of the inputs: a damaged file may be replaced, and the same command goes on."""
    return {**settings, "inputs": [path for path, *_ in settings["inputs"]]}


def _claim(out, settings, overwrite):
    """Makes `out` ready for a run with these settings. True if that run is finished already."""
    done, begun = out / "manifest.json", out / "work" / "command.json"
    now, before = _command(settings), json.loads(begun.read_text()) if begun.is_file() else {}
    piped = "-" in now["inputs"]  # nobody knows whether it would be the same text again
    if done.is_file() and not piped and json.loads(done.read_text()).get("settings") == settings:
        return True
    # An unfinished run goes on with other options too: what of it they do not touch is still good (see `Run.step`).
    goes_on = not done.is_file() and all(before.get(key) == now[key] for key in ("version", "inputs"))
    if out.is_dir() and any(out.iterdir()) and not goes_on:
        if not overwrite:
            raise ValueError(
                f"{out} is not empty, and what is there comes from other inputs or options; choose another folder, "
                "or replace it with --overwrite"
            )
        if not (done.is_file() or begun.is_file()):
            raise ValueError(f"{out} is no data directory: not overwritten; empty it yourself, or choose another")
        shutil.rmtree(out)
    if goes_on and before != now:
        for path in out.glob("*.*"):  # what was in place already, but not out/work
            path.unlink()
    begun.parent.mkdir(parents=True, exist_ok=True)
    # Half-written folders; of piped text all that was made, it may be other text this time.
    for stale in begun.parent.glob("*/*" if piped else "*/.*"):
        shutil.rmtree(stale)
    temporary = begun.with_suffix(".new")
    temporary.write_text(json.dumps(now))
    temporary.replace(begun)
    return False


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


def prepare(inputs, out, **choices):
    """All of it, into the folder `out`; `command` below says what the options mean. Returns the manifest.

    Raises ValueError for what is wrong with inputs, options or the machine; whatever was finished by then is kept, and
    the same call goes on from there.
    """
    out = Path(out).resolve()
    with _alone(out):
        return _prepare(inputs, out, **choices)


def _prepare(
    inputs,
    out,
    vocab_size=32768,
    valid_fraction=0.005,
    errors="strict",
    spacy_model=None,
    near_duplicates=0.0,
    keep_words=0.0,
    sample_mb=200.0,
    shard_mb=16.0,
    seed=1,
    overwrite=False,
    keep_work=False,
    engine="local",
    workers=None,
    scheduler=None,
    say=lambda text: None,
):
    if engine not in ENGINES or (engine == "dask") != (scheduler is not None):
        raise ValueError(
            f"engine {engine!r}, scheduler {scheduler!r}; valid: local without, dask with the address of a scheduler"
        )
    for name, value, high in (
        ("near-duplicates", near_duplicates, 1),
        ("keep-words", keep_words, 1),
        ("valid-fraction", valid_fraction, 0.5),
        ("seed", seed, 2**64 - 1),
    ):
        if not 0 <= value <= high:
            raise ValueError(f"--{name} is {value}; valid: 0 to {high}")
    found, skipped = find_inputs(inputs, out)
    settings = {
        "version": __version__,
        "inputs": [list(source) for source in found],
        "skipped": skipped,
        "vocab_size": vocab_size,
        "valid_fraction": valid_fraction,
        "errors": errors,
        "spacy_model": spacy_model,
        "near_duplicates": near_duplicates,
        "keep_words": keep_words,
        "sample_mb": sample_mb,
        "shard_mb": shard_mb,
        "seed": seed,
    }
    if _claim(out, settings, overwrite):
        say(f"{out} is finished already")
        if not keep_work:
            shutil.rmtree(out / "work", ignore_errors=True)
        return json.loads((out / "manifest.json").read_text())
    if skipped:
        say(
            f"{len(skipped)} files skipped, of no known kind or named twice: {', '.join(skipped[:5])}"
            + " ..." * (len(skipped) > 5)
        )

    run = Run(out, engine, workers or len(os.sched_getaffinity(0)), scheduler)
    shard_bytes = int(shard_mb * 1e6)
    groups = [
        (f"{i:05}", sum(source.size for source in group), (group, errors, shard_bytes))
        for i, group in enumerate(_groups(found, shard_bytes))
    ]
    piped = any(source.path == "-" for source in found)  # worker processes have no standard input
    read = run.step("read", corpus.read_shards, groups, here=piped)
    shards = []
    for folder in read:
        for i, size in enumerate(json.loads((folder / "shards.json").read_text())):
            shards.append((f"{folder.name[:5]}-{i:04}", size, folder / f"{i:04}.gz"))
    total = sum(size for _, size, _ in shards)
    if not shards:
        raise ValueError(f"no document in {', '.join(map(str, inputs))}")
    texts = run.step(
        "text",
        corpus.text_shard,
        [(n, s, (path, spacy_model, near_duplicates > 0)) for n, s, path in shards],
        before=lambda: corpus.load_libraries(spacy_model),  # processes that are forked later share them
    )
    selection = (texts, near_duplicates, valid_fraction, int(sample_mb * 1e6), seed)
    stats = Stats()
    for folder in (*read, *texts):
        stats += Stats.load(folder)
    try:
        (selected,) = run.step("select", corpus.select, [("all", total, selection)])
    except corpus.NoText as error:
        reasons = "; ".join(f"{reason} ({sum(domains.values())})" for reason, domains in sorted(stats.dropped.items()))
        raise ValueError(
            f"no text left of {', '.join(map(str, inputs))}; dropped: {reasons or 'nothing, it was empty'}"
        ) from error
    words = None
    if keep_words:
        counts = run.step(
            "count", corpus.count_shard, [(n, s, (t, selected)) for (n, s, _), t in zip(shards, texts, strict=True)]
        )
        (kept,) = run.step("words", corpus.keep_words, [("all", total, (counts, keep_words))])
        words = kept / "words.txt"
    (vocabulary,) = run.step("vocabulary", corpus.vocabulary, [("all", total, (texts, selected, words, vocab_size))])
    model = vocabulary / "sentencepiece.bpe.model"
    encoded = run.step(
        "encode",
        corpus.encode_shard,
        [(n, s, (t, selected, model, words)) for (n, s, _), t in zip(shards, texts, strict=True)],
    )
    for folder in encoded:
        stats += Stats.load(folder)
    (merged,) = run.step("merge", corpus.merge, [("all", total, (encoded, model, words))])

    # Each file appears whole, manifest.json last: a data directory with a manifest is finished.
    (out / "speed.json").write_text(json.dumps(run.costs, indent=2) + "\n")
    for file in sorted(merged.iterdir()):
        file.replace(out / file.name)
    manifest = {
        "settings": settings,
        "vocab_size": vocab_size,
        "spacy_model": spacy_model,
        "raw bytes": total,
        **stats.data(),
    }
    write_report(out, manifest)
    temporary = out / "work" / "manifest.json"
    temporary.write_text(json.dumps(manifest, indent=2) + "\n")
    temporary.replace(out / "manifest.json")
    if not keep_work:
        shutil.rmtree(out / "work")
    return manifest


@click.command(cls=Command)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@options.output("folder to write: pieces, dictionary, train and valid in fairseq's mmap format, manifest, report")
@options.vocab_size(help="types, counting <s> <pad> </s> <unk> <mask>")
@click.option("--valid-fraction", default=0.005, show_default=True, help="share of the text held out")
@click.option("--near-duplicates", default=0.0, metavar="JACCARD", help="drop near copies (MinHash), e.g. 0.8")
@click.option("--keep-words", default=0.0, metavar="SHARE", help="rarer words become <unk>; 0.21 in the released TUPE")
@click.option("--spacy-model", help="an installed spaCy model for sentences (default: spaCy's rules)")
@click.option("--errors", type=click.Choice(["strict", "replace"]), default="strict", show_default=True,
              help="refuse bad bytes and damaged files, or count them")  # fmt: skip
@click.option("--sample-mb", default=200.0, show_default=True, help="text that trains SentencePiece")
@options.seed(help="of that sample")
@click.option("--shard-mb", default=16.0, show_default=True, help="raw text per task")
@options.jobs("processes on this machine (default: all cores)")
@click.option("--engine", type=click.Choice(ENGINES), default="local", show_default=True,
              help="where the tasks run; dask: on a cluster with this file system")  # fmt: skip
@click.option("--scheduler", metavar="ADDRESS", help="of the Dask cluster, e.g. tcp://10.0.0.1:8786")
@click.option("--keep-work", is_flag=True, help="keep the intermediate files in OUTPUT/work")
@click.option("--overwrite", is_flag=True, help="replace the data of another run in OUTPUT")
def command(inputs, output, jobs, **choices):
    """Raw text in, data for pre-training out.

    \b
    tupe prepare corpus wiki.xml.bz2 books/ --output data

    INPUT: .txt (one paragraph per line, an empty line between documents), .jsonl with a "text" field, wikiextractor's
    wiki_00, MediaWiki dumps and TEI (.xml), each also as .gz, .bz2, .xz or .zst; a folder (its .txt files are books:
    one document each); a glob in quotes; - for text on standard input. OUTPUT/manifest.json says what each step dropped
    and why, with examples; report.md and report.png show it.

    Killed or failed, the same command goes on where it stopped (with -, it starts again: the text may be another); the
    result is the same, also with other --jobs.
    """

    def tell(line):
        click.echo(f"prepare corpus: {line}", err=True)

    manifest = prepare(inputs, output, workers=jobs, say=tell, **choices)
    click.echo(json.dumps(manifest["counts"], indent=2))
