"""Trains a checkpoint further at one length after another, as Wang et al. (2021) do: 5 epochs at length 128, then 2 at
512, with the next-sentence objective, for which it gets segment embeddings.

    tupe checkpoint swap --checkpoint RUN --position rope --output swapped
    python -m lab continue --data DATA --checkpoint swapped --output DIR --next-sentence
"""

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import torch

from tupe import config
from tupe.checkpoints.change import stretch
from tupe.checkpoints.export import export
from tupe.checkpoints.trained import Trained, read_model
from tupe.common import options
from tupe.common.options import ListOf
from tupe.data.blocks import EOS, PAD
from tupe.encoder import Encoder
from tupe.positions import bounded_schemes

NEXT_SENTENCE = [
    f"common.user_dir={Path(__file__).with_name('next_sentence')}", "task._name=next_sentence",
    "criterion._name=masked_lm_next_sentence",
]  # fmt: skip


def is_made_of(trained: Trained, output: Path) -> bool:
    """Whether the folder has a model already, as that of a run that is resumed. Raises ValueError if it was made of
    another one."""
    if not (output / "config.json").exists():
        return False
    made = read_model(output).weights
    same = (name for name, x in trained.weights.items() if name in made and made[name].shape == x.shape)
    if not all(torch.equal(made[name], trained.weights[name]) for name in same):
        raise ValueError(f"{output} was made of another checkpoint; choose another --output, or delete that folder")
    return True


def stretch_to(length: int, checkpoint: Path, output: Path) -> Path:
    """The checkpoint itself if it computes `length` tokens, or else the folder `output`, which is written: the same,
    stretched. Raises ValueError as `stretch` does."""
    trained = read_model(checkpoint)
    if not bounded_schemes(trained.config.position) or length <= trained.config.max_positions:
        return checkpoint
    if not is_made_of(trained, output):
        export(stretch(trained, length), output, code=False)
    click.echo(f"{output}: {trained.config.max_positions} -> {length} positions")
    return output


def with_segments(checkpoint: Path, output: Path, dry_run: bool = False) -> Path:
    """The checkpoint itself if it has segment embeddings, or else the folder `output`, which is written: the same, with
    new ones. dry_run: nothing is."""
    trained = read_model(checkpoint)
    if trained.config.segments == "learned":
        return checkpoint
    if not dry_run and not is_made_of(trained, output):
        torch.manual_seed(1)
        model = replace(trained.config, segments="learned")
        vectors = Encoder(trained.types, PAD, EOS, model).state_dict()["segments.weight"]
        weights = {**trained.weights, "encoder.segments.weight": vectors}
        export(replace(trained, config=model, weights=weights, updates=0), output, code=False)
    return output


@click.command("continue", cls=options.Command, context_settings={"ignore_unknown_options": True})
@options.data()
@options.checkpoint("The checkpoint to go on from, for example of `tupe checkpoint swap`.")
@options.output("The folder of the runs, with a folder for each length. Existing runs are resumed.", shared=True)
@click.option("--lengths", type=ListOf(int), default="128,512", show_default=True, help="Tokens per sequence, in turn.")
@click.option(
    "--epochs", type=ListOf(click.IntRange(1)), default="5,2", show_default=True, help="Epochs at each length."
)
@click.option("--next-sentence", is_flag=True, help="Predict next sentences too, with segment embeddings.")
@click.option("--stretch", "stretches", is_flag=True, help="Make more vectors of tables that are shorter than a "
              "length, as `tupe checkpoint stretch` does.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print the commands, and run none.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[OPTIONS OF `tupe pretrain`]...")
def command(data, checkpoint, output, lengths, epochs, next_sentence, stretches, dry_run, words):
    """Train a checkpoint further, after Wang et al. (2021): 5 epochs at length 128, then 2 at length 512."""
    if len(lengths) != len(epochs) or len(set(lengths)) != len(lengths):
        raise ValueError(f"--lengths {lengths}, --epochs {epochs}: give one number of epochs for each length")
    for length in lengths:  # before the first of them is trained
        config.check("tokens_per_sample", length)
    if next_sentence:
        checkpoint = with_segments(checkpoint, output / "with_segments", dry_run)
    for length, count in zip(lengths, epochs, strict=True):
        folder = output / f"length{length}"
        if stretches and not dry_run:
            checkpoint = stretch_to(length, checkpoint, folder / "stretched")
        line = [
            "tupe", "pretrain", "--recipe=pretrain_further", f"--data={data}", f"--finetune-from-model={checkpoint}",
            f"--tokens-per-sample={length}", f"--max-epoch={count}", f"--output={folder}",
            *(NEXT_SENTENCE if next_sentence else []), *words,
        ]  # fmt: skip
        if dry_run:
            click.echo(shlex.join(line))
        elif status := subprocess.run([sys.executable, "-m", *line]).returncode:
            raise SystemExit(status)
        last = folder / "checkpoint_last.pt"
        checkpoint = last if last.exists() or dry_run else folder  # --engine torch writes the model into the folder
