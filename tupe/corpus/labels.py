"""A table with labels of one's own -> data for fine-tuning, as GLUE's tasks have it."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

from ..common import options
from ..common.options import shorten, shorten_list, task_key
from ..common.prepared import check_name, check_replaced, encoding, tasks_in
from ..data.glue import TASKS, Glue
from ..data.splits import folders_of
from .records import number_of, read_fields, text_of
from .tasks import describe, prepare_task

MOST = 20  # different numbers that count as classes
HELD_OUT = 0.1  # of each class


def read_table(
    path: Path, text: Sequence[str], label: str, labelled: bool | None = True, unquoted: bool = False
) -> list[tuple]:
    """[(place, texts, label as text, or None)] of a file. labelled: None where all rows have a label, or none has.

    Raises ValueError, with the place, for a row without one of them.
    """
    rows = []
    needed = dict.fromkeys(text, "--text") | ({label: "--label"} if labelled else {})
    for where, record in read_fields(path, needed, [label], unquoted):
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
    without = [where for where, _, found in rows if found is None]
    if without and (labelled or len(without) < len(rows)):
        raise ValueError(f"{without[0]}: no label in {label!r}")
    return rows


def classes_of(rows: list[tuple], label: str, given: Sequence[str] | None) -> tuple[str, ...]:
    """The classes in the order of their ids: the given one, that of numbers, or of the alphabet. Raises ValueError for
    a column that has no classes: measured numbers, names, or the same everywhere."""
    values = {found for _, _, found in rows}
    if given and len({*given}) < len(given):
        raise ValueError(f"--labels {','.join(given)}: a label twice")
    if len(values) == 1:
        raise ValueError(f"{label!r} is {shorten(values.pop())} in all {len(rows)} rows: nothing to learn")
    if given:
        return tuple(given)
    numbers = {value: number_of(value) for value in values}
    odd = [value for value in values if numbers[value] is not None and not re.fullmatch("[+-]?[0-9]+", value)]
    all_numbers = None not in numbers.values()
    if odd or (all_numbers and len(values) > MOST):
        example = min(odd or values)
        raise ValueError(f"{label!r} has numbers such as {example}: if they are classes, name them all with --labels")
    if len(values) > max(MOST, len(rows) / 2):
        raise ValueError(f"{label!r} has {len(values)} different values in {len(rows)} rows; choose another --label")
    return tuple(sorted(values, key=lambda value: (numbers[value], value) if all_numbers else value))


def values_of(rows: list[tuple], task: Glue) -> list[tuple]:
    """[(texts, label)] as `prepare_task` takes them. Raises ValueError, with the place, for an unknown label."""
    for where, _, found in rows:
        if found is not None and found not in task.labels:
            raise ValueError(f"{where}: unknown label {shorten(found)}; valid: {shorten_list(task.labels)}")
    return [(texts, found) for _, texts, found in rows]


def hold_out(rows: list[tuple]) -> tuple[list[tuple], list[tuple]]:
    """(rows for training, rows held out), each in the order of the file: HELD_OUT of each class, rounded, at least one
    where it has two. The choice is always the same."""
    rng, classes = np.random.default_rng(1), {}
    for i, (_, _, found) in enumerate(rows):
        classes.setdefault(found, []).append(i)
    held = set()
    for _, indices in sorted(classes.items()):
        count = min(max(round(HELD_OUT * len(indices)), 1), len(indices) - 1)
        held.update(rng.permutation(indices)[:count].tolist())
    return [row for i, row in enumerate(rows) if i not in held], [rows[i] for i in sorted(held)]


def check_task_name(name: str, output: Path) -> None:
    """Raise ValueError for a name that no task can have, or that would be taken for another's."""
    if not re.fullmatch(r"[A-Za-z][\w-]*", name, re.ASCII):
        raise ValueError(f"a task cannot be called {name!r}: give letters, digits, - and _ with --name")
    others = [other for other in tasks_in(output) if other != name] if output.is_dir() else []
    official = [other for other, task in TASKS.items() if not task.own]
    for other in (*official, *others):
        if task_key(other) == task_key(name):
            raise ValueError(f"{name!r} would be taken for the task {other}: give another --name")


def prepare(
    file: Path, vocabulary: Path, output: Path, name: str, text: Sequence[str], label: str, valid: Path | None = None,
    test: Path | None = None, order: Sequence[str] | None = None, workers: int | None = None, overwrite: bool = False,
    unquoted: bool = False,
) -> dict:  # fmt: skip
    """Write the folder `output`/`name`; returns its manifest. vocabulary: folder of the pre-training data. valid: file
    of the held-out rows; else they are a share of `file`. order: of the classes. Prints what the labels are.

    Raises ValueError, before anything is written, for whatever is wrong in one of the files.
    """
    check_name(output)
    vocabulary = folders_of(vocabulary)[0]
    check_task_name(name, output)
    if not 1 <= len(text) <= 2 or len({*text, label}) < len(text) + 1:
        raise ValueError(f"--text {','.join(text)}, --label {label}: give one or two columns of text and another one")
    check_replaced(output, name, overwrite)
    rows = read_table(file, text, label, unquoted=unquoted)
    labels = classes_of(rows, label, order)
    metrics = ("accuracy", "f1" if len(labels) == 2 else "macro_f1")
    task = Glue(tuple(text), label, labels, metrics, own=True)
    values_of(rows, task)
    if valid:
        tables = {"train": rows, "valid": read_table(valid, text, label, unquoted=unquoted)}
    elif len(rows) < 2 * len(labels):
        raise ValueError(f"{file} has {len(rows)} rows, too few to hold some out; give --valid")
    else:
        tables = dict(zip(("train", "valid"), hold_out(rows), strict=True))
    if test:
        tables["test"] = read_table(test, text, label, None, unquoted)
    splits = [(split, values_of(rows, task), {}) for split, rows in tables.items()]
    counts = Counter(found for _, _, found in tables["train"])
    shown = [f"{each} ({counts[each] / counts.total():.1%} of training)" for each in labels]
    click.echo(f"{name}: {len(labels)} classes, in this order: {shorten_list(shown)}")
    known = {texts for texts, _ in splits[0][1]}
    if again := sum(texts in known for texts, _ in splits[1][1]):
        click.echo(f"{name}: {again} of {len(splits[1][1])} held-out texts stand in training too")
    with encoding(vocabulary, output, workers) as map_rows:
        return prepare_task(name, task, splits, vocabulary, output, map_rows)


@click.command(cls=options.Command)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--text", type=options.ListOf(), required=True, help="The column (key) of the text, or two: a,b.")
@click.option("--label", required=True, help="The column of the labels.")
@options.data("The folder of the pre-training data, whose dictionary and pieces are used.")
@options.output("The folder to write. Each task has a folder in it.")
@click.option("--name", help="The name of the task (default: the file's).")
@click.option("--valid", type=click.Path(path_type=Path), help="A file of held-out rows (default: a tenth of FILE).")
@click.option("--test", type=click.Path(path_type=Path), help="A file to predict, with labels or without.")
@click.option("--labels", type=options.ListOf(), help="The classes in the order of their ids (default: sorted).")
@click.option("--unquoted", is_flag=True, help="In .csv and .tsv a quotation mark is text.")
@options.jobs("Processes that encode text (default: one per core).")
@click.option("--overwrite", is_flag=True, help="Replace a task that was prepared before.")
def command(file, text, label, data, output, name, valid, test, labels, unquoted, jobs, overwrite):
    """Turn a table with classes of your own into a task for fine-tuning, beside those of GLUE.

    FILE: .csv, .tsv (with a header line), .jsonl, .json or .parquet. Each row has one or two texts and a class.
    `tupe finetune --task NAME`, `tupe sweep`, `tupe report` and `tupe predict` take the task as any other.
    """
    name = name or file.name.partition(".")[0]
    describe(name, prepare(file, data, output, name, text, label, valid, test, labels, jobs, overwrite, unquoted))
