"""Tables with labels -> data for fine-tuning, in fairseq's binary format, with the text encoder of pre-training: GLUE's
official files, and tables of one's own."""

import itertools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path

import click
import numpy as np

from ..common import options
from ..common.options import shorten, shorten_list, task_key
from ..common.prepared import check_name, copied_encoder, tasks_in
from ..data.glue import FIRST_LABEL, TASKS, Glue, glue_name
from ..data.splits import folders_of, write_split
from ..run import processes
from ..run.checksums import seal_all
from ..run.folder import fill, write_atomically
from ..run.record import command_line
from ..text import TextEncoder
from .records import Reading, number_of, read_fields, text_of
from .stats import Stats

NO_LABEL = (None, "-")  # in GLUE's files: the annotators disagreed
MOST = 20  # different values that count as classes in a table of few rows
HELD_OUT = 0.1  # of each class


# ------------------------------------------------------------------------------------------------------------ the rows


def read_table(path: str | Path, fields: dict, label: str, reading: Reading, stats: Stats | None = None) -> list[tuple]:
    """[(place, texts, label as text, None if it is missing)] of a file. fields: {column that has to be there: the
    option that chooses it}; all but `label` hold text. Raises ValueError, with the place, for a row without one."""
    rows, text = [], [name for name in fields if name != label]
    for where, record in read_fields(path, fields, [label], reading, stats):
        for name in text:
            if not isinstance(record[name], str):
                raise ValueError(f"{where}: {name!r} is not text: {shorten(record[name])}")
        try:
            found = text_of(record.get(label))
        except ValueError as error:
            raise ValueError(f"{where}: the label {shorten(record[label])} is {error}") from None
        rows.append((where, tuple(record[name] for name in text), found))
    if not rows:
        raise ValueError(f"{path} has no row")
    return rows


def values_of(rows: list[tuple], task: Glue) -> list[tuple]:
    """[(texts, label)] as `write_task` takes them: the label is a class, a number in [0, 1] for a regression, or
    None. Raises ValueError, with the place, for an unknown label."""
    values = []
    for where, texts, label in rows:
        if label is not None and task.labels and label not in task.labels:
            raise ValueError(f"{where}: unknown label {shorten(label)}; valid: {shorten_list(task.labels)}")
        if label is not None and not task.labels:
            score = number_of(label)
            if score is None or not 0 <= score <= task.top:
                raise ValueError(f"{where}: unknown score {shorten(label)}; valid: a number from 0 to {task.top:g}")
            label = score / task.top
        values.append((texts, label))
    return values


def read_split(name: str, split: str, path: str | Path) -> tuple[list, dict]:
    """(rows as `values_of` has them, {reason: number of rows that were dropped}) of an official file of GLUE's task
    `name`. Raises ValueError with file and line for anything that is not as in the official file."""
    task, stats, labelled = TASKS[name], Stats(), not split.startswith(("test", "ax"))
    errors = task.errors if labelled else "strict"  # predictions are numbered by row
    reading = Reading(errors, unquoted=True, columns=task.header if labelled else (), numbered=not labelled)
    fields = dict.fromkeys((*task.text, task.label) if labelled else task.text, "")
    rows = read_table(path, fields, task.label, reading, stats)
    if not labelled:
        return [(texts, None) for _, texts, _ in rows], {}
    kept = [row for row in rows if row[2] not in NO_LABEL]
    dropped = {reason.removeprefix("document: "): number for reason, number in stats.dropped.items()}
    if len(kept) < len(rows):
        dropped["no label"] = len(rows) - len(kept)
    if not kept:
        raise ValueError(f"{path}: no row has a label")
    return values_of(kept, task), dropped


# ------------------------------------------------------------------------------------------- fairseq's binary format


MANY = 10_000  # rows, from which on all cores encode
_encoder: TextEncoder  # of `encoded`, also in the processes that are forked


def _encode(texts):
    clean = _encoder.normaliser.clean  # as the text of pre-training is
    return [[*_encoder.encode(clean(text)), _encoder.ids["</s>"]] for text in texts]


def encoded(rows: list[tuple], encoder: TextEncoder) -> list[list[list[int]]]:
    """The ids of each text of each row, closed by </s>. Raises ValueError if a process that encodes dies."""
    global _encoder
    _encoder, cores = encoder, len(os.sched_getaffinity(0))
    if len(rows) < MANY or cores == 1:
        return [_encode(texts) for texts, _ in rows]
    try:
        with processes.workers(cores) as pool:
            return list(pool.map(_encode, (texts for texts, _ in rows), chunksize=256))
    except BrokenExecutor as error:
        raise ValueError("a process that encodes text died (killed, or out of memory?); try again") from error


def write_task(folder: Path, name: str, task: Glue, splits: Iterable, encoder: TextEncoder) -> None:
    """Write a task into a new folder, and print a line for each split. splits: of (name, rows, {reason: number of rows
    that were dropped}), the rows as `read_split` has them."""
    (folder / "label").mkdir()
    for i in range(len(task.text)):
        (folder / f"input{i}").mkdir()
        shutil.copyfile(encoder.folder / "dict.txt", folder / f"input{i}" / "dict.txt")
    if task.labels:
        write_atomically(folder / "label" / "dict.txt", "".join(f"{label} 1\n" for label in task.labels))
    manifest = {"task": name, **({"layout": task.plain()} if task.own else {})}
    eos, unk = encoder.ids["</s>"], encoder.ids["<unk>"]
    for split, rows, dropped in splits:
        items = encoded(rows, encoder)
        for i, sentences in enumerate(zip(*items, strict=True)):
            write_split(folder / f"input{i}" / split, sentences, len(encoder))
        ids = [list(itertools.chain(*sentences)) for sentences in items]
        tokens, unknown = sum(map(len, ids)), sum(some.count(unk) for some in ids)
        longest = max(len(some) + len(task.text) for some in ids)
        click.echo(
            f"{name} {split}: {len(rows)} rows, {tokens} tokens, {unknown / max(tokens, 1):.2%} unknown, longest "
            + "; ".join([str(longest), *(f"{count} dropped ({reason})" for reason, count in dropped.items())])
        )
        if rows[0][1] is not None and task.labels:
            labels = [[FIRST_LABEL + task.labels.index(label), eos] for _, label in rows]
            write_split(folder / "label" / split, labels, FIRST_LABEL + len(task.labels))
        elif rows[0][1] is not None:
            write_atomically(folder / "label" / f"{split}.label", "".join(f"{label!r}\n" for _, label in rows))
    write_atomically(folder / "manifest.json", json.dumps(manifest, indent=1, allow_nan=False) + "\n")
    seal_all(folder, command_line(), [encoder.folder / "dict.txt"])


def check_absent(folder: Path) -> None:
    """Raise ValueError if something is where a task is to be written."""
    if folder.exists():
        raise ValueError(f"{folder} exists already; remove it, or choose another output folder")


# ---------------------------------------------------------------------------------------------------------------- GLUE


def _files_of(name, source):
    """[(split, path)] of the official files of a task that are there. Raises ValueError if one of them is required."""
    files = [(split, source / file) for split, file in TASKS[name].files]
    for split, path in files:
        if split in ("train", "valid", "valid1") and not path.exists():
            raise ValueError(f"{path} is missing")
    return [(split, path) for split, path in files if path.exists()]


@click.command(cls=options.Command)
@click.option(
    "--glue", required=True, type=options.FOLDER, help="The folder of the official files, with a folder for each task."
)
@options.data("The pre-training data, whose dictionary and pieces are used.")
@options.output("The folder to write; each task gets a folder in it.")
@click.option(
    "--tasks", type=options.ListOf(), help=f"Tasks to prepare (default: all in the folder), of {', '.join(TASKS)}."
)
def glue_command(glue, data, output, tasks):
    """Turn the official GLUE files into data for fine-tuning, with the vocabulary of the pre-training data.

    Each task gets a folder with input0, input1 and label, which fairseq's own task `sentence_prediction` reads too.
    """
    check_name(output)
    vocabulary, there = folders_of(data)[0], tasks_in(output)
    names = [glue_name(name) for name in tasks or ()] or [name for name in TASKS if (glue / name).is_dir()]
    if not names:
        raise ValueError(f"{glue} has none of the folders {', '.join(TASKS)}")
    if there and not tasks:
        click.echo(f"prepared already: {', '.join(there)}")
        names = [name for name in names if name not in there]
    for name in names:  # before anything is written
        if not (glue / name).is_dir():
            raise ValueError(f"{glue} has no folder {name}")
        check_absent(output / name)
        for split, path in _files_of(name, glue / name):
            read_split(name, split, path)
    encoder = copied_encoder(vocabulary, output)
    for name in names:
        splits = ((split, *read_split(name, split, path)) for split, path in _files_of(name, glue / name))
        fill(output / name, write_task, name, TASKS[name], splits, encoder)


# ------------------------------------------------------------------------------------------------- labels of one's own


def classes_of(rows: list[tuple], label: str) -> tuple[str, ...]:
    """The classes in the order of their ids: that of numbers, or of the alphabet. Raises ValueError for a column that
    has no classes: the same everywhere, or something else in most rows."""
    values = {found for _, _, found in rows}
    if len(values) == 1:
        raise ValueError(f"{label!r} is {shorten(values.pop())} in all {len(rows)} rows: nothing to learn")
    if len(values) > max(MOST, len(rows) / 2):
        raise ValueError(f"{label!r} has {len(values)} different values in {len(rows)} rows, such as {min(values)}")
    numbers = {value: number_of(value) for value in values}
    are_numbers = None not in numbers.values()
    return tuple(sorted(values, key=lambda value: (numbers[value], value) if are_numbers else value))


def hold_out(rows: list[tuple]) -> tuple[list[tuple], list[tuple]]:
    """(rows for training, rows held out), each in the order of the file: HELD_OUT of each class, rounded, at least one
    where it has two. The choice is always the same."""
    rng, held = np.random.default_rng(1), set()
    for label in sorted({found for _, _, found in rows}):
        indices = [i for i, row in enumerate(rows) if row[2] == label]
        count = min(max(round(HELD_OUT * len(indices)), 1), len(indices) - 1)
        held.update(rng.permutation(indices)[:count].tolist())
    return [row for i, row in enumerate(rows) if i not in held], [rows[i] for i in sorted(held)]


def check_task_name(name: str, output: Path) -> None:
    """Raise ValueError for a name that no task can have, or that would be taken for another's."""
    if not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII):
        raise ValueError(f"a task cannot be called {name!r}: give letters, digits, - and _ with --name")
    official = [other for other, task in TASKS.items() if not task.own]
    for other in (*official, *(other for other in tasks_in(output) if other != name)):
        if task_key(other) == task_key(name):
            raise ValueError(f"{name!r} would be taken for the task {other}: give another --name")


def read_own(path: Path, text: Sequence[str], label: str, reading: Reading, test: bool = False) -> list[tuple]:
    """The rows of a table of one's own. All have a label; of a test file, all or none."""
    fields = dict.fromkeys(text, "--text") | ({} if test else {label: "--label"})
    rows = read_table(path, fields, label, reading._replace(numbered=test))
    if any(found is not None for _, _, found in rows):
        while rows[-1][2] is None and not any(rows[-1][1]):  # as spreadsheets end a table
            rows.pop()
    without = [where for where, _, found in rows if found is None]
    if without and not (test and len(without) == len(rows)):
        raise ValueError(f"{without[0]}: no label in {label!r}")
    return rows


@click.command(cls=options.Command)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--text", type=options.ListOf(), required=True, help="The column (key) of the text, or two: a,b.")
@click.option("--label", required=True, help="The column of the labels.")
@options.data("The folder of the pre-training data, whose dictionary and pieces are used.")
@options.output("The folder to write. Each task has a folder in it.")
@click.option("--name", help="The name of the task (default: the file's).")
@click.option("--valid", type=click.Path(path_type=Path), help="A file of held-out rows (default: a tenth of FILE).")
@click.option("--test", type=click.Path(path_type=Path), help="A file to predict, with labels or without.")
@click.option("--unquoted", is_flag=True, help="In .csv and .tsv a quotation mark is text.")
def labels_command(file, text, label, data, output, name, valid, test, unquoted):
    """Turn a table with classes of your own into a task for fine-tuning, beside those of GLUE.

    FILE: .csv, .tsv (with a header line), .jsonl or .parquet. Each row has one or two texts and a class.
    `tupe finetune --task NAME`, `tupe sweep`, `tupe report` and `tupe predict` take the task as any other.
    """
    check_name(output)
    name, vocabulary, reading = name or file.name.partition(".")[0], folders_of(data)[0], Reading(unquoted=unquoted)
    check_task_name(name, output)
    if not 1 <= len(text) <= 2 or len({*text, label}) < len(text) + 1:
        raise ValueError(f"--text {','.join(text)}, --label {label}: give one or two columns of text and another one")
    check_absent(output / name)
    rows = read_own(file, text, label, reading)
    labels = classes_of(rows, label)
    metrics = ("accuracy", "f1" if len(labels) == 2 else "macro_f1")
    task = Glue(tuple(text), label, labels, metrics, own=True)
    if valid:
        tables = {"train": rows, "valid": read_own(valid, text, label, reading)}
    elif len(rows) < 2 * len(labels):
        raise ValueError(f"{file} has {len(rows)} rows, too few to hold some out; give --valid")
    else:
        tables = dict(zip(("train", "valid"), hold_out(rows), strict=True))
    if test:
        tables["test"] = read_own(test, text, label, reading, test=True)
    splits = [(split, values_of(rows, task), {}) for split, rows in tables.items()]
    counts = Counter(found for _, _, found in tables["train"])
    shown = [f"{each} ({counts[each] / counts.total():.1%} of training)" for each in labels]
    click.echo(f"{name}: {len(labels)} classes, in this order: {shorten_list(shown)}")
    fill(output / name, write_task, name, task, splits, copied_encoder(vocabulary, output))
