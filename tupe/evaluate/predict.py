"""Predictions on the test sets in the format of the GLUE server."""

from collections.abc import Iterator
from pathlib import Path

import click
import torch

from ..checkpoints.trained import check_dictionary, read_model
from ..common.options import QuietCommand, data, output, shorten_list, task_key
from ..data.blocks import PAD
from ..data.examples import Examples, collate
from ..data.glue import TASKS, glue_name, score
from ..data.masks import UNMASKED
from ..data.splits import read_symbols
from ..modeling_tupe import TupeForSequenceClassification
from ..run import record
from ..run.folder import write_atomically
from .loading import labelled, to_device

# (task, split) -> file name; the server expects the official label names, and STS-B scores from 0 to 5. A task with
# labels of its own has one test set.
FILES = {
    **{(name, "test"): f"{name}.tsv" for name in TASKS if name != "MNLI"},
    ("MNLI", "test"): "MNLI-m.tsv",
    ("MNLI", "test1"): "MNLI-mm.tsv",
    ("MNLI", "ax"): "AX.tsv",
}


@click.command(cls=QuietCommand)
@click.argument("checkpoints", nargs=-1, required=True, metavar="TASK=CHECKPOINT ...")
@data(help="The folder that `tupe prepare glue` or `labels` wrote, with the test sets.")
@output(help="The folder to write.")
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Texts at a time.")
def command(checkpoints, data, output, batch_size):
    """Write the files that the GLUE server takes: one per test set, with the official names and labels. It takes a zip
    archive of them.

    TASK=CHECKPOINT: a task of GLUE, or of `tupe prepare labels`, and its fine-tuned checkpoint, a file or a folder.
    MNLI gives MNLI-m.tsv, MNLI-mm.tsv and, if it was prepared, AX.tsv. Tasks without a checkpoint are left out.
    """
    named = labelled(checkpoints)
    read_symbols(data)  # raises ValueError for what is no folder of prepared data
    for task, checkpoint in named.items():
        for path, count, scores in predict_glue(task, checkpoint, data, output, batch_size):
            shown = "".join(f", {name} {value:.2f}" for name, value in (scores or {}).items())
            click.echo(f"{path}: {count} predictions{shown}")


def predict_glue(name: str, checkpoint: str | Path, data: str | Path, output: Path, batch_size: int = 64) -> Iterator:
    """Write a checkpoint's predictions on the test sets of its task. Yields (path, number of predictions, scores: None
    of a test set without labels).

    Raises ValueError for a checkpoint that cannot be read or is of another task or other labels, and when no test set
    was prepared.
    """
    name = glue_name(name, data)
    glue, folder = TASKS[name], Path(data) / name
    known = ["test"] if glue.own else [split for task, split in FILES if task == name]
    splits = [split for split in known if (folder / "input0" / f"{split}.idx").exists()]
    if not splits:
        how = "--test FILE" if glue.own else "its test.tsv beside train.tsv"
        raise ValueError(f"{data} holds no test set of {name}; prepare it again with {how}")
    model = classifier(name, checkpoint, Path(data))
    Path(output).mkdir(parents=True, exist_ok=True)
    for split in splits:
        examples = Examples(folder, split, model.config.max_position_embeddings)
        logits = logits_of(model, examples, batch_size)
        values = (logits.argmax(1) if glue.labels else logits.squeeze(1)).tolist()
        if glue.labels:
            answers = [glue.labels[value] for value in values]
        else:
            answers = [f"{min(max(value, 0), glue.top):.3f}" for value in values]
        path = Path(output) / (f"{name}.tsv" if glue.own else FILES[name, split])
        rows = "".join(f"{index}\t{answer}\n" for index, answer in enumerate(answers))
        write_atomically(path, "index\tprediction\n" + rows)
        yield path, len(values), None if examples.targets is None else score(glue.metrics, values, examples.targets)


def classifier(name: str, checkpoint: str | Path, data: Path) -> TupeForSequenceClassification:
    """The fine-tuned model of a task. Raises ValueError as `predict_glue` does."""
    trained, glue = read_model(checkpoint), TASKS[name]
    about = record.read(trained.run) or record.read(trained.run.parent)
    trained_on = trained.task.get("glue_task") or (about.task if about else None)
    if not trained.heads() or task_key(trained_on or name) != task_key(name):
        raise ValueError(f"{checkpoint} was not fine-tuned on {name}, but on {trained_on or 'something else'}")
    head = trained.only_head()
    names = trained.label_names(head)
    if names != [*glue.names]:
        ours, theirs = shorten_list(glue.names), shorten_list(names)
        raise ValueError(f"{name}: the labels are {theirs} in {checkpoint}, {ours} in the data")
    check_dictionary(trained.weights, data / "dict.txt")
    return trained.model(TupeForSequenceClassification, head)


@torch.inference_mode()
def logits_of(model: TupeForSequenceClassification, examples: Examples, batch_size: int) -> torch.Tensor:
    """[examples, outputs]; of a regression in the units of its labels."""
    to_device(model)
    logits = torch.empty(len(examples), model.config.num_labels)
    for batch in examples.longest_first(batch_size):
        batch = collate([examples[UNMASKED, i] for _, i in batch])
        ids = batch["input_ids"].to(model.device)
        logits[list(batch["rows"])] = model(ids, (ids != PAD).long()).logits.float().cpu()
    return logits
