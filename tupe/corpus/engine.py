"""Runs the steps of `tupe.corpus.steps` over shards: in several processes, or on a cluster. A run can be killed at any
moment and continues when it is started again."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
from tqdm import tqdm

from .. import __version__
from ..common import options
from ..common.options import Command, shorten
from ..common.prepared import check_name
from ..normaliser import SENTENCES, UNSPACED, check_language
from ..run import processes
from ..run.checksums import NAME, seal_all
from ..run.folder import BEGUN, fill, owned, remove_partial, write_atomically
from ..run.record import command_line
from ..run.stop import SIGNALS, handled
from ..text import PaperText, TextEncoder, TokenizerText, read_manifest
from . import steps as corpus
from .readers import find_inputs
from .records import COMPRESSED, Reading, imported
from .stats import Stats, write_report
from .vocabulary import SPECIALS, Pieces, given_vocabulary

# All that a run puts into its folder beside `work`, and into that. What else is there is another's.
FOLDERS = ("read", "text", "select", "vocabulary", "encode", "merge")
WRITTEN = ("train.idx", "valid.idx", "train.bin", "valid.bin", *TextEncoder.FILES, "report.md", NAME)
LOOK = 0.2  # seconds from one look for signals to the next


@dataclasses.dataclass(frozen=True)
class Choices:
    """What a user may choose, each with its default; `command` says what they mean."""

    field: str = Reading().field
    unquoted: bool = Reading().unquoted
    errors: str = Reading().errors
    tokenizer: str = "paper"
    vocab_size: int = 32768
    language: str = "en"
    cased: bool = False
    sentences: str = "rules"
    valid_fraction: float = 0.005
    shard_mb: float = 16.0


# ------------------------------------------------------------------------------------------------------- running tasks


@contextlib.contextmanager
def dask(scheduler: str) -> Iterator[concurrent.futures.Executor]:
    """An executor on a Dask cluster, which behaves as those of concurrent.futures. scheduler: its address."""
    distributed = imported("distributed", "--dask")
    try:
        with distributed.Client(scheduler, set_as_default=False) as client:
            yield client.get_executor(pure=False)
    except distributed.KilledWorker as error:
        raise concurrent.futures.BrokenExecutor from error


class Preparation:
    """One run; its intermediate files are in the folder `work`.

    executor: makes the executor of a step. received: gets the signals that arrive. They are looked at between tasks: an
    exception that a handler raises is lost where the signal comes while a process is being forked.
    """

    def __init__(self, work: Path, executor: Callable, received: Sequence[int]):
        self.work, self.executor, self.received = work, executor, received

    def step(self, name: str, function: Callable, tasks: dict[str, tuple]) -> list[Path]:
        """Run the tasks of a step that are not finished yet; returns the folders of all, in order.

        `tasks`: {task name: arguments}. The name of a folder has a hash of the arguments, which include the folders of
        earlier steps: so results from other inputs or options are never taken for these. Raises ValueError if a worker
        dies, OSError if the disk fails, and SystemExit after a signal; finished tasks are kept.
        """
        self.look()
        targets = {self.work / name / f"{task}-{self._key(args)}": args for task, args in tasks.items()}
        todo = {target: args for target, args in targets.items() if not target.is_dir()}
        bar = tqdm(total=len(tasks), initial=len(tasks) - len(todo), desc=f"{name:10}", unit="task")
        try:
            with bar, self.executor() if todo else contextlib.nullcontext() as pool:
                self._run(pool, function, todo, bar)
        except concurrent.futures.BrokenExecutor as error:
            self.look()  # a signal to the whole group ends workers too
            raise ValueError(
                f"a worker process of the step {name!r} died (killed, or out of memory?); what is finished is "
                "kept: the same command continues from there; use fewer --jobs if memory ran out"
            ) from error
        return list(targets)

    def _run(self, pool, function, todo, bar):
        running = {pool.submit(fill, target, function, *args) for target, args in todo.items()}
        try:
            while running:
                done, running = concurrent.futures.wait(running, LOOK, concurrent.futures.FIRST_COMPLETED)
                for future in done:
                    future.result()
                    bar.update()
                self.look()
        except BaseException:
            for future in running:
                future.cancel()  # those that have not begun
            raise

    def look(self) -> None:
        """Raise SystemExit if a signal has arrived."""
        if self.received:
            raise SystemExit(128 + self.received[0])

    def _key(self, args):
        """A hash of a task's arguments that does not depend on where the run's folder is."""
        text = repr((__version__, args)).replace(str(self.work), "")
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


# ------------------------------------------------------------------------------------------------- the folder of a run


def _is_ours(there, work):
    """Whether all these names in a folder, and those in its `work`, are what an unfinished run leaves."""
    if not work.is_dir() or not {path.name for path in work.iterdir()} <= set(FOLDERS):
        return False
    return all(name in ("work", *WRITTEN) or BEGUN.fullmatch(name) for name in there)


def _claim(out, settings):
    """Make `out` ready for a run with these settings. Returns whether that run is finished already.

    A run that is not finished leaves `work`. It continues with other inputs and options too: only the tasks that they
    leave as they are count as finished, and its files are joined anew, for some may have been moved out.
    """
    manifest, work = out / "manifest.json", out / "work"
    if manifest.is_file() and read_manifest(out).get("settings") == settings:
        return True
    there = {path.name for path in out.iterdir() if path.name != ".lock"} if out.is_dir() else set()
    if manifest.is_file() or there and not _is_ours(there, work):
        raise ValueError(
            f"{out} holds data from other inputs or options, or of another version of tupe, or other files: choose "
            "another folder"
        )
    work.mkdir(parents=True, exist_ok=True)
    for name in WRITTEN:
        (out / name).unlink(missing_ok=True)
    for stale in (work / "merge", *work.glob("*/.*")):  # half-moved, half-written
        shutil.rmtree(stale, ignore_errors=True)
    remove_partial(out)
    return False


# ---------------------------------------------------------------------------------------------------------- a whole run


def say(line: str) -> None:
    """Print a line for the user."""
    click.echo(f"prepare corpus: {line}", err=True)


def _groups(inputs, shard_bytes):
    """Inputs in groups of about a shard; compressed text counts four times."""
    group, size = [], 0
    for source in inputs:
        group.append(source)
        size += source.size * (4 if source.path.endswith(COMPRESSED) else 1)
        if size >= shard_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def prepare(
    inputs: Sequence, out: str | Path, *, workers: int | None = None, scheduler: str | None = None, **choices
) -> dict:
    """Run all steps into the folder `out`, and return the manifest. choices: of `Choices`; `command` documents them.
    workers: processes, None for one per core; scheduler: the address of a Dask cluster instead.

    Raises ValueError for bad inputs or options, and for a worker that dies, OSError if the disk fails, BlockingIOError
    if another process prepares `out`, and SystemExit after a signal. Finished tasks are kept: the same call continues.
    """
    check_name(out)
    out, received = Path(out).resolve(), []
    count = workers or len(os.sched_getaffinity(0))
    executor = functools.partial(dask, scheduler) if scheduler else functools.partial(processes.workers, count)
    tqdm.monitor_interval = 0  # no monitor thread: forking a process that has threads is unsafe
    with handled(SIGNALS, lambda number, frame: received.append(number)), owned(out):
        try:
            return _prepare(inputs, out, Choices(**choices), Preparation(out / "work", executor, received))
        except SystemExit:  # of `Preparation.look`
            say(f"stopped by {signal.Signals(received[0]).name}; the same command continues from here")
            raise


def _prepare(inputs, out, choices, run):
    given = None if choices.tokenizer == "paper" else given_vocabulary(choices.tokenizer)
    pipeline = TokenizerText if isinstance(given, str) else PaperText
    text = {name: getattr(choices, name) for name in TextEncoder.SETTINGS}
    if isinstance(given, Pieces) and (other := {n: x for n, x in given.settings.items() if text[n] != x}):
        words = " and ".join(f"{name} {value}" for name, value in other.items())
        raise ValueError(f"--tokenizer {choices.tokenizer}: its pieces are of text with {words}: choose the same")
    check_language(choices.language)
    normaliser = (pipeline.normaliser_of, *text.items())
    sources, skipped = find_inputs(inputs, out)
    # Before anything is written, for an unknown language is refused, and before the fork: all workers share the rules.
    corpus.normaliser_of(*normaliser).sentences("A text, é.")
    settings = {
        "version": __version__,
        "inputs": [list(source) for source in sources],
        "skipped": skipped,
        **dataclasses.asdict(choices),
        "tokenizer_hash": hashlib.sha256(repr(given).encode()).hexdigest()[:12],
    }
    if _claim(out, settings):
        say(f"{out} is finished already")
        shutil.rmtree(out / "work", ignore_errors=True)  # of a run that was killed while it did this
        return json.loads((out / "manifest.json").read_text())
    if skipped:
        more = " ..." if len(skipped) > 5 else ""
        say(f"skipped {len(skipped)} files, of unknown kind or named twice: {', '.join(skipped[:5])}{more}")

    # Raw text in shards.
    shard_bytes = int(choices.shard_mb * 1e6)
    wrap = None if choices.sentences == "lines" else "" if choices.language in UNSPACED else " "
    reading = Reading(choices.errors, choices.field, choices.unquoted, wrap=wrap)
    groups = {f"{i:06}": (group, reading, shard_bytes) for i, group in enumerate(_groups(sources, shard_bytes))}
    read_folders = run.step("read", corpus.read_shards, groups)
    shards = {
        f"{group}-{shard.stem}": shard
        for group, folder in zip(groups, read_folders, strict=True)
        for shard in sorted(folder.glob("*.gz"))
    }

    # Clean text as tokens, and what becomes of each document.
    texts = run.step("text", corpus.text_shard, {name: (path, normaliser) for name, path in shards.items()})
    stats = Stats.load([*read_folders, *texts])
    dropped = [f"{reason} ({n}, the first: {shorten(stats.examples[reason])})" for reason, n in stats.dropped.items()]
    (selected,) = run.step("select", corpus.select, {"all": (texts, choices.valid_fraction, "; ".join(dropped))})

    # The vocabulary.
    sample = (texts, selected, choices.vocab_size, given)
    (vocabulary,) = run.step("vocabulary", corpus.vocabulary, {"all": sample})
    (model,) = (path for path in vocabulary.iterdir() if path.name != "dict.txt")

    # The ids.
    tasks = {name: (folder, selected, model) for name, folder in zip(shards, texts, strict=True)}
    encoded = run.step("encode", corpus.encode_shard, tasks)
    (merged,) = run.step("merge", corpus.merge, {"all": (encoded, model)})

    stats = Stats.load([*read_folders, *texts, *encoded])
    manifest = {
        "settings": settings,
        "vocab_size": (merged / "dict.txt").read_bytes().count(b"\n") + SPECIALS,
        "pipeline": pipeline.name,
        **text,
        **vars(stats),
    }
    write_report(merged, manifest)
    write_atomically(merged / "manifest.json", json.dumps(manifest, indent=2, allow_nan=False) + "\n")
    seal_all(merged, command_line())
    run.look()
    # Each file appears complete, manifest.json last: a data directory with a manifest is finished.
    for file in sorted(merged.iterdir(), key=lambda file: (file.name == "manifest.json", file)):
        file.replace(out / file.name)
    shutil.rmtree(out / "work")
    return manifest


def _option(name: str, help: str, **more) -> Callable:
    """An option of `command`, with the default that stands in `Choices`."""
    default = getattr(Choices, name.removeprefix("--").replace("-", "_"))
    return click.option(name, default=default, show_default=bool(default), help=help, **more)


@click.command(cls=Command)
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@options.output("The folder to write: pieces, dictionary, the splits train and valid, manifest and report.")
@_option("--field", "The column of a table, or the key of JSON, that holds the text.")
@_option("--unquoted", "In .csv and .tsv a quotation mark is text, as in most .tsv files of data sets.", is_flag=True)
@_option(
    "--tokenizer", "The paper's, a tokenizer.json or its folder, or other data or a model, whose vocabulary is kept.",
    metavar="paper|PATH",
)  # fmt: skip
@_option(
    "--vocab-size", "Types of the vocabulary, with the five special ones. A given one has its own.",
    type=click.IntRange(1),
)  # fmt: skip
@_option("--language", "The language of the rules of spaCy and Moses, for example de.", metavar="CODE")
@_option("--cased", "Keep capital letters. A tokenizer.json decides about case itself.", is_flag=True)
@_option(
    "--sentences", "How text is cut: by spaCy's rules, one sentence a line (no filter), or not at all.",
    type=click.Choice(SENTENCES),
)  # fmt: skip
@_option("--valid-fraction", "The share of the text that is held out as split valid.", type=click.FloatRange(0, 0.5))
@_option(
    "--errors", "Stop at bad bytes and damaged files, or count them and go on.",
    type=click.Choice(["strict", "replace"]),
)  # fmt: skip
@_option("--shard-mb", "Megabytes of raw text that a process takes at a time.", type=click.FloatRange(0, min_open=True))
@options.jobs("The number of processes on this machine (default: all cores).")
@click.option(
    "--dask", "scheduler", metavar="ADDRESS",
    help="Work on the Dask cluster with this scheduler, tcp://10.0.0.1:8786 for example, and the same file system.",
)  # fmt: skip
def command(inputs, output, jobs, **choices):
    """Turn raw text into data for pre-training.

    \b
    tupe prepare corpus wiki.xml.bz2 books/ --output data

    INPUT: .txt (one paragraph per line, an empty line between documents), .jsonl, .csv and .tsv (a document per object
    or row, see --field), MediaWiki dumps and TEI (.xml), each also as .gz, .bz2, .xz or .zst; .parquet; a folder (its
    .txt files are books: one document each); a glob in quotes. What was read, dropped and held out is printed, and in
    OUTPUT/report.md.

    After a kill or a failure the same command continues where it stopped. The result is the same, whatever --jobs is.
    """
    prepare(inputs, output, workers=jobs, **choices)
    click.echo((output / "report.md").read_text())
