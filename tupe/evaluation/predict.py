"""Predictions on the test sets in the format of the GLUE server."""

import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import torch

from ..checkpoints.folders import config_of
from ..common import record
from ..common.glue import TASKS, glue_name
from ..common.options import QuietCommand, data, output, quiet_imports
from ..common.record import write_atomically
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
@data(help="what `tupe prepare glue` wrote, with the test sets")
@output(help="folder to write")
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True)
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
    values_of = (of_folder if Path(checkpoint).is_dir() else of_file)(name, checkpoint, Path(data), batch_size)
    Path(output).mkdir(parents=True, exist_ok=True)
    for split in splits:
        labels = [_label(TASKS[name], value) for value in values_of(split)]
        path = Path(output) / FILES[name, split]
        rows = "".join(f"{index}\t{label}\n" for index, label in enumerate(labels))
        write_atomically(path, "index\tprediction\n" + rows)
        yield path, len(labels)


def _prepared(data, name, split):
    return (Path(data) / name / "input0" / f"{split}.idx").exists()


def of_file(name: str, checkpoint: str | Path, data: Path, batch_size: int) -> Callable[[str], list]:
    """Split -> class ids or real numbers of its examples, in file order, by a checkpoint of fairseq."""
    model, task = load_model(checkpoint, data)
    with quiet_imports():
        from fairseq import utils

        from ..plugin.glue import GlueTask
    _check_task(checkpoint, task.name if isinstance(task, GlueTask) else None, name)
    if torch.cuda.is_available():
        model.cuda()

    @torch.no_grad()
    def values_of(split):
        task.load_dataset(split)
        batches = task.get_batch_iterator(task.dataset(split), max_sentences=batch_size, disable_iterator_cache=True)
        found = {}
        for sample in batches.next_epoch_itr(shuffle=False):
            if torch.cuda.is_available():
                sample = utils.move_to_cuda(sample)
            head = task.cfg.classification_head_name
            logits, _ = model(**sample["net_input"], features_only=True, classification_head_name=head)
            found.update(zip(sample["id"].tolist(), _values(name, logits), strict=True))
        return [found[index] for index in range(len(found))]

    return values_of


def of_folder(name: str, folder: str | Path, data: Path, batch_size: int) -> Callable[[str], list]:
    """The same by a folder of transformers, without fairseq."""
    from transformers.utils.logging import disable_progress_bar

    from ..modeling_tupe import TupeForSequenceClassification
    from ..training.data import PAD, UNMASKED
    from ..training.glue import Examples, check_vocabulary, collate

    config_of(folder)
    trained = record.read(folder)
    _check_task(folder, trained.task if trained else name, name)
    check_vocabulary(folder, data)
    disable_progress_bar()
    model = TupeForSequenceClassification.from_pretrained(folder).float().eval()
    if model.config.num_labels != TASKS[name].outputs:
        _check_task(folder, None, name)
    if torch.cuda.is_available():
        model.cuda()

    @torch.no_grad()
    def values_of(split):
        examples, found = Examples(data / name, split, model.config.max_position_embeddings), {}
        for batch in examples.longest_first(batch_size):
            inputs = collate([examples[UNMASKED, i] for _, i in batch])
            ids = inputs["input_ids"].to(model.device)
            found.update(zip(inputs["rows"], _values(name, model(ids, ids.ne(PAD)).logits), strict=True))
        return [found[index] for index in range(len(found))]

    return values_of


def _check_task(checkpoint, trained_on, name):
    if trained_on != name:
        raise ValueError(f"{checkpoint} was not fine-tuned on {name}, but on {trained_on or 'something else'}")


def _values(name, logits):
    """Class ids, or real numbers."""
    return (logits.argmax(dim=1) if TASKS[name].labels else logits.float().squeeze(1)).tolist()


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
