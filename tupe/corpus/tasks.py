"""Reads GLUE's official files and prepares them: the text encoder of pre-training, fairseq's binary format."""

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import click

from ..common import options
from ..common.options import shorten, shorten_list
from ..common.prepared import check_name, check_replaced, encoding, tasks_in, worker
from ..data.glue import FIRST_LABEL, TASKS, Glue, glue_name
from ..data.splits import folders_of, write_split
from ..normaliser import is_blank
from ..run.checksums import seal_all
from ..run.folder import naming, write_atomically
from ..run.record import command_line
from .records import File, Reading, check_columns, number_of
from .stats import Stats

NO_LABEL = ("-", "n/a")  # the annotators disagreed


# ---------------------------------------------------------------------------------------------- the official files


def read_split(name: str, split: str, path: str | Path) -> tuple[list, dict]:
    """Read one official file of task `name`.

    Returns (rows, dropped): rows is a list of (tuple of sentences, label), where the label is a class name, a float in
    [0, 1] for a regression, or None in a test file; dropped counts the rows left out by reason. Raises ValueError with
    file and line for anything that is not as in the official file.
    """
    task, labelled = TASKS[name], not split.startswith(("test", "ax"))
    lines = _lines(path)
    start = 0
    header = task.header if labelled else ()
    if not header:
        if not lines:
            raise ValueError(f"{path}: the file is empty, expected a header line")
        header, start = tuple(lines[0].split("\t")), 1
    needed = task.text + ((task.label,) if labelled else ())
    missing = [column for column in needed if column not in header]
    if missing:
        raise ValueError(f"{path}, line 1: no column {', '.join(missing)}; the columns are: {shorten_list(header)}")
    check_columns(header, {}, path)
    text = [header.index(column) for column in task.text]
    rows, dropped = [], Counter()
    for number, line in enumerate(lines[start:], start + 1):
        fields = line.split("\t")
        if len(fields) != len(header):
            if labelled and task.columns:
                dropped[f"not {len(header)} columns"] += 1
                continue
            raise ValueError(
                f"{path}, line {number}: {len(fields)} columns, expected {len(header)} ({shorten_list(header)})"
            )
        label = None
        if labelled:
            label = fields[header.index(task.label)]
            if label in NO_LABEL:
                dropped["no label"] += 1
                continue
            label = _check_label(task, label, f"{path}, line {number}")
        rows.append((tuple(fields[column] for column in text), label))
    if not rows:
        raise ValueError(f"{path}: no usable row")
    return rows, dict(dropped)


def _lines(path):
    """Only a line feed ends a row: sentences may contain other separators."""
    if not Path(path).is_file():
        raise ValueError(f"{path} is not a file")
    with open(path, "rb") as stream:
        return [line for _, line in File(str(path), stream, Reading(), Stats()).lines()]


def _check_label(task: Glue, label, where):
    if task.labels:
        if label not in task.labels:
            raise ValueError(f"{where}: unknown label {shorten(label)}, expected one of {', '.join(task.labels)}")
        return label
    value = number_of(label)
    if value is None or not 0 <= value <= task.top:
        raise ValueError(f"{where}: unknown score {shorten(label)}, expected a number from 0 to {task.top:g}")
    return value / task.top


# ------------------------------------------------------------------------------------------ writing fairseq's format


def prepare(
    source: str | Path,
    vocabulary: str | Path,
    output: str | Path,
    tasks: Sequence = (),
    workers: int | None = 1,
    overwrite: bool = False,
) -> Iterator[tuple[str, dict]]:
    """Turn official GLUE files into data for fairseq's task `sentence_prediction` and for the task `glue`.

    source: folder with one folder per task. vocabulary: folder of the pre-training data, for its encoder. output:
    gets one folder per task (input0/, input1/, label/) and the encoder's files. tasks: names; if empty, all tasks that
    `source` has, but for those that are prepared there, unless they are to be overwritten. workers: see
    `prepared.encoding`. Yields (task, manifest). Raises ValueError for bad input, before anything is written, and if
    the folder of a task that is named exists already; further as `prepared.encoding`.
    """
    check_name(output)
    source, vocabulary, output = Path(source), folders_of(vocabulary)[0], Path(output)
    names = [glue_name(name) for name in tasks] or [name for name in TASKS if (source / name).is_dir()]
    if not names:
        raise ValueError(f"{source} has none of the folders {', '.join(TASKS)}")
    if not tasks and not overwrite:
        names = [name for name in names if name not in tasks_in(output)]
    for name in names:
        if not (source / name).is_dir():
            raise ValueError(f"{source} has no folder {name}")
        check_replaced(output, name, overwrite)
        for split, path in _files_of(name, source / name):
            read_split(name, split, path)
    with encoding(vocabulary, output, workers) as map_rows:
        for name in names:
            splits = ((split, *read_split(name, split, path)) for split, path in _files_of(name, source / name))
            yield name, prepare_task(name, TASKS[name], splits, vocabulary, output, map_rows)


def _encode(texts):
    """Ids of each sentence of a row, each closed by </s>."""
    return [[*worker.encoder.encode(text), worker.encoder.ids["</s>"]] for text in texts]


def prepare_task(name: str, task: Glue, splits: Iterable, vocabulary: Path, output: Path, map_rows: Callable) -> dict:
    """Write the folder of a task, whole or not at all, within `prepared.encoding`; returns its manifest. splits: of
    (name, rows, {reason: number of rows that were dropped}), the rows as `read_split` has them."""
    partial = output / f".{name}.partial"
    try:
        with naming(output / name):
            manifest = _write_task(name, task, splits, vocabulary, partial, map_rows)
        shutil.rmtree(output / name, ignore_errors=True)
        partial.rename(output / name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _files_of(name, source):
    """[(split, path)] of the official files of a task that are there. Raises ValueError if one of them is required."""
    files = [(split, source / file) for split, file in TASKS[name].files]
    for split, path in files:
        if split in ("train", "valid", "valid1") and not path.exists():
            raise ValueError(f"{path} is missing")
    return [(split, path) for split, path in files if path.exists()]


def _write_task(name, task, splits, vocabulary, folder, map_rows):
    (folder / "label").mkdir(parents=True)
    for i in range(len(task.text)):
        (folder / f"input{i}").mkdir()
        shutil.copyfile(vocabulary / "dict.txt", folder / f"input{i}" / "dict.txt")
    if task.labels:
        write_atomically(folder / "label" / "dict.txt", "".join(f"{label} 1\n" for label in task.labels))
    manifest = {"task": name, **({"layout": task.plain()} if task.own else {}), "splits": {}}
    for split, rows, dropped in splits:
        blank = sum(is_blank(text) for texts, _ in rows for text in texts)
        counts = {"rows": len(rows), "dropped": dropped, "blank": blank, "tokens": 0, "unknown": 0, "longest": 0}
        items = list(map_rows(_encode, [texts for texts, _ in rows]))
        for i, sentences in enumerate(zip(*items, strict=True)):
            write_split(folder / f"input{i}" / split, sentences, len(worker.encoder))
        ids = [list(itertools.chain(*sentences)) for sentences in items]
        counts["tokens"] = sum(map(len, ids))
        counts["unknown"] = sum(some.count(worker.encoder.ids["<unk>"]) for some in ids)
        counts["longest"] = max(len(some) + len(task.text) for some in ids)
        if rows[0][1] is not None and task.labels:
            labels = [[FIRST_LABEL + task.labels.index(label), worker.encoder.ids["</s>"]] for _, label in rows]
            write_split(folder / "label" / split, labels, FIRST_LABEL + len(task.labels))
        elif rows[0][1] is not None:
            write_atomically(folder / "label" / f"{split}.label", "".join(f"{label!r}\n" for _, label in rows))
        manifest["splits"][split] = counts
    write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1, allow_nan=False) + "\n")
    seal_all(folder, command_line(), [vocabulary / "dict.txt"])
    return manifest


# ------------------------------------------------------------------------------------------------------- the command


@click.command(cls=options.Command)
@click.option(
    "--glue", required=True, type=options.FOLDER, help="The folder of the official files, with a folder for each task."
)
@options.data("The pre-training data, whose dictionary and pieces are used.")
@options.output("The folder to write; each task gets a folder in it.")
@click.option(
    "--tasks", type=options.ListOf(), help=f"Tasks to prepare (default: all in the folder), of {', '.join(TASKS)}."
)
@options.jobs("The number of processes that encode text (default: one per core).")
@click.option("--overwrite", is_flag=True, help="Replace tasks that were prepared before.")
def command(glue, data, output, tasks, jobs, overwrite):
    """Turn the official GLUE files into data for fine-tuning, with the vocabulary of the pre-training data."""
    if (there := tasks_in(output)) and not tasks and not overwrite:
        click.echo(f"prepared already: {', '.join(there)} (--overwrite makes them anew)")
    for task, manifest in prepare(glue, data, output, tasks or (), jobs, overwrite):
        describe(task, manifest)


def describe(task: str, manifest: dict) -> None:
    """Print what was prepared, a line for each split."""
    for split, counts in manifest["splits"].items():
        notes = [f"{count} dropped ({reason})" for reason, count in counts["dropped"].items()]
        if counts["blank"]:
            notes.append(f"{counts['blank']} blank sentences")
        click.echo(
            f"{task} {split}: {counts['rows']} rows, {counts['tokens']} tokens, "
            f"{counts['unknown'] / max(counts['tokens'], 1):.2%} unknown, longest {counts['longest']}"
            + "".join(f"; {note}" for note in notes)
        )
