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
from ..data.glue import METRICS, TASKS, Glue
from .glue import describe, prepare_task, remove_partial
from .records import number_of, read_fields, text_of

MOST = 20  # different whole numbers that count as classes
KINDS = {"classes": ("accuracy", "f1", "macro_f1", "matthews"), "numbers": ("pearson", "spearman")}  # their metrics


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
                raise ValueError(f"{where}: {name!r} is no text: {shorten(record[name])}")
            if re.search("[\0\ud800-\udfff]", record[name]):
                raise ValueError(f"{where}: {name!r} has a NUL or half of a surrogate pair: {shorten(record[name])}")
        try:
            found = text_of(record.get(label))
        except ValueError as error:
            raise ValueError(f"{where}: the label {shorten(record[label])} is {error}") from None
        if found and re.search(r"[\x00-\x1f\x7f]", found):  # files of labels and predictions have one in a line
            raise ValueError(f"{where}: the label {shorten(found)} has a line break, a tab or a control character")
        rows.append((where, tuple(record[name] for name in text), found))
    if not rows:
        raise ValueError(f"{path} has no row")
    without = [where for where, _, found in rows if found is None]
    if without and (labelled or len(without) < len(rows)):
        raise ValueError(f"{without[0]}: no label in {label!r}")
    return rows


def kind_of_labels(rows: list[tuple], label: str) -> str:
    """ "classes", unless the labels may be meant as numbers: then ValueError asks for the kind. So it does for as many
    classes as a name or a number of a row would have."""
    values = {found for _, _, found in rows}
    numbers = [value for value in values if number_of(value) is not None]
    odd = [value for value in numbers if not re.fullmatch("[+-]?[0-9]+", value)]
    if odd or (len(numbers) == len(values) > MOST):
        raise ValueError(f"{label!r} has numbers such as {min(odd or numbers)}: give --kind numbers or --kind classes")
    if len(values) > max(MOST, len(rows) / 2):
        raise ValueError(f"{label!r} has {len(values)} different values in {len(rows)} rows; choose another --label")
    return "classes"


def order_of(rows: list[tuple], given: Sequence[str] | None) -> tuple[str, ...]:
    """The classes in the order of their ids: the given one, that of numbers, or of the alphabet."""
    if given:
        if len({*given}) < len(given):
            raise ValueError(f"--labels {','.join(given)}: a label twice")
        return tuple(given)
    numbers = {value: number_of(value) for _, _, value in rows}
    if None in numbers.values():
        return tuple(sorted(numbers))
    return tuple(sorted(numbers, key=lambda value: (numbers[value], value)))


def _number(where, found):
    if (number := number_of(found)) is None:
        raise ValueError(f"{where}: {shorten(found)} is no number")
    return number


def values_of(rows: list[tuple], task: Glue) -> list[tuple]:
    """[(texts, label)] as `prepare_task` takes them. Raises ValueError, with the place, for an unknown label."""
    values = []
    for where, texts, found in rows:
        if found is None:
            values.append((texts, None))
        elif task.labels:
            if found not in task.labels:
                raise ValueError(f"{where}: unknown label {shorten(found)}; valid: {shorten_list(task.labels)}")
            values.append((texts, found))
        else:
            values.append((texts, (_number(where, found) - task.bottom) / (task.top - task.bottom)))
    return values


def hold_out(rows: list[tuple], share: float, seed: int, by_class: bool) -> tuple[list[tuple], list[tuple]]:
    """(rows for training, rows held out), each in the order of the file: `share` of each class, rounded, at least one
    where it has two."""
    rng, groups = np.random.default_rng(seed), {}
    for i, (_, _, found) in enumerate(rows):
        groups.setdefault(found if by_class else "", []).append(i)
    held = set()
    for _, indices in sorted(groups.items()):
        count = min(max(round(share * len(indices)), 1), len(indices) - 1)
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


def task_from(
    rows: list[tuple], text: Sequence[str], label: str, kind: str | None, order: Sequence[str] | None,
    metrics: Sequence[str] | None,
) -> Glue:  # fmt: skip
    """The task that the rows for training are of."""
    kind = kind or ("classes" if order else kind_of_labels(rows, label))
    values = {found for _, _, found in rows}
    if len(values) == 1:
        raise ValueError(f"{label!r} is {shorten(values.pop())} in all {len(rows)} rows: nothing to learn")
    if kind == "numbers":
        if order:
            raise ValueError("--labels is for classes, not for --kind numbers")
        numbers = [_number(where, found) for where, _, found in rows]
        labels, more = (), {"bottom": min(numbers), "top": max(numbers)}
    else:
        labels, more = order_of(rows, order), {}
    default = KINDS[kind] if kind == "numbers" else ("accuracy", "f1") if len(labels) == 2 else ("accuracy", "macro_f1")
    for metric in metrics or ():
        if metric not in KINDS[kind] or metric == "f1" and len(labels) != 2:
            valid = [name for name in KINDS[kind] if name != "f1" or len(labels) == 2]
            raise ValueError(f"--metrics {metric}: valid for these labels: {', '.join(valid)}")
    return Glue(tuple(text), label, labels, tuple(metrics or default), own=True, **more)


def prepare(
    file: Path, vocabulary: Path, output: Path, name: str, text: Sequence[str], label: str, valid: Path | None,
    test: Path | None, share: float, seed: int, kind: str | None, order: Sequence[str] | None,
    metrics: Sequence[str] | None, workers: int | None, overwrite: bool, unquoted: bool,
) -> dict:  # fmt: skip
    """Write the folder `output`/`name`; returns its manifest. vocabulary: folder of the pre-training data. valid: file
    of the held-out rows; else they are a share of `file`. Prints what the labels are.

    Raises ValueError, before anything is written, for whatever is wrong in one of the files.
    """
    check_name(output)
    check_task_name(name, output)
    if not 1 <= len(text) <= 2 or len({*text, label}) < len(text) + 1:
        raise ValueError(f"--text {','.join(text)}, --label {label}: give one or two columns of text and another one")
    check_replaced(output, name, overwrite)
    rows = read_table(file, text, label, unquoted=unquoted)
    task = task_from(rows, text, label, kind, order, metrics)
    values_of(rows, task)
    tables = {"train": rows, "valid": read_table(valid, text, label, unquoted=unquoted) if valid else None}
    if not valid:
        if len(rows) < 2 * max(2, len(task.labels)):
            raise ValueError(f"{file} has {len(rows)} rows, too few to hold some out; give --valid")
        tables["train"], tables["valid"] = hold_out(rows, share, seed, bool(task.labels))
    if test:
        tables["test"] = read_table(test, text, label, None, unquoted)
    splits = [(split, values_of(rows, task), {}) for split, rows in tables.items()]
    if task.labels:
        counts = Counter(found for _, _, found in tables["train"])
        shown = [f"{each} ({counts[each] / counts.total():.1%} of training)" for each in task.labels]
        click.echo(f"{name}: {len(task.labels)} classes, in this order: {shorten_list(shown)}")
        if lonely := [each for each in task.labels if not counts[each]]:
            click.echo(f"{name}: no row of training has the label {shorten_list(lonely)}")
    else:
        click.echo(f"{name}: numbers from {task.bottom:g} to {task.top:g}")
    known = {texts for texts, _ in splits[0][1]}
    if again := sum(texts in known for texts, _ in splits[1][1]):
        click.echo(f"{name}: {again} of {len(splits[1][1])} held-out texts stand in training too")
    with encoding(vocabulary, output, [name], workers) as map_rows:
        remove_partial(output)
        return prepare_task(name, task, splits, vocabulary, output, map_rows)


@click.command(cls=options.Command)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--text", type=options.ListOf(), required=True, help="The column (key) of the text, or two: a,b.")
@click.option("--label", required=True, help="The column of the labels.")
@options.data("The folder of the pre-training data, whose dictionary and pieces are used.")
@options.output("The folder to write. Each task has a folder in it.")
@click.option("--name", help="The name of the task (default: the file's).")
@click.option("--valid", type=click.Path(path_type=Path), help="A file of held-out rows (default: a share of FILE).")
@click.option("--test", type=click.Path(path_type=Path), help="A file to predict, with labels or without.")
@click.option(
    "--held-out", type=click.FloatRange(0, 0.5, min_open=True), default=0.1, show_default=True,
    help="The share of each class that is held out.",
)  # fmt: skip
@options.seed(help="The seed of the choice of held-out rows.")
@click.option(
    "--kind", type=click.Choice(list(KINDS)),
    help=f"The kind of the labels (default: classes; needed for numbers that are not whole, or more than {MOST}).",
)  # fmt: skip
@click.option("--labels", type=options.ListOf(), help="The classes in the order of their ids (default: sorted).")
@click.option(
    "--metrics", type=options.ListOf(),
    help=f"The scores, of {', '.join(METRICS)}. The first chooses the best epoch.",
)  # fmt: skip
@click.option("--unquoted", is_flag=True, help="In .csv and .tsv a quotation mark is text.")
@options.jobs("Processes that encode text (default: one per core).")
@click.option("--overwrite", is_flag=True, help="Replace a task that was prepared before.")
def command(
    file, text, label, data, output, name, valid, test, held_out, seed, kind, labels, metrics, unquoted, jobs, overwrite
):  # fmt: skip
    """Turn a table with labels of your own into a task for fine-tuning, beside those of GLUE.

    FILE: .csv, .tsv (with a header line), .jsonl, .json, .parquet or .arrow. Each row has one or two texts and a class
    or a number. `tupe finetune --task NAME`, `tupe sweep`, `tupe report` and `tupe predict` take the task as any other.
    """
    name = name or Path(file).name.partition(".")[0]
    manifest = prepare(
        Path(file), Path(data), Path(output), name, text, label, valid, test, held_out, seed, kind, labels, metrics,
        jobs, overwrite, unquoted,
    )  # fmt: skip
    describe(name, manifest)
