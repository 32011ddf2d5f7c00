"""Predictions on the test sets in the format of the GLUE server."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click
import torch
from fairseq import utils

from ..common.glue import TASKS, glue_name
from ..common.options import QuietCommand, data, output
from ..common.record import write_atomically
from ..plugin.glue import GlueTask
from ..plugin.model import TupeModel
from .loading import load_model, split_label

# (task, split) -> file name; the server expects the official label names, and STS-B scores from 0 to 5.
FILES = {
    **{(name, "test"): f"{name}.tsv" for name in TASKS if name != "MNLI"},
    ("MNLI", "test"): "MNLI-m.tsv",
    ("MNLI", "test1"): "MNLI-mm.tsv",
    ("MNLI", "ax"): "AX.tsv",
}


@click.command(cls=QuietCommand)
@click.argument("checkpoints", nargs=-1, required=True, metavar="TASK=CHECKPOINT ...")
@data(help="The folder that `tupe prepare glue` wrote, with the test sets.")
@output(help="The folder to write.")
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Texts at a time.")
def command(checkpoints, data, output, batch_size):
    """Write the files that the GLUE server takes: one per test set, with the official names and labels, and all of them
    in submission.zip.

    TASK=CHECKPOINT: a task of GLUE and its fine-tuned checkpoint. MNLI gives MNLI-m.tsv, MNLI-mm.tsv and, if it was
    prepared, AX.tsv. Tasks without a checkpoint are left out.
    """
    for given in checkpoints:
        if "=" not in given:
            raise ValueError(f"{given!r} is not of the form TASK=CHECKPOINT")
    paths = []
    for task, checkpoint in [split_label(given) for given in checkpoints]:
        for path, count in predict_glue(task, checkpoint, data, output, batch_size):
            paths.append(path)
            click.echo(f"{path}: {count} predictions")
    click.echo(zip_submission(output, paths))


def predict_glue(name: str, checkpoint: str | Path, data: str | Path, output: Path, batch_size: int = 64) -> Iterator:
    """Write a checkpoint's predictions on the test sets of its task. Yields (path, number of predictions).

    Raises ValueError for a checkpoint that cannot be read or is of another task, and when no test set was prepared.
    """
    name = glue_name(name)
    splits = [split for task, split in FILES if task == name and _prepared(data, name, split)]
    if not splits:
        raise ValueError(f"{data} holds no test set of {name}; put its test.tsv beside train.tsv and prepare it again")
    model, task = load_model(checkpoint, data)
    trained_on = task.name if isinstance(task, GlueTask) else "something else"
    if trained_on != name:
        raise ValueError(f"{checkpoint} was not fine-tuned on {name}, but on {trained_on}")
    if torch.cuda.is_available():
        model.cuda()
    Path(output).mkdir(parents=True, exist_ok=True)
    for split in splits:
        labels = [_label(task.glue, value) for value in predict(model, task, split, batch_size)]
        path = Path(output) / FILES[name, split]
        rows = "".join(f"{index}\t{label}\n" for index, label in enumerate(labels))
        write_atomically(path, "index\tprediction\n" + rows)
        yield path, len(labels)


def _prepared(data, name, split):
    return (Path(data) / name / "input0" / f"{split}.idx").exists()


@torch.no_grad()
def predict(model: TupeModel, task: GlueTask, split: str, batch_size: int) -> list:
    """Class ids or real numbers for every example of a split, in file order."""
    task.load_dataset(split)
    batches = task.get_batch_iterator(task.dataset(split), max_sentences=batch_size, disable_iterator_cache=True)
    values_of = {}
    for sample in batches.next_epoch_itr(shuffle=False):
        if torch.cuda.is_available():
            sample = utils.move_to_cuda(sample)
        head = task.cfg.classification_head_name
        output, _ = model(**sample["net_input"], features_only=True, classification_head_name=head)
        values = output.argmax(dim=1) if task.glue.labels else output.float().squeeze(1)
        values_of.update(zip(sample["id"].tolist(), values.tolist(), strict=True))
    return [values_of[index] for index in range(len(values_of))]


def _label(glue, value):
    if glue.labels:
        return glue.labels[value]
    return f"{min(max(value, 0.0), 1.0) * glue.top:.3f}"


def zip_submission(output: Path, files: list[Path]) -> Path:
    """Zip these prediction files (not what an earlier run left) as submission.zip in the folder `output`; returns its
    path."""
    path, content = Path(output) / "submission.zip", io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in files:
            archive.write(file, file.name)
    write_atomically(path, content.getvalue())
    return path
